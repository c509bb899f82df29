"""Lloyd's k-means of one head's tokens, Euclidean, chunked over tokens.

The assignment runs in C where that was built (kernels/ops/native.py) and in PyTorch everywhere else.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.ops import native as native
from ..masks import Text

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


def means(sums: Tensor, sizes: Tensor, centroids: Tensor) -> Tensor:
    """Cluster means [C, D]; an empty cluster keeps its centroid."""
    found = sums / sizes.clamp(min=1).unsqueeze(-1)
    return torch.where(sizes.unsqueeze(-1) > 0, found, centroids)


def lloyd(x: Tensor, init: Tensor, iters: int) -> Clusters:
    """k-means of x [N, D] from centroids [C, D], at most `iters` iterations, in fp32."""
    x, centroids = x.float(), init.float()
    in_c = native.serves(x, centroids)
    nearest, sums_of = (native.nearest, native.cluster_sums) if in_c else (torch_assign, torch_sums)
    iterations, shift = 0, math.inf
    while iterations < iters and not shift < TOLERANCE:
        labels = nearest(x, centroids)
        sums, sizes = sums_of(x, labels, len(centroids))
        moved = means(sums, sizes, centroids)
        shift = float((moved - centroids).norm(dim=-1).amax())
        centroids = moved
        iterations += 1
    return Clusters(labels, centroids, sizes, iterations)


def lloyd_heads(x: list[Tensor], init: list[Tensor], iters: int, text: Text | None = None) -> list[Clusters]:
    """`lloyd` of the video tokens of some heads alike in shape; a GPU takes them together, a CPU in turn.

    On a CPU one space serves all heads that must be converted: blocks of this size, freed and asked for again
    between small ones that stay, would leave holes in the process's memory.
    """
    from ..kernels.ops import triton_predict

    if x and triton_predict.serves(x[0][None, None], "k-means"):
        return gpu_heads(x, init, iters, text)
    space = None
    clusters = []
    for one, start in zip(x, init):
        if text is not None or one.dtype != torch.float32:
            space = video_tokens(one, text, space)
            one = space
        clusters.append(lloyd(one, start, iters))
    return clusters


def gpu_heads(x: list[Tensor], init: list[Tensor], iters: int, text: Text | None = None) -> list[Clusters]:
    """`lloyd_heads` by the GPU's kernels, all heads at once."""
    from ..kernels.ops import triton_predict

    stacked = torch.stack([video_tokens(one, text) for one in x])[None]  # [1, H, N, D]
    found = triton_predict.kmeans(stacked, torch.stack(init)[None], iters)
    parts = (found.labels[0].long(), found.centroids[0], found.sizes[0], found.iterations[0].tolist())
    return [Clusters(*head) for head in zip(*parts)]


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


def random_tokens(n: int, count: int, *key: object) -> Tensor:
    """`count` token numbers below n, with replacement, from a private generator seeded by `key`; int64."""
    text = "/".join(map(str, key))
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(n, (count,), generator=generator)
