#!/bin/sh
# HEART in vLLM-Omni: the code is heart_attention.hosts.vllm_omni, loaded by vLLM-Omni as a plug-in of its own accord.
# HEART_VLLM_OMNI is a preset's name, a config or a calibration file; self-attention is given to the slot that HEART takes.
HEART_VLLM_OMNI="${HEART_VLLM_OMNI:-wan2.1-14b-xattention}" exec vllm serve "${1:-Wan-AI/Wan2.1-T2V-14B-Diffusers}" --omni \
    --diffusion-attention-config '{"per_role": {"self": {"backend": "TORCH_SDPA"}}}'
