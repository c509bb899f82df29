"""CogVideoX: joint attention, text before the video; all text tokens take part, padding too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...masks import Text
from .base import Family, Grid


class CogVideoX(Family):
    """Latents come as [B, frames, channels, height, width]."""

    kind = "joint"
    layers = (r"transformer_blocks\.\d+\.attn1",)

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid:
        """Frames, rows, columns."""
        _, frames, _, height, width = given["hidden_states"].shape
        t, p = config.patch_size_t or 1, config.patch_size
        return (frames + t - 1) // t, height // p, width // p

    def inputs(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """The text, for its length."""
        return [given["encoder_hidden_states"]]

    def text(self, inputs: list[torch.Tensor], tokens: int) -> list[Text]:
        """Text first, all of it valid."""
        batch, length = inputs[0].shape[:2]
        return [Text(0, length)] * batch
