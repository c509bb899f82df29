"""HunyuanVideo, 1.5 and Framepack: joint attention, text after the video, valid tokens first, then padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...masks import Text
from .base import Family, Grid, no_padding, wrong_length


class HunyuanVideo(Family):
    """The padding mask says how many text tokens are valid; the rest are unused slots."""

    classes = ("HunyuanVideoTransformer3DModel",)
    kind = "joint"
    mask_is_padding = True
    layers = (r"transformer_blocks\.\d+\.attn", r"single_transformer_blocks\.\d+\.attn")

    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid | None:
        """Frames, rows, columns."""
        *_, frames, height, width = given["hidden_states"].shape
        t, p = config.patch_size_t, config.patch_size
        return frames // t, height // p, width // p

    def inputs(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """The text's padding mask."""
        return [given["encoder_attention_mask"]]

    def text(self, inputs: list[torch.Tensor], tokens: int) -> list[Text]:
        """Valid text tokens, counted from the padding mask [B, L]."""
        (mask,) = inputs
        return [Text(tokens, valid, mask.shape[1] - valid) for valid in mask.sum(1, dtype=torch.int).tolist()]

    def reason_not(
        self, tokens: int, text: list[Text] | None, q: torch.Tensor, mask: torch.Tensor | None
    ) -> str | None:
        """The mask [B, 1, 1 or N, N] is the text's padding and nothing else."""
        return no_padding(mask) or wrong_length(tokens, text, q)


class HunyuanVideo15(HunyuanVideo):
    """Text of two encoders and image tokens are sorted by the model: all valid ones first."""

    classes = ("HunyuanVideo15Transformer3DModel",)

    def inputs(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """Both padding masks and the image's embeddings, which are all zero for text-to-video."""
        return [given["encoder_attention_mask"], given["encoder_attention_mask_2"], given["image_embeds"]]

    def text(self, inputs: list[torch.Tensor], tokens: int) -> list[Text]:
        """Valid tokens of both masks, and the image's where there is an image."""
        first, second, image = inputs
        total = first.shape[1] + second.shape[1] + image.shape[1]
        shown = 0 if bool((image == 0).all()) else image.shape[1]
        valid = first.bool().sum(1) + second.bool().sum(1) + shown  # [B]
        return [Text(tokens, count, total - count) for count in valid.tolist()]


class Framepack(HunyuanVideo):
    """History at three resolutions comes before the video, the image's tokens and the text after it: all exact.

    A single prompt is cut to its valid tokens by the model.
    """

    classes = ("HunyuanVideoFramepackTransformer3DModel",)

    def inputs(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """The text's padding mask and the image's embeddings."""
        return [given["encoder_attention_mask"], given["image_embeds"]]

    def text(self, inputs: list[torch.Tensor], tokens: int) -> list[Text]:
        """Image tokens and valid text; `locate` adds the history."""
        mask, image = inputs
        found = super().text([mask], tokens)
        return [Text(tokens, image.shape[1] + text.prompt, text.unused if len(found) > 1 else 0) for text in found]

    def front(self, text: list[Text] | None, tokens: int, q: torch.Tensor) -> int:
        """The history: what the sequence holds beyond video and text."""
        return 0 if not text else max(0, q.shape[2] - text[0].end)

    def locate(self, text: list[Text] | None, tokens: int, q: torch.Tensor) -> list[Text] | None:
        """The history, moved behind the video, joins the text."""
        history = self.front(text, tokens, q)
        return text and [Text(t.start, history + t.prompt, t.unused) for t in text]
