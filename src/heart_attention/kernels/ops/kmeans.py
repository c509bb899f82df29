"""Lloyd's k-means, Euclidean: the nearest centroid of each token, sums over clusters, and both in turn for some heads."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...masks import Text
from . import native, triton_predict
from .chooser import Op, Way

TOLERANCE = 1e-4  # a head stops once no centroid moves further than this
CHUNK_FLOATS = 1 << 20  # entries of a distance matrix that exist at once


class Clusters(NamedTuple):
    """Result of clustering one head."""

    labels: Tensor  # int64 [N]
    centroids: Tensor  # fp32 [C, D]
    sizes: Tensor  # int64 [C]
    iterations: int


def torch_assign(x: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each token, ties to the lowest index: x [N, D], [C, D] -> int64 [N].

    In plain PyTorch: the definition. ‖x‖² is the same for all centroids and left out.
    """
    norms = centroids.square().sum(-1)  # [C]
    labels = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    step = max(1, CHUNK_FLOATS // centroids.shape[0])
    for start in range(0, x.shape[0], step):
        part = x[start : start + step]
        labels[start : start + step] = torch.addmm(norms, part, centroids.T, alpha=-2).argmin(-1)
    return labels


def torch_sums(x: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sums [C, D] and sizes int64 [C] of the tokens with each label, in plain PyTorch: the definition."""
    sums = torch.zeros(count, x.shape[1], dtype=x.dtype, device=x.device).index_add_(0, labels, x)
    return sums, torch.bincount(labels, minlength=count)


def _c_reasons(x: Tensor | None = None, other: Tensor | None = None, *more: object) -> list[str]:
    return native.reasons_not() if x is None else native.reasons_not(x)


nearest = Op("nearest centroid", Way("c", native.nearest, _c_reasons), Way("torch", torch_assign))
cluster_sums = Op("cluster sums", Way("c", native.cluster_sums, _c_reasons), Way("torch", torch_sums))


def means(sums: Tensor, sizes: Tensor, centroids: Tensor) -> Tensor:
    """Cluster means [C, D]; an empty cluster keeps its centroid."""
    found = sums / sizes.clamp(min=1).unsqueeze(-1)
    return torch.where(sizes.unsqueeze(-1) > 0, found, centroids)


def lloyd(x: Tensor, init: Tensor, iters: int) -> Clusters:
    """k-means of x [N, D] from centroids [C, D], at most `iters` iterations, in fp32."""
    x, centroids = x.float(), init.float()
    iterations, shift = 0, math.inf
    while iterations < iters and not shift < TOLERANCE:
        labels = nearest(x, centroids)
        sums, sizes = cluster_sums(x, labels, len(centroids))
        moved = means(sums, sizes, centroids)
        shift = float((moved - centroids).norm(dim=-1).amax())
        centroids = moved
        iterations += 1
    return Clusters(labels, centroids, sizes, iterations)


def lloyd_in_turn(x: list[Tensor], init: list[Tensor], iters: int, text: Text | None = None) -> list[Clusters]:
    """`lloyd` of the video tokens of some heads alike in shape, one after the other: the definition.

    One space serves all heads that must be converted: blocks of this size, freed and allocated again between small ones
    that stay, would leave holes in the process's memory.
    """
    space = None
    clusters = []
    for one, start in zip(x, init):
        if text is not None or one.dtype != torch.float32:
            space = video_tokens(one, text, space)
            one = space
        clusters.append(lloyd(one, start, iters))
    return clusters


def triton_heads(x: list[Tensor], init: list[Tensor], iters: int, text: Text | None = None) -> list[Clusters]:
    """The same by the GPU's kernels, all heads at once."""
    stacked = torch.stack([video_tokens(one, text) for one in x])[None]  # [1, H, N, D]
    found = triton_predict.kmeans(stacked, torch.stack(init)[None], iters)
    parts = (found.labels[0].long(), found.centroids[0], found.sizes[0], found.iterations[0].tolist())
    return [Clusters(*head) for head in zip(*parts)]


def _triton_reasons(x: list[Tensor] | None = None, *more: object) -> list[str]:
    if x is not None and not x:
        return ["there is no head to cluster"]
    return triton_predict.op_reasons(None if x is None else x[0])


lloyd_heads = Op("k-means", Way("triton", triton_heads, _triton_reasons), Way("torch", lloyd_in_turn))


def video_tokens(x: Tensor, text: Text | None, space: Tensor | None = None) -> Tensor:
    """The tokens of x [N, D] that are not text, as fp32, written into `space` if given."""
    n = x.shape[0] if text is None else text.video_count(x.shape[0])
    if space is None:
        space = torch.empty(n, x.shape[1], dtype=torch.float32, device=x.device)
    before = n if text is None else text.start
    space[:before].copy_(x[:before])
    if text is not None:
        space[before:].copy_(x[text.end :])
    return space
