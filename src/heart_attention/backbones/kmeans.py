"""k-means of one head's tokens for SVG2: where its centroids begin; the clustering itself is an op (kernels/ops/kmeans)."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ..kernels.ops.kmeans import Clusters, lloyd, lloyd_heads, torch_assign, torch_lloyd, torch_sums, video_tokens

__all__ = [
    "Clusters",
    "lloyd",
    "lloyd_heads",
    "random_tokens",
    "torch_assign",
    "torch_lloyd",
    "torch_sums",
    "video_tokens",
]


def random_tokens(n: int, count: int, *key: object) -> Tensor:
    """`count` token numbers below n, with replacement, from a private generator seeded by `key`; int64."""
    text = "/".join(map(str, key))
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(n, (count,), generator=generator)
