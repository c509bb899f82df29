"""Helios: self-attention over history, at three resolutions, and then the video."""

from __future__ import annotations

import torch

from ...masks import Text
from .base import Family


class Helios(Family):
    """History comes before the video; what the sequence holds beyond the video's grid is history, and exact."""

    classes = ("HeliosTransformer3DModel",)
    kind = "joint"
    packed = True

    def locate(self, text: list[Text] | None, tokens: int, q: torch.Tensor) -> list[Text] | None:
        """History first."""
        history = q.shape[2] - tokens
        return [Text(0, history)] * q.shape[0] if history > 0 else None
