"""SVG (Sparse VideoGen, first version): a head looks within frames or through time, and gets the mask for it.

A few sampled queries decide: whichever of two fixed masks leaves their outputs nearer to full attention. A temporal
head's tokens are put in position-major order, in which one band serves both kinds. Masks follow the original's
block-sparse rule. Written from its rules in words; the original's licence is Apache-2.0. Here the sampled rows come
from a private generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import HeartError
from ..masks import BlockMask, Text
from .base import (
    Backbone,
    Grid,
    Key,
    Shape,
    Thresholds,
    check_positive,
    check_qk,
    read_heads,
    read_text,
    read_thresholds,
    tokens,
)
from .kmeans import random_tokens

PROFILE_BLOCK = 128  # tokens of a block of the two masks that decide
LARGEST_BLOCK = 256  # blocks have fewer tokens than this
SMALLEST_SUM = 1e-20  # of weights that are 1 where a row looks most: less would be lost to rounding


@dataclass(frozen=True)
class Video:
    """Where video and text lie.

    Args:
        frames, frame_tokens: the video.
        text: joint text, or None.
        n: all tokens.
    """

    frames: int
    frame_tokens: int
    text: Text | None
    n: int

    @property
    def tokens(self) -> int:
        """Video tokens."""
        return self.frames * self.frame_tokens

    def index(self, device: Any = None) -> Tensor:
        """The video tokens among all, int64."""
        return torch.arange(self.n, device=device) if self.text is None else self.text.video_index(self.n, device)

    def position_major(self, place: Tensor) -> Tensor:
        """π: where a video token of raster order goes when all frames of a position come together."""
        return place % self.frame_tokens * self.frames + place // self.frame_tokens

    def width(self, share: float) -> float:
        """The band's half width in frames at which about this share of all pairs is kept."""
        text = 0 if self.text is None else self.text.prompt + self.text.unused
        share = min(max(share - 2 * text / self.n, 0.0), 1.0)
        return self.n * (1 - math.sqrt(1 - share)) / self.frame_tokens

    def block(self) -> int:
        """Tokens of a block: the largest divisor of a frame below 256."""
        return max(b for b in range(1, min(LARGEST_BLOCK, self.frame_tokens + 1)) if self.frame_tokens % b == 0)

    def orders(self, device: Any = None) -> Tensor:
        """Tokens in raster and in position-major order, prompt last and unused slots left out, int64 [2, n]."""
        video = self.index(device)
        prompt = video[:0] if self.text is None else self.text.index("prompt", self.n, device)
        temporal = torch.arange(self.tokens, device=device).view(self.frames, -1).T.flatten()
        return torch.stack([torch.cat([video, prompt]), torch.cat([video[temporal], prompt])])


