"""What differs between model families: which modules attend over video, the token grid, where text lies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ...masks import Text

Grid = tuple[int, int, int]


class Family:
    """One family of transformers: plain video self-attention unless a subclass says otherwise.

    `classes` are the names of the transformers' classes; `layers` are patterns of module names, whose order is the
    order of layers. Whatever shares the sequence with video and is none (text, images, history) is told as text:
    masks keep it exact.
    """

    classes: tuple[str, ...] = ()
    kind = "self"  # or "joint": text tokens share the sequence
    layers: tuple[str, ...] = (r"blocks\.\d+\.attn1",)
    rising = False  # True: the timestep grows while the model denoises
    item_by_item = False  # True: attention is called once per batch item
    packed = False  # True: text lies in one sequence that context parallelism splits as a whole
    mask_is_padding = False  # True: the mask of a call is the text's padding and nothing else

    def find(self, transformer: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """The (name, module) of every attention layer HEART serves, in order."""
        named = list(transformer.named_modules())
        return [
            (name, module)
            for pattern in self.layers
            for name, module in named
            if re.fullmatch(pattern, name) and hasattr(module, "processor")
        ]

    # `grid` and `inputs` run inside the model's own graph under torch.compile: shapes only, no values.
    def grid(self, config: Any, given: Mapping[str, Any]) -> Grid | None:
        """Video tokens as (frames, rows, columns), from the arguments of the transformer's forward."""
        *_, frames, height, width = given["hidden_states"].shape
        t, h, w = config.patch_size
        return frames // t, height // h, width // w

    def inputs(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments that `text` needs to see."""
        return []

    def text(self, inputs: list[torch.Tensor], tokens: int) -> list[Text] | None:
        """Where text lies in each batch item's sequence; `tokens` counts the video's."""
        return None

    def locate(self, text: list[Text] | None, tokens: int, q: torch.Tensor) -> list[Text] | None:
        """The same for the sequence of one call, q [B, H, N, D], where only its length tells."""
        return text

    def front(self, text: list[Text] | None, tokens: int, q: torch.Tensor) -> int:
        """How many exact tokens lie before the video where others lie behind it; they are moved there, as `locate` says.

        Masks know exact tokens in one place only.
        """
        return 0

    def reason_not(
        self, tokens: int, text: list[Text] | None, q: torch.Tensor, mask: torch.Tensor | None
    ) -> str | None:
        """Why this call must run dense, or None; q [B, H, N, D]."""
        if mask is not None:
            return "an attention mask that HEART does not know"
        return wrong_length(tokens, text, q)


def wrong_length(tokens: int, text: list[Text] | None, q: torch.Tensor) -> str | None:
    """Whether the sequence is what grid and text say (anything goes where there is no grid)."""
    expected = tokens + (text[0].prompt + text[0].unused if text else 0)
    if not tokens or q.shape[2] == expected:
        return None
    return f"a sequence of {q.shape[2]} tokens where the video's grid gives {expected}"


def no_padding(mask: torch.Tensor | None) -> str | None:
    """Why a mask cannot be a text's padding: it is that if it is [B, 1, 1 or N, N] and alike for all heads."""
    if mask is None or (mask.ndim == 4 and mask.shape[1] == 1 and mask.shape[2] in (1, mask.shape[3])):
        return None
    return f"an attention mask of shape {tuple(mask.shape)}, which is not the text's padding"


def count(grid: Grid | None) -> int:
    """How many tokens a grid holds."""
    return 0 if grid is None else math.prod(grid)
