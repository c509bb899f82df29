"""PISA: the best blocks exact, all others by a Taylor expansion around their mean key.

The zeroth order is one key a block (`rest="mean"`); the original adds a first order (`rest="first-order"`). Written
from its rules in words; the original's licence is MIT. The original does not rescale its running sum when a later group
of blocks raises the maximum; here the sum is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import HeartError
from .base import Shape, check_flag, check_positive, tokens
from .blocks import BlockBackbone, Covered, block_means, in_blocks, largest

TINY = 1e-5  # the original's guard of its logarithm
AT_ONCE = 128  # blocks whose D×D products exist at once


@dataclass(frozen=True)
class PISA(BlockBackbone):
    """The PISA predictor; the threshold is the share of key blocks computed exactly.

    Args:
        block: tokens of a block.
        bias: add the logarithm of ‖Σ (k − k̄) vᵀ‖, what a block's mean leaves unsaid, to its score. It reads values.
    """

    block: int = 64
    bias: bool = True

    name: ClassVar[str] = "pisa"
    default_threshold: ClassVar[float] = 0.15
    rests: ClassVar[tuple[str, ...]] = ("drop", "mean", "first-order")
    default_rest: ClassVar[str] = "first-order"
    candidates: ClassVar[tuple[float, ...]] = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)

    def __post_init__(self) -> None:
        check_flag("PISA", bias=self.bias)
        check_positive("PISA", block=self.block)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Blocks are square."""
        return self.block, self.block

    def prediction_work(self, shape: Shape) -> float:
        """Block means, their products, and with the bias D×D products of every block."""
        return tokens(shape) * (shape[2] / self.block**2 + (shape[3] if self.bias else 1))

    def examine(self, seen: Covered, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        """Scores of all pairs of blocks, fp32 [Mq, Mk]; the original's softmax over them changes no order."""
        keys = seen.of(k)
        scores = block_means(seen.of(q), self.block) @ block_means(keys, self.block).T / math.sqrt(q.shape[-1])
        if not self.bias:
            return scores
        if v is None:
            raise HeartError(
                "PISA's bias reads values and got none: give v [B, H, N, D] beside q and k, or set bias=False"
            )
        return scores + (spread(keys, seen.of(v), self.block) + TINY).log()

    def choose(self, scores: Tensor, tau: float, head: int) -> Tensor:
        """The share τ of key blocks with the largest scores, at least one."""
        return largest(scores, max(1, int(tau * scores.shape[1])))


def spread(k: Tensor, v: Tensor, block: int) -> Tensor:
    """‖Σ_t (k_t − k̄) v_tᵀ‖ of each block, Frobenius norm, [M]: the first order that a block's mean leaves out."""
    keys, sizes = in_blocks(k, block)
    keys = keys - (keys.sum(1) / sizes).unsqueeze(1)  # rows past the end meet values of zero
    values, _ = in_blocks(v, block)
    parts = zip(keys.split(AT_ONCE), values.split(AT_ONCE))
    return torch.cat([torch.bmm(a.transpose(1, 2), b).flatten(1).norm(dim=-1) for a, b in parts])
