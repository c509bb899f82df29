"""Radial attention: a window in space that halves each time the distance in frames doubles.

Static, from the paper's definition of its mask: its code was not read, its licence not checked, and there is no golden
data to compare with. Tokens k, l of frames i, j with d = |i − j| see each other iff |k − l| + 1 ≤ s / 2^⌊log2 d⌋, where
s is a frame's tokens; where that window is narrower than one token, iff k = l and d is a multiple of the window's
inverse. All tokens see the first frame. A block is computed if any of its token pairs is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import check_flag, check_positive
from .blocks import Covered
from .static import StaticBackbone


@dataclass(frozen=True)
class Radial(StaticBackbone):
    """Radial attention's mask; the threshold scales its windows, 0.5 is the paper's own width.

    Args:
        block: tokens of a block.
        sink: let all tokens see the first frame.
    """

    block: int = 128
    sink: bool = True

    name: ClassVar[str] = "radial"
    default_threshold: ClassVar[float] = 0.5
    candidates: ClassVar[tuple[float, ...]] = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)

    def __post_init__(self) -> None:
        check_flag("Radial", sink=self.sink)
        check_positive("Radial", block=self.block)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Blocks are square."""
        return self.block, self.block

    def layout(self, tokens: Covered, tau: float) -> Tensor:
        """The blocks that hold a pair of tokens which see each other."""
        per_frame = int(tokens.grid[1] * tokens.grid[2]) if tokens.grid else 1
        block, frame, low, high = self._segments(tokens, per_frame)
        apart = (frame[:, None] - frame).abs()
        gap = torch.maximum(low[:, None] - high, low - high[:, None]).clamp(min=0)  # nearest pair of tokens
        seen = radial_rule(apart, gap, per_frame, 2 * tau)
        if self.sink:
            seen |= (frame == 0)[None, :]
        count = tokens.blocks(self.block_shape)[0]
        kept = torch.zeros(count * count, dtype=torch.int8)
        kept.scatter_reduce_(0, (block[:, None] * count + block).flatten(), seen.flatten().to(torch.int8), "amax")
        return kept.view(count, count).bool()

    def _segments(self, tokens: Covered, per_frame: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What each block holds of each frame: block, frame, first and last place in the frame; int64 [S] each."""
        places = tokens.places  # [n, 3]
        placed = ~places[:, 0].isnan()
        frame, row, column = places[placed].long().unbind(-1)
        block = (torch.arange(len(places)) // self.block)[placed]
        columns = tokens.grid[2] if tokens.grid else 1
        held, which = torch.unique(torch.stack([block, frame]), dim=1, return_inverse=True)
        place = row * columns + column
        low = torch.full((held.shape[1],), per_frame).scatter_reduce_(0, which, place, "amin")
        high = torch.zeros(held.shape[1], dtype=torch.int64).scatter_reduce_(0, which, place, "amax")
        return held[0], held[1], low, high


def radial_rule(apart: Tensor, gap: Tensor, per_frame: int, scale: float) -> Tensor:
    """Whether tokens `gap` places and `apart` frames from one another see each other, bool; windows times `scale`."""
    halved = 2.0 ** apart.clamp(min=1).double().log2().floor()
    window = torch.where(apart == 0, float(per_frame), scale * per_frame / halved)
    every = torch.ceil(1 / window).clamp(min=1)
    return (gap + 1 <= window) | (window < 1) & (gap == 0) & (apart % every == 0)
