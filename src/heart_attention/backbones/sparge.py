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
from ..kernels import Visit, choose, run
from ..kernels.ops.tile_gains import left_out
from ..masks import BlockMask
from .base import Key, Shape, check_flag, check_positive, read_heads, tokens
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
        pv: the original's pvthreshd: the kernel leaves out exponentials and values of a kept block whose largest logit
            stays so far below the running maximum of every query, in units of log2; one number of 0 or more, one for each
            head of the model, or None (the original's own 50 leaves out next to nothing). Kernels `cpu` and `eager` know it.
    """

    block_q: int = 128
    block_k: int = 64
    similarity: float | Sequence[float] = 0.6
    select: str = "cdf"
    sink: bool = False
    smooth: bool = True
    pv: float | Sequence[float] | None = None

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
        if self.pv is not None and not all(0 <= bound < math.inf for bound in _numbers(self.pv)):
            raise HeartError(f"Sparge got pv={str(self.pv)[:60]}: give numbers of 0 or more in units of log2, or None")
        if isinstance(self.pv, list | tuple):
            object.__setattr__(self, "pv", tuple(map(float, self.pv)))
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

    @property
    def visits(self) -> bool:
        """With `pv` the kernel must leave out what gains little."""
        return self.pv is not None

    def visit(
        self,
        state: Any,
        mask: BlockMask,
        which: Tensor,
        *,
        heads: Sequence[int] | None = None,
        key: Key | None = None,
    ) -> Visit | None:
        """Leave out blocks that gain too little.

        The last blocks of a row are never tested, nor is a short last row, which the original fills up with zero queries.
        """
        if self.pv is None:
            return None
        bounds = [self._of_head(self.pv, head) for head in read_heads(heads, mask.shape[1])]
        skip = torch.tensor(bounds, dtype=torch.float32, device=mask.device).expand(mask.shape)
        return Visit(skip=skip, untested=max(1, self.block_q // self.block_k), whole_rows=mask.n_q // self.block_q)

    @torch.no_grad()
    def without_small(self, mask: BlockMask, q: Tensor, k: Tensor) -> BlockMask:
        """The mask without the blocks that a kernel leaves out at `pv`."""
        visit = self.visit(None, mask, torch.ones(mask.shape, dtype=torch.bool))
        if visit is None:
            return mask
        gains, plan = torch.empty(mask.blocks.shape), choose(mask, q, visits=True).plan(mask)
        run(plan, q, k, k, visit=Visit(gains=gains))
        return mask.with_flags(mask.blocks & ~left_out(plan, gains, visit))

    def _by_cdf(self, mass: Tensor, tau: float) -> Tensor:
        """The largest blocks whose sum is not above τ, at least one: the block that crosses is not kept."""
        values, places = mass.sort(dim=-1, descending=True, stable=True)
        within = values.cumsum(-1) <= tau
        within[:, 0] = True
        return torch.zeros_like(within).scatter_(1, places, within)

    def _similarity(self, head: int) -> float:
        return self._of_head(self.similarity, head)

    def _of_head(self, given: float | Sequence[float], head: int) -> float:
        """A setting that is one number, or one for each head."""
        if not isinstance(given, tuple):
            return float(given)  # type: ignore[arg-type]
        if head >= len(given):
            raise HeartError(f"Sparge has settings for {len(given)} heads but head {head} asks: give one for each head")
        return given[head]

    def to_dict(self) -> dict[str, Any]:
        """Name and settings, for JSON."""
        plain = super().to_dict()
        return plain | {name: list(x) for name, x in plain.items() if isinstance(x, tuple)}


def _numbers(given: Any) -> list[float]:
    """What a setting holds; NaN for what is no number."""
    values = list(given) if isinstance(given, list | tuple) else [given]
    return [x if isinstance(x, int | float) and not isinstance(x, bool) else math.nan for x in values] or [math.nan]


def self_similarity(x: Tensor, block: int) -> Tensor:
    """Mean cosine of all pairs of tokens in each block of x [n, D], fp32 [M]; NaN for a block with a zero or missing row."""
    blocks, _ = in_blocks(x, block)
    return (blocks / blocks.norm(dim=-1, keepdim=True)).mean(1).square().sum(-1)


def _share(tau: float, count: int) -> int:
    """How many blocks a share is, the product in fp32 as in the original."""
    return max(1, int(torch.tensor(tau, dtype=torch.float32) * count))
