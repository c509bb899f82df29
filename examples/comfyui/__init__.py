"""HEART's node in ComfyUI: copy this folder to ComfyUI/custom_nodes/heart. The code is heart_attention.hosts.comfyui."""

from heart_attention.hosts.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
