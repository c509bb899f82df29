"""Prediction on a GPU: XAttention block scores, k-means and token means as Triton kernels.

They are the Triton ways of the operations in this folder. The interpreter (`TRITON_INTERPRET=1`) runs the same kernels
on CPU tensors. Nothing here is random or depends on the order in
which a GPU happens to finish: no atomics on floating-point numbers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..plan import Plan
from ..triton_attention import DTYPES, HEAD_SIZE_LIMIT, KERNEL, LOG2E, interpreted, launch_options

SCORE_BYTES = 64 << 20  # workspace of XAttention scoring: heads go in turn once it is used up
SCORE_TILE = (64, 128)  # query and key groups of one program
ASSIGN_TILE = (64, 64)  # tokens and centroids
SUM_ROWS = 32  # tokens a program adds up at a time
POOL_SPAN = 2048  # tokens one program adds up
TOLERANCE = 1e-4  # k-means of a head stops once no centroid moves further (SEMANTICS, as in backbones/kmeans.py)
CHECK_EVERY = 8  # iterations between asking the device whether all heads have stopped


class HeadClusters(NamedTuple):
    """Clusters of all heads at once."""

    labels: Tensor  # int32 [B, H, N]
    centroids: Tensor  # fp32 [B, H, C, D]
    sizes: Tensor  # int64 [B, H, C]
    iterations: Tensor  # int64 [B, H]


def reasons_not(x: Tensor) -> list[str]:
    """Why the prediction kernels cannot take this tensor [B, H, N, D]; empty if they can."""
    return KERNEL.reasons_not(None, x)


def op_reasons(x: Tensor | None = None) -> list[str]:
    """Why these kernels do not serve as a way of an operation: only for a GPU's tensors, though the interpreter could."""
    if x is not None and not x.is_cuda:
        return [f"it runs on a GPU and the tensors are on {x.device.type}"]
    return KERNEL.reasons_not(None, x if x is None or x.ndim == 4 else x[None, None])


def _precision(x: Tensor) -> str:
    """How fp32 operands are multiplied: three TF32 products on NVIDIA (24 bits in all), in full elsewhere."""
    return "tf32x3" if x.is_cuda and torch.version.hip is None else "ieee"


