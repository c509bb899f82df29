"""EAR (SVG-EAR): SVG2's clusters, and the pairs chosen by the error that approximating them would make, per cost.

The original replaces what it leaves out by one key a cluster (here `rest="mean"`) and so keeps not what has most mass
but what is approximated worst. Written from its rules in words; the original is a fork of Sparse-VideoGen (Apache-2.0;
the fork's own licence file was not seen). Its quirks with empty clusters and with text are left out: empty clusters and
text are never approximated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import HeartError
from ..kernels.ops.kmeans import torch_sums
from ..masks import ClusterMask, Text, top_p
from .base import Key, Thresholds, check_qk, check_share, read_heads, read_text, read_thresholds
from .svg2 import SVG2, ClusterState

TINY = 1e-8  # the original's guard of its logarithms
ERROR_FLOATS = 1 << 20  # exponentials that exist at once
FP32_LIMIT = 40.0  # e^{2d} of larger differences leaves fp32


class Clustered(NamedTuple):
    """One head as routing sees it."""

    q_centroids: Tensor  # fp32 [Cq, D]
    k_centroids: Tensor  # fp32 [Ck, D]
    q_sizes: Tensor  # int64 [Cq]
    k_labels: Tensor  # int64 [video]
    k: Tensor  # fp32 [video, D]
    v: Tensor  # fp32 [video, D]


class Routing(NamedTuple):
    """What the choice needs of one head, whatever its threshold."""

    mass: Tensor  # [Cq, Ck] softmax mass of each key cluster, by centroids
    score: Tensor  # [Cq, Ck] logarithm of error per cost
    area: Tensor  # int64 [Cq, Ck] token pairs


@dataclass(frozen=True)
class EAR(SVG2):
    """The SVG-EAR predictor; it reads values, and its masks are meant for `rest="mean"`.

    Args:
        min_ratio: share r of key clusters that is kept by mass alone; the budget covers at least twice as many.
        gamma: exponent of the cost in error per cost.
        q_clusters, k_clusters, init_iters, step_iters, seed: as in `SVG2`.
    """

    min_ratio: float = 0.05
    gamma: float = 1.0

    name: ClassVar[str] = "ear"
    default_rest: ClassVar[str] = "mean"
    candidates: ClassVar[tuple[float, ...]] = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("EAR", min_ratio=self.min_ratio)
        if self.equal_groups is not None:
            raise HeartError(f"EAR got equal_groups={self.equal_groups}: it routes clusters, take SVG2(rank='error')")
        if self.rank != "mass":
            raise HeartError(f"EAR got rank={self.rank!r}: its rule is error per cost, leave rank out")
        if isinstance(self.gamma, bool) or not isinstance(self.gamma, int | float) or not 0 <= self.gamma < math.inf:
            raise HeartError(f"EAR got gamma={self.gamma!r}: give a finite number of at least 0")

    @torch.no_grad()
    def predict(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Thresholds,
        state: ClusterState | None = None,
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
        v: Tensor | None = None,
    ) -> ClusterMask:
        """The cluster pairs to compute exactly (see `Backbone.predict`); τ sets the budget, as mass does in SVG2."""
        check_qk(q, k)
        tau = read_thresholds(thresholds, *q.shape[:2])
        state = self.new_state() if state is None else state
        mask = super().predict(q, k, 1.0, state, text, heads=heads, key=key)
        for at in (tau < 1).nonzero().tolist():
            routing = self.routing(self._clustered(mask, state, at, k, v, heads, key))
            self._video(mask, at).copy_(self.select(routing, float(tau[tuple(at)])))
        return mask

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
        **more: Any,
    ) -> tuple[list[ClusterMask], ClusterMask]:
        """A mask for each threshold and the full one, from one clustering and one set of errors."""
        state = self.new_state()
        full = super().predict(q, k, 1.0, state, text, heads=heads, key=key)
        masks = [replace(full, map=full.map.clone()) for _ in thresholds]
        for at in torch.ones(full.shape).nonzero().tolist():
            routing = self.routing(self._clustered(full, state, at, k, v, heads, key))
            for mask, tau in zip(masks, thresholds):
                self._video(mask, at).copy_(self.select(routing, float(tau)))
        return masks, full

    def routing(self, head: Clustered) -> Routing:
        """Masses, error per cost and areas of one head's cluster pairs."""
        k_sizes = torch.bincount(head.k_labels, minlength=len(head.k_centroids))
        logits = head.q_centroids @ head.k_centroids.T / math.sqrt(head.k.shape[-1])  # [Cq, Ck]
        mass = torch.softmax(logits + (k_sizes + TINY).log(), -1)
        area = head.q_sizes[:, None] * k_sizes
        log_error = (_log_error(head) + 2 * logits).clamp(min=math.log(TINY))
        return Routing(mass, log_error - self.gamma * area.clamp(min=TINY).log(), area)

    def budget(self, routing: Routing, tau: float) -> Tensor:
        """Token pairs that each query cluster may compute, int64 [Cq]: those of SVG2's choice at this threshold."""
        at_least = max(1, int(2 * self.min_ratio * routing.mass.shape[1])) if self.min_ratio else 1
        return (top_p(routing.mass, tau, strict=False, total=1.0, at_least=at_least) * routing.area).sum(-1)

    def select(self, routing: Routing, tau: float) -> Tensor:
        """The map of one head, bool [Cq, Ck]: a few by mass, the others by error per cost until the budget is used."""
        if tau >= 1:
            return torch.ones_like(routing.area, dtype=torch.bool)
        reserved = torch.zeros_like(routing.area, dtype=torch.bool)
        if self.min_ratio:
            first = routing.mass.sort(dim=-1, descending=True, stable=True).indices
            reserved.scatter_(1, first[:, : max(1, int(self.min_ratio * first.shape[1]))], True)
        left = (self.budget(routing, tau) - (routing.area * reserved).sum(-1)).clamp(min=0)
        places = routing.score.masked_fill(reserved, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        areas = (routing.area * ~reserved).gather(1, places)
        chosen = areas.cumsum(-1) - areas < left[:, None]  # what comes before is within the budget
        return reserved | torch.zeros_like(reserved).scatter_(1, places, chosen)

    def _video(self, mask: ClusterMask, at: list[int]) -> Tensor:
        """The part of a head's map that is between clusters of video, a view [Cq, Ck]."""
        return mask.map[at[0], at[1], : self.q_clusters, : self.k_clusters]

    def _clustered(
        self, mask: ClusterMask, state: ClusterState, at: list[int], k: Tensor, v: Tensor | None, heads: Any, key: Any
    ) -> Clustered:
        if v is None or v.shape[:3] != k.shape[:3]:
            shape = None if v is None else tuple(v.shape)
            raise HeartError(f"EAR chooses by values and got v of shape {shape}: give v [B, H, N, D] beside q and k")
        b, h = at
        first = 0 if key is None else key[2]
        centroids = state.centroids[first + b, read_heads(heads, k.shape[1])[h]]
        text, n = read_text(mask.text, k.shape[2]), k.shape[2]
        video: Any = slice(None) if text is None else text.video(n, k.device)
        q_labels, k_labels = mask.q_labels[b, h, video].long(), mask.k_labels[b, h, video].long()
        sizes = torch.bincount(q_labels, minlength=self.q_clusters)
        return Clustered(*centroids, sizes, k_labels, k[b, h, video].float(), v[b, h, video].float())


def _log_error(head: Clustered) -> Tensor:
    """log Σ_{t∈b} ‖e^d v_t − v̄_b‖² with d = σ q̄_a·(k_t − k̄_b), fp32 [Cq, Ck]: the error without its factor e^{2c}.

    Written with e^d − 1 and v_t − v̄_b, so that nothing cancels where tokens lie close to their centroid.
    """
    count, labels = len(head.k_centroids), head.k_labels
    sums, sizes = torch_sums(head.v, labels, count)
    off = head.v - (sums / sizes.clamp(min=1)[:, None])[labels]  # v_t − v̄_b
    square, cross, own = head.v.square().sum(-1), (head.v * off).sum(-1), off.square().sum(-1)  # [N] each
    keys = (head.k - head.k_centroids[labels]).T / math.sqrt(head.k.shape[-1])  # [D, N]
    step = max(1, ERROR_FLOATS // keys.shape[1])
    rows = []
    for start in range(0, len(head.q_centroids), step):
        d = head.q_centroids[start : start + step] @ keys  # [rows, N]
        grown = torch.expm1(d if d.max() < FP32_LIMIT else d.double().clamp(max=FP32_LIMIT * 8))
        error = grown.square() * square + 2 * grown * cross + own
        found = torch.zeros(len(d), count, dtype=error.dtype, device=d.device).index_add_(1, labels, error)
        rows.append(found.clamp(min=0).log().float())
    return torch.cat(rows)
