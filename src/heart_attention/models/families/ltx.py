"""LTX-Video and LTX-2: video self-attention; the sequence may hold conditioning tokens beside the grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Family, Grid


class LTX(Family):
    """Tokens arrive as a sequence; the grid is told by `num_frames`, `height` and `width`."""

    classes = ("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel")
    layers = (r"transformer_blocks\.\d+\.attn1",)

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid | None:
        """Frames, rows, columns, if they make up the whole sequence."""
        frames, rows, columns = (given.get(name) for name in ("num_frames", "height", "width"))
        if frames is None or rows is None or columns is None:
            return None
        whole = frames * rows * columns == given["hidden_states"].shape[1]
        return (frames, rows, columns) if whole else None
