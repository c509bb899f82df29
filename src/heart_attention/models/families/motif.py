"""Motif-Video: joint attention, image and text tokens after the video, valid ones first, then padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...masks import Text
from .base import Family
from .hunyuan import HunyuanVideo


class MotifVideo(HunyuanVideo):
    """As HunyuanVideo, but the image comes before the text, and a mask need not be given."""

    classes = ("MotifVideoTransformer3DModel",)

    def find(self, transformer: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """All but the decoder's layers, which attend over the video twice: once as it came, once as it became."""
        decoders: int = transformer.config.num_decoder_layers
        layers = Family.find(self, transformer)
        return layers[: len(layers) - decoders]

    def inputs(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """The text's padding mask, all valid where there is none, and the image's embeddings."""
        text = given["encoder_hidden_states"]
        mask, image = given.get("encoder_attention_mask"), given.get("image_embeds")
        mask = text.new_ones(text.shape[:2]) if mask is None else mask
        return [mask, text[:, :0] if image is None else image]

    def text(self, inputs: list[torch.Tensor], tokens: int) -> list[Text]:
        """Image tokens are valid; text must be padded at its end."""
        mask, shown = inputs[0].bool(), inputs[1].shape[1]
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise ValueError("the text is not padded at its end")
        return [Text(tokens, shown + valid, mask.shape[1] - valid) for valid in mask.sum(1).tolist()]
