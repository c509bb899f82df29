"""Which key clusters to keep for each query cluster: by mass (SVG2), or by the error of approximating them.

When a cluster that is left out is dropped, its mass is what is lost. When it counts as its mean, what is lost is how
far its keys and values spread around that mean: a heavy cluster of equal keys may go at no cost at all. Everything
here takes all heads of a call at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.ops.chooser import Op, Way
from ..kernels.ops.rank import by_error_reasons, c_keep_by_error, cluster_moments, keep_share
from ..masks import top_p

RANKS = ("mass", "error")


class ClusterStats(NamedTuple):
    """Tokens of each cluster: mean [B, H, C, D], mean square alike, and size int64 [B, H, C]."""

    mean: Tensor
    square: Tensor
    sizes: Tensor

    @property
    def variance(self) -> Tensor:
        """[B, H, C, D], never below 0."""
        return (self.square - self.mean.square()).clamp_(min=0)


def cluster_stats(x: Tensor, labels: Tensor, count: int) -> ClusterStats:
    """Of x [B, H, N, D] with labels [B, H, N]; a label that is not below `count` (text) belongs to no cluster."""
    sums, squares, sizes = cluster_moments(x, labels, count)
    number = sizes.clamp(min=1).unsqueeze(-1)
    return ClusterStats(sums / number, squares / number, sizes)


def cluster_mass(q_centroids: Tensor, k_centroids: Tensor, k_sizes: Tensor) -> Tensor:
    """Softmax over key clusters of the centroids' logits and the clusters' sizes, fp32 [..., Cq, Ck].

    An empty cluster has log 0 = -inf and so no mass.
    """
    logits = q_centroids.float() @ k_centroids.float().mT / math.sqrt(q_centroids.shape[-1])
    return torch.softmax(logits + k_sizes.float().log().unsqueeze(-2), dim=-1)


def error_per_key(mass: Tensor, queries: ClusterStats, keys: ClusterStats, values: ClusterStats) -> Tensor:
    """Estimated error of approximating each key cluster, for each key computed instead, fp32 [B, H, Cq, Ck].

    Mass times the spread of the logits inside the cluster times the spread of its values:
    `p_ab · σ·√(Σ_d mean_{i∈a} q_id² · var_{t∈b} k_td) · √(mean_{t∈b} ‖v_t − v̄_b‖²) / n_b`.
    """
    logits = (queries.square @ keys.variance.mT).sqrt() / math.sqrt(queries.square.shape[-1])
    per_key = values.variance.sum(-1).sqrt() / keys.sizes.clamp(min=1)  # [B, H, Ck]
    return mass * logits * per_key.unsqueeze(-2)


def by_mass(mass: Tensor, thresholds: Tensor, at_least: int) -> Tensor:
    """SVG2's rule: the heaviest clusters until they reach the share τ of the mass; mass [B, H, Cq, Ck], τ [B, H]."""
    tau = thresholds.to(mass.device).unsqueeze(-1).expand(mass.shape[:-1])
    return top_p(mass, tau, strict=False, total=1.0, at_least=max(1, at_least))


def by_share(scores: Tensor, k_sizes: Tensor, shares: Tensor, at_least: int) -> Tensor:
    """The best clusters until they hold the share of all keys, bool [B, H, Cq, Ck]; the one that crosses stays.

    Every query cluster computes about as many keys, so the cost is known beforehand.
    """
    return keep_share(scores, k_sizes, shares, max(1, at_least))


def torch_keep_by_error(
    q: Tensor, k: Tensor, v: Tensor, q_labels: Tensor, k_labels: Tensor, rows: int, columns: int, shares: Tensor,
    at_least: int = 1,
) -> Tensor:  # fmt: skip
    """Clusters that hold the share of all keys, those first whose approximation costs most: the definition.

    By the present means; bool [B, H, rows, columns] for q, k, v [B, H, N, D] with labels [B, H, N].
    """
    queries, keys = cluster_stats(q, q_labels, rows), cluster_stats(k, k_labels, columns)
    mass = cluster_mass(queries.mean, keys.mean, keys.sizes)
    scores = error_per_key(mass, queries, keys, cluster_stats(v, k_labels, columns))
    return by_share(scores, keys.sizes, shares, at_least)


keep_by_error = Op("ranked clusters", Way("c", c_keep_by_error, by_error_reasons), Way("torch", torch_keep_by_error))
