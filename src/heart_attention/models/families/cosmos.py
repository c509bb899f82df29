"""Cosmos (1.0 and 2) and Allegro: self-attention apart from cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Family, Grid


class Cosmos(Family):
    """`attn1` is video self-attention."""

    classes = ("CosmosTransformer3DModel",)
    layers = (r"transformer_blocks\.\d+\.attn1",)


class Allegro(Cosmos):
    """Patches have one size for time and one for space."""

    classes = ("AllegroTransformer3DModel",)

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid:
        """Frames, rows, columns."""
        *_, frames, height, width = given["hidden_states"].shape
        t, p = config.patch_size_t, config.patch_size
        return frames // t, height // p, width // p


class Latte(Cosmos):
    """Attention inside each frame; that over time, a few frames long, is left alone."""

    classes = ("LatteTransformer3DModel",)

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid:
        """One frame's rows and columns; frames are batch items."""
        *_, height, width = given["hidden_states"].shape
        return 1, height // config.patch_size, width // config.patch_size
