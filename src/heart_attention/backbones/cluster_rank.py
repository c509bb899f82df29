"""Which key clusters to keep for each query cluster: by mass (SVG2), or by the error of approximating them.

When a cluster that is left out is dropped, its mass is what is lost. When it counts as its mean, what is lost is how
far its keys and values spread around that mean: a heavy cluster of equal keys may go at no cost at all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.ops.kmeans import Clusters, cluster_sums
from ..kernels.ops.selection import keep_share
from ..masks import top_p

RANKS = ("mass", "error")


def cluster_mass(q_centroids: Tensor, k_centroids: Tensor, k_sizes: Tensor) -> Tensor:
    """Softmax over key clusters of the centroids' logits and the clusters' sizes, fp32 [Cq, Ck].

    An empty cluster has log 0 = -inf and so no mass.
    """
    logits = q_centroids.float() @ k_centroids.float().T / math.sqrt(q_centroids.shape[-1])
    return torch.softmax(logits + k_sizes.float().log(), dim=-1)


def mean_square(x: Tensor, clusters: Clusters) -> Tensor:
    """Mean square of the tokens of each cluster, [C, D]; x fp32 [N, D]."""
    squares, sizes = cluster_sums(x.square(), clusters.labels, len(clusters.sizes))
    return squares / sizes.clamp(min=1).unsqueeze(-1)


def error_per_key(mass: Tensor, q_square: Tensor, k_variance: Tensor, v_spread: Tensor, k_sizes: Tensor) -> Tensor:
    """Estimated error of approximating each key cluster, for each key computed instead, fp32 [Cq, Ck].

    Mass times the spread of the logits inside the cluster times the spread of its values:
    `p_ab · σ·√(Σ_d mean_{i∈a} q_id² · var_{t∈b} k_td) · √(mean_{t∈b} ‖v_t − v̄_b‖²) / n_b`.

    Args:
        mass: [Cq, Ck].
        q_square: mean square of the queries of a cluster, [Cq, D].
        k_variance: variance of the keys of a cluster, [Ck, D].
        v_spread: mean squared distance of its values from their mean, [Ck].
        k_sizes: [Ck].
    """
    logits = (q_square @ k_variance.T).clamp(min=0).sqrt() / math.sqrt(q_square.shape[-1])
    return mass * logits * v_spread.clamp(min=0).sqrt() / k_sizes.clamp(min=1)


def by_mass(mass: Tensor, threshold: float, at_least: int) -> Tensor:
    """SVG2's rule: the heaviest clusters until they reach the share τ of the mass, bool [Cq, Ck]."""
    return top_p(mass, threshold, strict=False, total=1.0, at_least=max(1, at_least))


def by_share(scores: Tensor, k_sizes: Tensor, share: float, at_least: int) -> Tensor:
    """The best clusters until they hold the share of all keys, bool [Cq, Ck]; the one that crosses stays.

    Every query cluster computes about as many keys, so the cost is known beforehand. Ties go to the lowest index; a row
    with NaN is kept whole.
    """
    return keep_share(scores, k_sizes, share, max(1, at_least))