@dataclass(frozen=True)
class SVG(Backbone):
    """The predictor of SVG's first version; the threshold is the kept share, which the original calls sparsity.

    Args:
        rows: sampled queries that decide what a head is.
        max_row: they are drawn among the first so many tokens.
        reach: half width in frames of the band of the two masks that decide; None is 2, and 1.5 with joint text.
        seed: of the private generator that draws them.
    """

    rows: int = 64
    max_row: int = 10_000
    reach: float | None = None
    seed: int = 0

    name: ClassVar[str] = "svg"
    default_threshold: ClassVar[float] = 0.3
    candidates: ClassVar[tuple[float, ...]] = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)

    def __post_init__(self) -> None:
        check_positive("SVG", rows=self.rows, max_row=self.max_row)
        if self.reach is not None and (not isinstance(self.reach, int | float) or not 0 < self.reach < math.inf):
            raise HeartError(f"SVG got reach={self.reach!r}: give a number of frames above 0, or None")

    def prediction_work(self, shape: Shape) -> float:
        """The sampled rows see all keys three times."""
        return tokens(shape) * self.rows * 3

    def least_density(self, n: int) -> float:
        """A band has no least width but its blocks."""
        return min(1.0, LARGEST_BLOCK / n)

    @torch.no_grad()
    def predict(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Thresholds,
        state: Any = None,
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
        v: Tensor | None = None,
        grid: Grid | None = None,
    ) -> BlockMask:
        """The blocks to compute (see `Backbone.predict`); SVG has orders of its own and does not use `order`."""
        check_qk(q, k)
        if v is None:
            raise HeartError(
                "SVG classifies heads by their outputs and got no values: give v [B, H, N, D] beside q and k"
            )
        tau = read_thresholds(thresholds, *q.shape[:2])
        video = read_video(q.shape[2], k.shape[2], text, grid)
        kinds = self._kinds(q, k, v, tau, video, key, heads)
        return self._mask(video, kinds, tau)

    @torch.no_grad()
    def predict_many(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Sequence[float],
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
        v: Tensor | None = None,
        grid: Grid | None = None,
    ) -> tuple[list[BlockMask], BlockMask]:
        """A mask for each threshold and the full one; every head is classified once."""
        shape = q.shape[:2]
        half = self.predict(q, k, 0.5, None, text, heads=heads, key=key, v=v, grid=grid)
        video = read_video(q.shape[2], k.shape[2], text, grid)
        assert half.order_of is not None
        made = [self._mask(video, half.order_of, read_thresholds(float(tau), *shape)) for tau in (*thresholds, 1.0)]
        return made[:-1], made[-1]

    def errors(self, q: Tensor, k: Tensor, v: Tensor, video: Video, rows: Tensor) -> Tensor:
        """Mean squared error of one head's sampled outputs with the spatial and the temporal mask, fp32 [2]."""
        return _errors(q[rows], k, v, self.profiles(video, rows, q.device))

    def profiles(self, video: Video, rows: Tensor, device: Any = None) -> Tensor:
        """What the sampled rows see in full, in the spatial and in the temporal mask, 1 or 0, fp32 [3, rows, N]."""
        masks = [self.profile(video, rows, temporal, device) for temporal in (False, True)]
        return torch.stack([torch.ones_like(masks[0]), *masks]).float()

    def profile(self, video: Video, rows: Tensor, temporal: bool, device: Any = None) -> Tensor:
        """Which tokens the sampled rows see in the mask that stands for a kind of head, bool [rows, N].

        A band over blocks of 128 tokens, and without joint text the first frame; text sees all and is seen by all.
        """
        place = torch.full((video.n,), -1, device=device)
        raster = torch.arange(video.tokens, device=device)
        place[video.index(device)] = video.position_major(raster) if temporal else raster
        reach = self.reach if self.reach is not None else 2.0 if video.text is None else 1.5
        band = int(reach * video.frame_tokens / PROFILE_BLOCK)
        mine, theirs = place[rows][:, None], place[None, :]
        seen = (mine // PROFILE_BLOCK - theirs // PROFILE_BLOCK).abs() < band
        if video.text is None:
            seen |= theirs < video.frame_tokens
        return seen | (mine < 0) | (theirs < 0)

    def blocks(self, video: Video, share: float) -> Tensor:
        """The band over blocks in a head's own order, bool [M, M]; blocks of prompt are computed with all others."""
        block, reach = video.block(), video.width(share) * video.frame_tokens
        count = video.tokens // block
        centre = torch.arange(count) * block + block // 2
        kept = (centre[:, None] - centre).abs() < max(reach, 1)  # a block always sees itself
        if video.text is None:
            kept |= (centre <= video.frame_tokens)[None, :]
            return kept
        extra = -(-video.text.prompt // block)
        return torch.nn.functional.pad(kept, (0, extra, 0, extra), value=True)

    def _kinds(self, q: Tensor, k: Tensor, v: Tensor, tau: Tensor, video: Video, key: Key | None, heads: Any) -> Tensor:
        """0 for a spatial head, 1 for a temporal one, int8 [B, H]."""
        layer, branch, _ = key if key is not None else (0, "", 0)
        read_heads(heads, q.shape[1])
        rows = random_tokens(min(self.max_row, video.n), min(self.rows, video.n), self.seed, layer, branch).to(q.device)
        kinds = torch.zeros(q.shape[:2], dtype=torch.int8, device=q.device)
        seen = self.profiles(video, rows, q.device)  # the same for all heads
        for b, h in (tau < 1).nonzero().tolist():
            kinds[b, h] = _errors(q[b, h][rows], k[b, h], v[b, h], seen).argmin()
        return kinds

    def _mask(self, video: Video, kinds: Tensor, tau: Tensor) -> BlockMask:
        made = {share: self.blocks(video, share) for share in tau.unique().tolist() if share < 1}
        full = torch.ones_like(self.blocks(video, 0.5))
        rows = [torch.stack([made.get(share, full) for share in row]) for row in tau.tolist()]
        blocks, orders = torch.stack(rows).to(kinds.device), video.orders(kinds.device)
        tail, n = 0 if video.text is None else video.text.unused, orders.shape[1]
        return BlockMask(blocks, video.block(), n, n, orders, tail, kinds, text=video.text)


def _errors(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Mean squared errors, fp32 [M], of attention with masks 1 … M against mask 0, all of `seen` [1 + M, rows, N].

    One exponential serves all masks. Where a mask leaves a row so little that it would be lost to rounding, each gets
    its own.
    """
    logits = q.float() @ k.float().T / math.sqrt(q.shape[-1])  # [rows, N]
    weights = (logits - logits.amax(-1, keepdim=True)).exp_() * seen  # [1 + M, rows, N]
    sums = weights.sum(-1, keepdim=True)
    if bool((sums < SMALLEST_SUM).any()):
        weights, sums = logits.masked_fill(seen == 0, -torch.inf).softmax(-1), torch.ones_like(sums)
    out = (weights.flatten(0, 1) @ v.float()).unflatten(0, seen.shape[:2]) / sums
    return (out[1:] - out[0]).square().mean((1, 2))


def read_video(n_q: int, n_k: int, text: Text | None, grid: Grid | None) -> Video:
    """Frames and text of a call, checked against its tokens."""
    text = read_text(text, n_q)
    count = n_q if text is None else text.video_count(n_q)
    if grid is None or math.prod(grid) != count or n_q != n_k:
        raise HeartError(
            f"{count} video tokens and {n_k} keys do not fit the grid {grid}: give grid=(frames, rows, columns) in the call"
        )
    if text is not None and text.unused and text.end != n_q:
        raise HeartError(f"unused text slots end at token {text.end} of {n_q}: SVG can leave them out only at the end")
    return Video(grid[0], grid[1] * grid[2], text, n_q)
