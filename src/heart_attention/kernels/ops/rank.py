"""Ranking clusters anew at every call: moments of their tokens, and which of them to keep."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from ...errors import HeartError
from . import build, native
from .chooser import Op, Way

_MOMENTS = struct.Struct("12q")  # the structs of rank.c
_KEEP = struct.Struct("9q")
_BY_ERROR = struct.Struct("21q")
Moments = tuple[Tensor, Tensor, Tensor]  # sums fp32 [B, H, C, D], sums of squares alike, sizes int64 [B, H, C]


def torch_cluster_moments(x: Tensor, labels: Tensor, count: int) -> Moments:
    """Sums, sums of squares and sizes of the tokens with each label, in plain PyTorch: the definition.

    Args:
        x: [B, H, N, D].
        labels: integer [B, H, N]; a label that is not below `count` belongs to no cluster (text).
        count: clusters C.
    """
    batch, heads, _, dim = x.shape
    sums, squares = (torch.zeros(batch, heads, count + 1, dim, device=x.device) for _ in range(2))
    place = labels.long().clamp(max=count)
    for b in range(batch):
        for h in range(heads):
            tokens = x[b, h].float()
            sums[b, h].index_add_(0, place[b, h], tokens)
            squares[b, h].index_add_(0, place[b, h], tokens.square())
    sizes = torch.zeros(batch, heads, count + 1, dtype=torch.int64, device=x.device)
    sizes.scatter_add_(-1, place, torch.ones_like(place))
    return sums[:, :, :count], squares[:, :, :count], sizes[:, :, :count]


def torch_keep_share(scores: Tensor, sizes: Tensor, shares: Tensor, at_least: int = 1) -> Tensor:
    """The best clusters of each row until they hold a share of all keys, in plain PyTorch: the definition.

    The one that crosses stays, ties go to the lowest index, a row with NaN is kept whole. bool [B, H, R, C].

    Args:
        scores: fp32 [B, H, R, C].
        sizes: keys of each cluster, int64 [B, H, C].
        shares: of each head, float64 [B, H].
        at_least: clusters that every row keeps.
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    ranked = sizes.double().unsqueeze(2).expand(scores.shape).gather(-1, order)
    before = ranked.cumsum(-1) - ranked
    keep = before < (shares.to(scores.device, torch.float64) * sizes.sum(-1))[..., None, None]
    keep[..., :at_least] = True
    keep |= scores.isnan().any(-1, keepdim=True)
    return torch.empty_like(keep).scatter_(-1, order, keep)


def _c_cluster_moments(x: Tensor, labels: Tensor, count: int) -> Moments:
    batch, heads, n, dim = x.shape
    labels = labels.to(torch.int16).contiguous()
    sums, squares = torch.empty(batch, heads, count, dim), torch.empty(batch, heads, count, dim)
    sizes = torch.empty(batch, heads, count, dtype=torch.int64)
    tables = [native.pointers([one for item in y for one in item]) for y in (x, labels)]
    build.call(
        "heart_cluster_moments", _MOMENTS, batch * heads, *map(ctypes.addressof, tables), n, dim, x.stride(2), count,
        sums.data_ptr(), squares.data_ptr(), sizes.data_ptr(), x.dtype == torch.bfloat16, build.threads(),
    )  # fmt: skip
    return sums, squares, sizes


def _c_keep_share(scores: Tensor, sizes: Tensor, shares: Tensor, at_least: int = 1) -> Tensor:
    batch, heads, rows, columns = scores.shape
    scores, sizes, shares = scores.contiguous(), sizes.contiguous(), shares.double().expand(batch, heads).contiguous()
    kept = torch.empty(scores.shape, dtype=torch.bool)
    failed = build.call(
        "heart_rank_keep", _KEEP, batch * heads, rows, columns, scores.data_ptr(), sizes.data_ptr(), shares.data_ptr(),
        at_least, kept.data_ptr(), build.threads(),
    )  # fmt: skip
    if failed:
        raise HeartError("there is not enough memory to rank the clusters: free some, or use fewer clusters")
    return kept


def c_keep_by_error(
    q: Tensor, k: Tensor, v: Tensor, q_labels: Tensor, k_labels: Tensor, rows: int, columns: int, shares: Tensor,
    at_least: int = 1,
) -> Tensor:  # fmt: skip
    """`backbones.cluster_rank.torch_keep_by_error` in one pass of C."""
    batch, heads, _, dim = q.shape
    shares = shares.double().expand(batch, heads).contiguous()
    labels = [one.to(torch.int16).contiguous() for one in (q_labels, k_labels)]
    tables = [native.pointers([head for item in x for head in item]) for x in (q, k, v, *labels)]
    kept = torch.empty(batch, heads, rows, columns, dtype=torch.bool)
    head = (batch * heads, *map(ctypes.addressof, tables), q.shape[2], k.shape[2], dim, v.shape[3])
    head += (q.stride(2), k.stride(2), v.stride(2), rows, columns, shares.data_ptr(), at_least)
    tail = (kept.data_ptr(), q.dtype == torch.bfloat16, build.threads())
    floats = build.call("heart_by_error_floats", _BY_ERROR, *head, 0, *tail)
    space = torch.empty(batch * heads * floats)
    if build.call("heart_keep_by_error", _BY_ERROR, *head, space.data_ptr(), *tail):
        raise HeartError("there is not enough memory to rank the clusters: free some, or use fewer clusters")
    return kept


def by_error_reasons(
    q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, *more: object
) -> list[str]:
    """Why `c_keep_by_error` cannot serve; empty if it can."""
    return native.reasons_not() if q is None or k is None or v is None else native.reasons_not(q, k, v)


def _moments_reasons(x: Tensor | None = None, labels: Tensor | None = None, *more: object) -> list[str]:
    return native.reasons_not() if x is None else native.reasons_not(x)


def _keep_reasons(scores: Tensor | None = None, *more: object, **options: object) -> list[str]:
    if scores is not None and scores.dtype != torch.float32:
        return [f"scores are {scores.dtype}, not float32"]
    return native.reasons_not() if scores is None else native.reasons_not(scores)


cluster_moments = Op(
    "cluster moments", Way("c", _c_cluster_moments, _moments_reasons), Way("torch", torch_cluster_moments)
)
keep_share = Op("ranked share", Way("c", _c_keep_share, _keep_reasons), Way("torch", torch_keep_share))
