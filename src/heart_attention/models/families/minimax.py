"""MiniMax-H3: one packed sequence of text, conditioning images, audio and, last, the video that is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...masks import Text
from .base import Family, Grid


class MiniMaxH3(Family):
    """The caller says at which places the video's rows lie; everything before their last run is exact.

    Timesteps grow from 0 to 1 while it denoises; rows of conditions have theirs near 1.
    """

    classes = ("MiniMaxH3Transformer3DModel",)
    kind = "joint"
    packed = True
    rising = True
    layers = (r"transformer_blocks\.\d+\.attn",)

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid | None:
        """Rows come as a sequence, and no argument tells the grid by its shape."""
        return None

    def inputs(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """The places of video rows, and one row of positions for every token."""
        return [given["video_indices"], given["position_ids"]]

    def text(self, inputs: list[torch.Tensor], tokens: int) -> list[Text]:
        """All that comes before the last run of video rows, which must end the sequence."""
        places, positions = inputs
        offsets = places - torch.arange(len(places), device=places.device)  # equal along a run
        start = int(offsets[-1]) + int((offsets != offsets[-1]).sum())
        if int(places[-1]) != len(positions) - 1:
            raise ValueError("the video does not end the packed sequence")
        return [Text(0, start)]

    def locate(self, text: list[Text] | None, tokens: int, q: torch.Tensor) -> list[Text] | None:
        """Batch items share one layout."""
        return text and text * q.shape[0]
