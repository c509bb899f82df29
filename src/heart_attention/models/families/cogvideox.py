"""CogVideoX, ConsisID and EasyAnimate: joint attention, text before the video; all text tokens take part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...masks import Text
from .base import Family, Grid


class CogVideoX(Family):
    """Latents come as [B, frames, channels, height, width]."""

    classes: tuple[str, ...] = ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel")
    kind = "joint"
    layers = (r"transformer_blocks\.\d+\.attn1",)

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid:
        """Frames, rows, columns."""
        _, frames, _, height, width = given["hidden_states"].shape
        t, p = getattr(config, "patch_size_t", None) or 1, config.patch_size
        return (frames + t - 1) // t, height // p, width // p

    def inputs(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """The text, for its length."""
        return [given["encoder_hidden_states"]]

    def text(self, inputs: list[torch.Tensor], tokens: int) -> list[Text]:
        """Text first, all of it valid."""
        length = sum(x.shape[1] for x in inputs)
        return [Text(0, length)] * inputs[0].shape[0]


class EasyAnimate(CogVideoX):
    """Latents come as [B, channels, frames, height, width], text from one encoder or two."""

    classes = ("EasyAnimateTransformer3DModel",)

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid:
        """Frames, rows, columns."""
        *_, frames, height, width = given["hidden_states"].shape
        return frames, height // config.patch_size, width // config.patch_size

    def inputs(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """Both texts, for their lengths."""
        texts = (given["encoder_hidden_states"], given.get("encoder_hidden_states_t5"))
        return [text for text in texts if text is not None]
