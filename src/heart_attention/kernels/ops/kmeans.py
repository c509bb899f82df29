"""Lloyd's k-means, Euclidean, of some heads: the definition in PyTorch, and who computes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    iterations: int | Tensor  # a GPU's number stays there


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


def means(sums: Tensor, sizes: Tensor, centroids: Tensor) -> Tensor:
    """Cluster means [C, D]; an empty cluster keeps its centroid."""
    found = sums / sizes.clamp(min=1).unsqueeze(-1)
    return torch.where(sizes.unsqueeze(-1) > 0, found, centroids)


def torch_lloyd(x: Tensor, init: Tensor, iters: int) -> Clusters:
    """k-means of x [N, D] from centroids [C, D], at most `iters` iterations, in fp32 and plain PyTorch: the definition."""
    x, centroids = x.float(), init.float()
    iterations, shift = 0, math.inf
    while iterations < iters and not shift < TOLERANCE:
        labels = torch_assign(x, centroids)
        sums, sizes = torch_sums(x, labels, len(centroids))
        moved = means(sums, sizes, centroids)
        shift = float((moved - centroids).norm(dim=-1).amax())
        centroids = moved
        iterations += 1
    return Clusters(labels, centroids, sizes, iterations)


def torch_heads(
    x: list[Tensor], init: list[Tensor], iters: int | Sequence[int], text: Text | None = None
) -> list[Clusters]:
    """`torch_lloyd` of the video tokens of some heads, one after the other.

    One space serves all heads alike that must be converted: blocks of this size, freed and allocated again between small
    ones that stay, would leave holes in the process's memory.
    """
    space = None
    clusters = []
    for one, start, most in zip(x, init, each_iters(iters, x)):
        if text is not None or one.dtype != torch.float32:
            space = video_tokens(one, text, space if space is not None and fits(space, one, text) else None)
            one = space
        clusters.append(torch_lloyd(one, start, most))
    return clusters


def c_heads(
    x: list[Tensor], init: list[Tensor], iters: int | Sequence[int], text: Text | None = None
) -> list[Clusters]:
    """The same by the C code: all heads and iterations in one parallel region, tokens read where they lie."""
    order = None if text is None else text.video_index(len(x[0]))
    return [Clusters(*found) for found in native.kmeans(x, init, each_iters(iters, x), order)]


def triton_heads(
    x: list[Tensor], init: list[Tensor], iters: int | Sequence[int], text: Text | None = None
) -> list[Clusters]:
    """The same by the GPU's kernels, all heads alike at once."""
    found: dict[int, Clusters] = {}
    kinds = [(one.shape, start.shape, most) for one, start, most in zip(x, init, each_iters(iters, x))]
    for kind in dict.fromkeys(kinds):
        group = [i for i in range(len(x)) if kinds[i] == kind]
        stacked = torch.stack([video_tokens(x[i], text) for i in group])[None]  # [1, H, N, D]
        made = triton_predict.kmeans(stacked, torch.stack([init[i] for i in group])[None], kind[2])
        parts = (made.labels[0].long(), made.centroids[0], made.sizes[0], made.iterations[0])
        found.update((i, Clusters(*head)) for i, head in zip(group, zip(*parts)))
    return [found[i] for i in range(len(x))]


def each_iters(iters: int | Sequence[int], x: list[Tensor]) -> list[int]:
    """The iterations of each head."""
    return [iters] * len(x) if isinstance(iters, int) else list(iters)


def fits(space: Tensor, x: Tensor, text: Text | None) -> bool:
    """Whether the video tokens of x have the shape of `space`."""
    return space.shape == (x.shape[0] if text is None else text.video_count(x.shape[0]), x.shape[1])


def _c_reasons(
    x: list[Tensor] | None = None, init: object = None, iters: object = None, text: Text | None = None
) -> list[str]:
    if x is not None and not x:
        return ["there is no head to cluster"]
    reasons = native.reasons_not(*(x or []))
    if x and text is not None and any(len(one) != len(x[0]) for one in x):
        reasons.append("the text does not lie at the same place in all heads")
    return reasons


def _triton_reasons(x: list[Tensor] | None = None, *more: object) -> list[str]:
    if x is not None and not x:
        return ["there is no head to cluster"]
    return triton_predict.op_reasons(None if x is None else x[0])


lloyd_heads = Op(
    "k-means",
    Way("triton", triton_heads, _triton_reasons),
    Way("c", c_heads, _c_reasons),
    Way("torch", torch_heads),
)


def lloyd(x: Tensor, init: Tensor, iters: int) -> Clusters:
    """k-means of one head: x [N, D] from centroids [C, D], at most `iters` iterations, in fp32."""
    return lloyd_heads([x], [init], iters)[0]


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
