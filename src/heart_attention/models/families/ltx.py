"""LTX-Video and LTX-2: video self-attention; the sequence may hold conditioning tokens beside the grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .base import Family, Grid


class LTX(Family):
    """Tokens arrive as a sequence; the grid is told by `num_frames`, `height` and `width`."""

    classes = ("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel")
    layers = (r"transformer_blocks\.\d+\.attn1",)

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid | None:
        """Frames, rows, columns, if they make up the whole sequence."""
        grid = (given.get("num_frames"), given.get("height"), given.get("width"))
        if None in grid or math.prod(grid) != given["hidden_states"].shape[1]:
            return None
        return grid
