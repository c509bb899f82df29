"""Band: every block with those nearest to it in frames and rows. Static, so it costs no prediction.

A baseline of this package; windows over space and time are common property of the field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import HeartError
from .base import check_positive
from .blocks import Covered, in_blocks, largest
from .static import StaticBackbone


@dataclass(frozen=True)
class Band(StaticBackbone):
    """A static band; the threshold is the share of key blocks that every query block keeps.

    Nearness is the mean squared distance of two blocks' tokens in rows, a frame counting as `frame_rows` rows. Large
    values make a band within frames, small ones a band through all frames at the same rows.

    Args:
        block: tokens of a block.
        frame_rows: how many rows apart two neighbouring frames count.
    """

    block: int = 128
    frame_rows: float = 4.0

    name: ClassVar[str] = "band"
    default_threshold: ClassVar[float] = 0.3
    candidates: ClassVar[tuple[float, ...]] = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)

    def __post_init__(self) -> None:
        check_positive("Band", block=self.block)
        value = self.frame_rows
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise HeartError(f"Band got frame_rows={value!r}: give a finite number of at least 0")

    @property
    def block_shape(self) -> tuple[int, int]:
        """Blocks are square."""
        return self.block, self.block

    def layout(self, tokens: Covered, tau: float) -> Tensor:
        """The share τ of blocks nearest to each, rounded up, and always itself."""
        away = self.distances(tokens).fill_diagonal_(-1.0)
        return largest(-away, math.ceil(tau * len(away)))

    def distances(self, tokens: Covered) -> Tensor:
        """Mean squared distance between the tokens of any two blocks, in rows, fp64 [M, M].

        The mean over pairs of (a − b)² is the squared difference of the means plus both variances. Blocks with prompt
        have no place; the mask keeps them anyway.
        """
        weights = torch.tensor([self.frame_rows, 1.0, 0.0], dtype=torch.float64)
        blocks, sizes = in_blocks(tokens.places.double().nan_to_num() * weights, self.block)
        mean = blocks.sum(1) / sizes  # [M, 3]
        spread = (blocks.square().sum(1) / sizes - mean.square()).sum(-1)  # [M]
        apart = (mean[:, None] - mean).square().sum(-1)
        return apart + spread[:, None] + spread