def _pad(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


def _rows(x: Tensor) -> Tensor:
    """x with the last dimension contiguous and offsets inside a head below 2^31."""
    far = (x.shape[2] - 1) * x.stride(2) + x.shape[3] >= 2**31
    return x.contiguous() if x.stride(-1) != 1 or far else x


def score_reasons(stride: int, block: int) -> list[str]:
    """Why these XAttention settings have no GPU kernel; empty if they have."""
    groups = block // stride
    if groups & (groups - 1) or groups > SCORE_TILE[1]:
        return [f"a block of {groups} strides is not a power of two up to {SCORE_TILE[1]}"]
    return []


def xattention_scores(
    q: Tensor,
    k: Tensor,
    stride: int,
    block: int,
    *,
    order: Tensor | None = None,
    q_blocks: int | None = None,
    k_blocks: int | None = None,
    masked: bool = True,
) -> Tensor:
    """Block scores of XAttention, fp32 [B, H, q_blocks, k_blocks], without the score matrix.

    Args:
        q, k: [B, H, Nq, D], [B, H, Nk, D].
        order: permutation of the tokens, of queries and keys alike.
        q_blocks, k_blocks: blocks after padding; by default just enough for the tokens.
        masked: padded keys take no softmax mass (False: zeros take their share, as the original lets them).
    """
    q, k = _rows(q), _rows(k)
    batch, heads = q.shape[:2]
    q_blocks = -(-q.shape[2] // block) if q_blocks is None else q_blocks
    k_blocks = -(-k.shape[2] // block) if k_blocks is None else k_blocks
    out = torch.zeros(batch, heads, q_blocks, k_blocks, dtype=torch.float32, device=q.device)
    filled = -(-q.shape[2] // block)  # further rows are padding and score nothing
    per_head = filled * (block // stride) * k_blocks * 4
    step = max(1, min(heads, SCORE_BYTES // per_head))
    order = None if order is None else order.to(device=q.device, dtype=torch.int32)
    for b in range(batch):
        for h in range(0, heads, step):
            part = slice(h, h + step)
            found = _scores(q[b : b + 1, part], k[b : b + 1, part], stride, block, order, filled, k_blocks, masked)
            out[b, part, :filled] = found
    return out


def _scores(
    q: Tensor, k: Tensor, s: int, block: int, order: Tensor | None, q_blocks: int, k_blocks: int, masked: bool
) -> Tensor:
    """Scores of the heads of one batch item, [H, q_blocks, k_blocks]."""
    from .. import triton_code

    heads, (n_q, d), n_k = q.shape[1], q.shape[2:], k.shape[2]
    tile_m, tile_n = SCORE_TILE
    groups = block // s
    q_groups, key_groups = q_blocks * groups, k_blocks * groups
    tiles = -(-key_groups // tile_n)
    sums = torch.empty(heads, q_groups, k_blocks, dtype=torch.float32, device=q.device)
    tops = torch.empty(heads, q_groups, tiles, dtype=torch.float32, device=q.device)
    triton_code.antidiagonal_sums[(-(-q_groups // tile_m), tiles, heads)](
        q, k, sums if order is None else order, sums, tops, *q.stride()[:3], *k.stride()[:3], heads, n_q, n_k,
        q_groups, -(-n_k // s) if masked else key_groups, k_blocks, tiles, LOG2E / (s * math.sqrt(d)),
        D=d, D_STEP=feature_step(q.element_size()), STRIDE=s, GROUPS=groups, PERM=order is not None,
        BLOCK_M=tile_m, BLOCK_N=tile_n, PRECISION=_precision(q), **score_launch(q.element_size()),
    )  # fmt: skip
    out = torch.empty(heads, q_blocks, k_blocks, dtype=torch.float32, device=q.device)
    triton_code.antidiagonal_blocks[(q_blocks, heads)](
        sums, tops, out, q_groups, -(-n_q // s), k_blocks, tiles, q_blocks,
        GROUPS=groups, PER_TILE=tile_n // groups, BLOCK_N=128, **reduce_launch(),
    )  # fmt: skip
    return out


def feature_step(itemsize: int) -> int:
    """Features multiplied at a time."""
    return 32 if itemsize == 4 else 64


def score_launch(itemsize: int) -> dict[str, Any]:
    """Launch figures of the scoring kernel."""
    return launch_options(8, 2) if itemsize == 4 else launch_options(4, 3)


def assign_launch() -> dict[str, Any]:
    """Launch figures of the assignment kernel."""
    return launch_options(4, 1)


def reduce_launch() -> dict[str, Any]:
    """Launch figures of the kernels that only add up."""
    return launch_options(4, 2)


def centroid_parts(centroids: Tensor, dtype: torch.dtype) -> Tensor:
    """Centroids as a sum of numbers the tensor cores take with tokens of that type: [parts, B, H, C, D].

    16-bit tokens are exact, so only the centroids need more bits: two summands give 16 (bf16) or 22 (fp16), for a
    third of what full fp32 products cost.
    """
    centroids = centroids.float().contiguous()
    if dtype == torch.float32:
        return centroids[None]
    high = centroids.to(dtype)
    return torch.stack([high, (centroids - high.float()).to(dtype)])


def kmeans_assign(x: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each token, ties to the lowest index: [B, H, N, D], [B, H, C, D] -> int32 [B, H, N]."""
    from .. import triton_code

    x, parts = _rows(x), centroid_parts(centroids, x.dtype)
    batch, heads, n, d = x.shape
    labels = torch.empty(batch, heads, n, dtype=torch.int32, device=x.device)
    tile_m, tile_n = ASSIGN_TILE
    triton_code.nearest_centroid[(-(-n // tile_m), batch * heads)](
        x, parts, centroids.float().square().sum(-1).contiguous(), labels, *x.stride()[:3], heads, n,
        centroids.shape[2], parts[0].numel(), D=d, D_STEP=feature_step(x.element_size()), PARTS=parts.shape[0],
        BLOCK_M=tile_m, BLOCK_N=tile_n, PRECISION=_precision(x), **assign_launch(),
    )  # fmt: skip
    return labels


def kmeans_update(x: Tensor, labels: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Cluster means fp32 [B, H, C, D] and sizes int64 [B, H, C]; an empty cluster keeps its centroid."""
    from .. import triton_code

    x, found = _rows(x), centroids.float().contiguous().clone()
    batch, heads, n, d = x.shape
    clusters = found.shape[2]
    perm = labels.argsort(dim=-1, stable=True).to(torch.int32)
    sizes = torch.zeros(batch, heads, clusters, dtype=torch.int64, device=x.device)
    sizes.scatter_add_(2, labels.long(), torch.ones_like(labels, dtype=torch.int64))
    starts = torch.nn.functional.pad(sizes.cumsum(-1), (1, 0)).to(torch.int32).contiguous()
    triton_code.cluster_means[(clusters, batch * heads)](
        x, perm, starts, found, *x.stride()[:3], heads, n, clusters + 1, clusters,
        D=d, D_PAD=_pad(d), PERM=True, BLOCK_M=SUM_ROWS, **reduce_launch(),
    )  # fmt: skip
    return found, sizes


def group_means(plan: Plan, x: Tensor) -> Tensor:
    """Means of keys or values over the key groups of a plan, in fp32 and then in x's type: [B·H, groups, D]."""
    from .. import triton_code

    x, perm, starts = _rows(x), plan.k_perm, plan.k_starts
    (batch, heads), d, groups = plan.shape, x.shape[-1], starts.shape[-1] - 1
    found = torch.zeros(batch * heads, groups, d, dtype=x.dtype, device=x.device)
    triton_code.cluster_means[(groups, batch * heads)](
        x, starts if perm is None else perm, starts, found, *x.stride()[:3], heads,
        0 if perm is None or perm.ndim == 1 else perm.shape[-1], 0 if starts.ndim == 1 else groups + 1, groups,
        D=d, D_PAD=_pad(d), PERM=perm is not None, BLOCK_M=SUM_ROWS, **reduce_launch(),
    )  # fmt: skip
    return found


def kmeans(x: Tensor, init: Tensor, iters: int) -> HeadClusters:
    """Lloyd's k-means of all heads at once: x [B, H, N, D] from centroids [B, H, C, D].

    A head that no longer moves keeps its result while the others go on, so it does not matter which heads are
    clustered together; the device is asked only now and then whether all have stopped.
    """
    centroids = init.float()
    labels = sizes = None
    done = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    iterations = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    for i in range(iters):
        new_labels = kmeans_assign(x, centroids)
        moved, new_sizes = kmeans_update(x, new_labels, centroids)
        shift = (moved - centroids).norm(dim=-1).amax(-1)  # [B, H]
        labels = _unless(done, new_labels, labels)
        sizes = _unless(done, new_sizes, sizes)
        centroids = _unless(done, moved, centroids)
        iterations += ~done
        done = done | (shift < TOLERANCE)
        if i % CHECK_EVERY == CHECK_EVERY - 1 and bool(done.all()):
            break
    assert labels is not None and sizes is not None  # iters is at least 1
    return HeadClusters(labels, centroids, sizes, iterations)


def _unless(done: Tensor, new: Tensor, old: Any) -> Tensor:
    """`new`, but `old` for heads that are done."""
    if old is None:
        return new
    return torch.where(done.view(*done.shape, *[1] * (new.dim() - 2)), old, new)


def pooled_means(x: Tensor) -> Tensor:
    """Token means in fp32: [B, H, N, D] -> [B, H, D]."""
    from .. import triton_code

    x = _rows(x)
    batch, heads, n, d = x.shape
    splits = -(-n // POOL_SPAN)
    sums = torch.empty(batch * heads, splits, d, dtype=torch.float32, device=x.device)
    triton_code.pooled_sums[(splits, batch * heads)](
        x, sums, *x.stride()[:3], heads, n, POOL_SPAN, splits,
        D=d, D_PAD=_pad(d), BLOCK_M=SUM_ROWS, **reduce_launch(),
    )  # fmt: skip
    return (sums.sum(1) / n).view(batch, heads, d)


__all__ = [
    "DTYPES", "HEAD_SIZE_LIMIT", "HeadClusters", "interpreted", "kmeans", "kmeans_assign", "kmeans_update",
    "op_reasons", "pooled_means", "reasons_not", "score_reasons", "xattention_scores",
]  # fmt: skip
