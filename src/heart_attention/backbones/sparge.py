"""SpargeAttn: block means of queries and keys, blocks that are unlike themselves always computed.

Written from its rules in words; the original's licence is Apache-2.0. As there, a short last block counts as unlike
itself, so that it is always computed. Means, scores and selection are in fp32, where the original rounds to the type
of q and k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import HeartError
from ..kernels import eager
from ..masks import BlockMask
from .base import Shape, check_flag, check_positive, tokens
from .blocks import BlockBackbone, Covered, block_means, in_blocks, largest


class Seen(NamedTuple):
    """One head as the selection sees it."""

    scores: Tensor  # fp32 [Mq, Mk] products of block means
    q_alike: Tensor  # fp32 [Mq] self-similarity of query blocks; NaN for a short one
    k_alike: Tensor  # fp32 [Mk]


@dataclass(frozen=True)
class Sparge(BlockBackbone):
    """The SpargeAttn predictor; the threshold is its cdf, or the share of key blocks with `select="topk"`.

    Args:
        block_q, block_k: tokens of a block of queries and of keys.
        similarity: a block is summed up by its mean only if its self-similarity is above this, from −1 to 1; one number,
            or one for each head of the model.
        select: "cdf" keeps the largest blocks as long as their mass is not above the threshold, "topk" a share of them.
        sink: always keep the first key block.
        smooth: subtract the mean key before everything.
    """

    block_q: int = 128
    block_k: int = 64
    similarity: float | Sequence[float] = 0.6
    select: str = "cdf"
    sink: bool = False
    smooth: bool = True

    name: ClassVar[str] = "sparge"
    default_threshold: ClassVar[float] = 0.98
    candidates: ClassVar[tuple[float, ...]] = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)

    def __post_init__(self) -> None:
        check_flag("Sparge", sink=self.sink, smooth=self.smooth)
        check_positive("Sparge", block_q=self.block_q, block_k=self.block_k)
        given: Any = self.similarity
        values = list(given) if isinstance(given, list | tuple) else [given]
        if not values or not all(isinstance(s, int | float) and -1 <= s <= 1 for s in values):
            raise HeartError(f"Sparge got similarity={self.similarity!r}: give numbers from -1 to 1")
        if isinstance(self.similarity, list | tuple):
            object.__setattr__(self, "similarity", tuple(float(s) for s in values))
        if self.select not in ("cdf", "topk"):
            raise HeartError(f"Sparge got select={self.select!r}: give 'cdf' or 'topk'")

    @property
    def block_shape(self) -> tuple[int, int]:
        """Query and key tokens of a block."""
        return self.block_q, self.block_k

    def prediction_work(self, shape: Shape) -> float:
        """Means, and products of means."""
        return tokens(shape) * (1 + shape[2] / (self.block_q * self.block_k))

    def examine(self, seen: Covered, q: Tensor, k: Tensor, v: Tensor | None) -> Seen:
        """Products of block means and how alike the tokens of each block are."""
        queries, keys = seen.of(q), seen.of(k)
        if self.smooth:
            keys = keys - keys.mean(0)
        scores = block_means(queries, self.block_q) @ block_means(keys, self.block_k).T / math.sqrt(q.shape[-1])
        return Seen(scores, self_similarity(queries, self.block_q), self_similarity(keys, self.block_k))

    def mass(self, seen: Seen, head: int) -> Tensor:
        """Softmax over the key blocks that are alike, fp32 [Mq, Mk]; the others have none."""
        unlike = ~(seen.k_alike > self._similarity(head))
        return seen.scores.masked_fill(unlike, -torch.inf).softmax(-1).nan_to_num(0.0)  # no block alike: no mass at all

    def choose(self, seen: Seen, tau: float, head: int) -> Tensor:
        """The blocks with most mass, and every block that its mean does not stand for."""
        mass, least = self.mass(seen, head), self._similarity(head)
        kept = self._by_cdf(mass, tau) if self.select == "cdf" else largest(mass, _share(tau, mass.shape[1]))
        kept |= ~(seen.k_alike > least)  # NaN, a short block, is not above anything
        kept |= ~(seen.q_alike > least)[:, None]
        if self.sink:
            kept[:, 0] = True
        return kept

    @torch.no_grad()
    def without_small(self, mask: BlockMask, q: Tensor, k: Tensor, pv: float | Sequence[float]) -> BlockMask:
        """The mask without the blocks whose exponentials and values the original's kernel leaves out at `pvthreshd`.

        Those that raise the running maximum of no query to within `pv` (one number, or one a head; units of log2). The
        last blocks of a row are never tested, nor is a short last row, which the original fills up with zero queries.
        """
        gains = eager.KERNEL.gains(eager.KERNEL.plan(mask), q, k, torch.zeros(mask.shape, dtype=torch.bool))
        bound = torch.as_tensor(pv, dtype=gains.dtype).expand(mask.shape)[..., None, None]
        later = mask.blocks.flip(-1).cumsum(-1).flip(-1)  # this block and the kept ones after it
        small = (gains + bound <= 0) & (later > max(1, self.block_q // self.block_k))
        if mask.n_q % self.block_q:
            small[:, :, -1] = False
        return mask.with_flags(mask.blocks & ~small)

    def _by_cdf(self, mass: Tensor, tau: float) -> Tensor:
        """The largest blocks whose sum is not above τ, at least one: the block that crosses is not kept."""
        values, places = mass.sort(dim=-1, descending=True, stable=True)
        within = values.cumsum(-1) <= tau
        within[:, 0] = True
        return torch.zeros_like(within).scatter_(1, places, within)

    def _similarity(self, head: int) -> float:
        if not isinstance(self.similarity, tuple):
            return float(self.similarity)  # type: ignore[arg-type]
        if head >= len(self.similarity):
            raise HeartError(
                f"Sparge has {len(self.similarity)} similarities but head {head} asks: give one for each head"
            )
        return self.similarity[head]

    def to_dict(self) -> dict[str, Any]:
        """Name and settings, for JSON."""
        given: Any = self.similarity
        return super().to_dict() | ({"similarity": list(given)} if isinstance(given, tuple) else {})


def self_similarity(x: Tensor, block: int) -> Tensor:
    """Mean cosine of all pairs of tokens in each block of x [n, D], fp32 [M]; NaN for a block with a zero or missing row."""
    blocks, _ = in_blocks(x, block)
    return (blocks / blocks.norm(dim=-1, keepdim=True)).mean(1).square().sum(-1)


def _share(tau: float, count: int) -> int:
    """How many blocks a share is, the product in fp32 as in the original."""
    return max(1, int(torch.tensor(tau, dtype=torch.float32) * count))
