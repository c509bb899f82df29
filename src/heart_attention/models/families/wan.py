"""Wan 2.1 and 2.2 and what descends from them: self-attention apart from cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Family, Grid


class Wan(Family):
    """`attn1` is video self-attention; `attn2` (text and image) and the face adapters are never touched."""

    classes = (
        "WanTransformer3DModel",  # T2V, I2V, TI2V, of Wan 2.1 and 2.2
        "WanAnimateTransformer3DModel",
        "SkyReelsV2Transformer3DModel",
        "ChronoEditTransformer3DModel",
    )


class WanVACE(Family):
    """The control branch's blocks attend over the same tokens and count as further layers."""

    classes = ("WanVACETransformer3DModel",)
    layers = (r"blocks\.\d+\.attn1", r"vace_blocks\.\d+\.attn1")


class AnyFlow(Family):
    """Latents come as [B, frames, channels, height, width]."""

    classes = ("AnyFlowTransformer3DModel",)

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid:
        """Frames, rows, columns."""
        _, frames, _, height, width = given["hidden_states"].shape
        t, h, w = config.patch_size
        return frames // t, height // h, width // w
