"""Mochi: joint attention, called item by item with the valid text tokens after the video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...masks import Text
from .base import Family, Grid


class Mochi(Family):
    """Mochi's timesteps grow from 0 while it denoises."""

    classes = ("MochiTransformer3DModel",)
    kind = "joint"
    layers = (r"transformer_blocks\.\d+\.attn1",)
    rising = True
    item_by_item = True

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid:
        """Frames, rows, columns."""
        *_, frames, height, width = given["hidden_states"].shape
        return frames, height // config.patch_size, width // config.patch_size

    def inputs(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """The text's padding mask."""
        return [given["encoder_attention_mask"]]

    def text(self, inputs: list[torch.Tensor], tokens: int) -> list[Text]:
        """Only valid text tokens are in the sequence."""
        return [Text(tokens, valid) for valid in inputs[0].bool().sum(1).tolist()]
