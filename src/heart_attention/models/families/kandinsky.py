"""Kandinsky 5 and 6: video self-attention; text and audio have attention of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Family, Grid


class Kandinsky5(Family):
    """Latents come as [B, frames, height, width, channels]."""

    classes = ("Kandinsky5Transformer3DModel",)
    layers = (r"visual_transformer_blocks\.\d+\.self_attention",)

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid:
        """Frames, rows, columns."""
        *_, frames, height, width, _ = given["hidden_states"].shape
        t, h, w = config.patch_size
        return frames // t, height // h, width // w


class Kandinsky6(Kandinsky5):
    """Blocks hold a video and an audio part; the video's is served."""

    classes = ("Kandinsky6Transformer3DModel",)
    layers = (r"visual_transformer_blocks\.\d+\.video_dec_block\.self_attention",)
