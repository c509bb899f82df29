"""ExactMass (as AdaSpa): blocks by their exact share of attention, measured at every refresh.

The dearest predictor, about half of dense attention, and so only worth it with masks that are reused. Written from the
paper's idea; no golden data. AdaSpa keeps the log-sum-exp of an earlier step to save a pass; here whole rows of scores
exist at once, so that the present log-sum-exp costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..masks import top_p
from .base import Shape, check_positive, pairs
from .blocks import BlockBackbone, Covered

SCORE_FLOATS = 1 << 21  # scores that exist at once, unless one block row has more


@dataclass(frozen=True)
class ExactMass(BlockBackbone):
    """Blocks chosen by exact attention mass; the threshold is the share of mass that every query block keeps.

    Args:
        block: tokens of a block.
    """

    block: int = 128

    name: ClassVar[str] = "exact"
    default_threshold: ClassVar[float] = 0.9

    def __post_init__(self) -> None:
        check_positive("ExactMass", block=self.block)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Blocks are square."""
        return self.block, self.block

    def prediction_work(self, shape: Shape) -> float:
        """All scores: half of dense attention."""
        return pairs(shape) / 2

    def examine(self, tokens: Covered, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        """Attention mass of each pair of blocks, fp32 [Mq, Mk]: a row sums to the queries of its block."""
        queries, keys = tokens.of(q) / math.sqrt(q.shape[-1]), tokens.of(k)
        step = max(1, SCORE_FLOATS // (len(keys) * self.block)) * self.block
        return torch.cat([self._masses(queries[i : i + step] @ keys.T) for i in range(0, len(queries), step)])

    def choose(self, mass: Tensor, tau: float, head: int) -> Tensor:
        """The largest blocks until they hold the share τ of each row's mass."""
        return top_p(mass, tau, strict=True)

    def _masses(self, logits: Tensor) -> Tensor:
        """Sums of softmax(logits [rows, n]) over blocks of rows and keys."""
        weights = torch.nn.functional.pad(logits.softmax(-1), (0, -logits.shape[1] % self.block))
        by_key = weights.unflatten(1, (-1, self.block)).sum(-1)  # [rows, Mk]
        by_key = torch.nn.functional.pad(by_key, (0, 0, 0, -len(by_key) % self.block))
        return by_key.unflatten(0, (-1, self.block)).sum(1)
