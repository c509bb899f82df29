"""Backbones whose masks follow from the places of tokens alone: made once for a grid, then free."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..masks import Text
from .base import Grid, Shape
from .blocks import BlockBackbone, Covered


class StaticBackbone(BlockBackbone):
    """A backbone that looks at no values. Blocks that hold prompt are computed with all others."""

    @abstractmethod
    def layout(self, tokens: Covered, tau: float) -> Tensor:
        """The blocks to compute at a threshold below 1, bool [M, M], from the places of tokens."""

    def examine(self, tokens: Covered, q: Tensor, k: Tensor, v: Tensor | None) -> Covered:
        """Places are all there is to see."""
        return tokens

    def choose(self, tokens: Covered, tau: float, head: int) -> Tensor:
        """The blocks for this grid, text, order and threshold, made at most once."""
        order = None if tokens.order is None else tokens.order.cpu().numpy().tobytes()
        made = _layout(self, (tokens.n_q, tokens.n_k, tokens.tail), tokens.text, tokens.grid, order, tau)
        return made.to(tokens.device)

    def prediction_work(self, shape: Shape) -> float:
        """None."""
        return 0.0


@functools.lru_cache(maxsize=128)
def _layout(
    backbone: Any, sizes: tuple[int, int, int], text: Text | None, grid: Grid | None, order: bytes | None, tau: float
) -> Tensor:
    permutation = None if order is None else torch.frombuffer(bytearray(order), dtype=torch.int64)
    tokens = Covered(*sizes, permutation, text, None if grid is None else tuple(grid), "cpu")  # type: ignore[arg-type]
    blocks = backbone.layout(tokens, tau)
    prompt = blocks_with_prompt(tokens, backbone.block_shape[0])
    return blocks | prompt[:, None] | prompt[None, :]


def blocks_with_prompt(tokens: Covered, block: int) -> Tensor:
    """Which blocks hold tokens that have no place on the grid, bool [M]."""
    unplaced = tokens.places[:, 0].isnan()
    return torch.nn.functional.pad(unplaced, (0, -len(unplaced) % block)).view(-1, block).any(-1)
