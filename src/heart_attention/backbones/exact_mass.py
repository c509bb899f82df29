"""ExactMass (as AdaSpa): blocks by their exact share of attention, measured at every refresh.

The dearest predictor, about half of dense attention, and so only worth it with masks that are reused. Written from the
paper's idea; no golden data. AdaSpa keeps the log-sum-exp of an earlier step to save a pass; here whole rows of scores
exist at once, so that the present log-sum-exp costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.ops.scores import block_scores
from ..masks import top_p
from .base import Shape, check_flag, check_positive, pairs
from .blocks import BlockBackbone, Covered


@dataclass(frozen=True)
class ExactMass(BlockBackbone):
    """Blocks chosen by exact attention mass; the threshold is the share of mass that every query block keeps.

    Args:
        block: tokens of a block.
        warm_up: also look at the last dense step of the warm-up and set the anchors there. Dense attention shows no
            scores, so this costs a prediction more; the first sparse step then reuses its masks where drift allows.
    """

    block: int = 128
    warm_up: bool = False

    name: ClassVar[str] = "exact"
    default_threshold: ClassVar[float] = 0.9

    def __post_init__(self) -> None:
        check_flag("ExactMass", warm_up=self.warm_up)
        check_positive("ExactMass", block=self.block)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Blocks are square."""
        return self.block, self.block

    @property
    def warms_up(self) -> bool:
        """As its setting says."""
        return self.warm_up

    def prediction_work(self, shape: Shape) -> float:
        """All scores: half of dense attention."""
        return pairs(shape) / 2

    def examine(self, tokens: Covered, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        """Attention mass of each pair of blocks, fp32 [Mq, Mk]: a row sums to the queries of its block.

        XAttention's block scores at a stride of one token, where its antidiagonal sums are the logits themselves.
        """
        mass = torch.zeros(tokens.blocks(self.block_shape), device=q.device)
        queries, keys = q[: tokens.n_q], k[: tokens.n_k]
        block_scores([queries], [keys], tokens.order, 1, self.block, tokens.n_k, [mass])
        return mass

    def choose(self, mass: Tensor, tau: float, head: int) -> Tensor:
        """The largest blocks until they hold the share τ of each row's mass."""
        return top_p(mass, tau, strict=True)
