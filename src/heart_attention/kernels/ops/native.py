"""The C code for prediction on a CPU (predict.c, kmeans.c): block scores, k-means, token means."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from ...errors import HeartError
from . import build

# The structs of predict.c and kmeans.c.
_SCORES = struct.Struct("16q")
_KMEANS = struct.Struct("6q")
_CLUSTERING = struct.Struct("10q")
_MEANS = struct.Struct("8q")


def reasons_not(*tensors: Tensor) -> list[str]:
    """Why the C code cannot read these tensors: on the CPU, all fp32 or all bf16, rows contiguous; empty if it can."""
    reasons = build.reasons_not()
    for x in tensors:
        if x.device.type != "cpu":
            reasons.append(f"the tensors are on {x.device}, not on the CPU")
        if x.dtype not in (torch.float32, torch.bfloat16) or x.dtype != tensors[0].dtype:
            reasons.append(f"it takes float32 or bfloat16, all alike, not {str(x.dtype).removeprefix('torch.')}")
        if x.stride(-1) != 1:
            reasons.append("the numbers of a token do not lie side by side")
    return list(dict.fromkeys(reasons))


def serves(*tensors: Tensor) -> bool:
    """Whether the C code can read these tensors."""
    return not reasons_not(*tensors)


def block_scores(
    q: list[Tensor], k: list[Tensor], order: Tensor | None, stride: int, per_block: int, visible: int, out: list[Tensor]
) -> None:
    """XAttention's scores of some heads alike in shape: q, k [N, D] each -> out fp32 [ceil(N/block), Mk] each.

    `visible` groups of keys take part in the softmax; those after the last token have logit 0.
    """
    order = None if order is None else order.to(torch.int64).contiguous()
    tables = [pointers(x) for x in (q, k, out)]
    _call(
        "heart_block_scores", _SCORES, len(q), *map(ctypes.addressof, tables), q[0].shape[0], k[0].shape[0],
        q[0].shape[1], q[0].stride(0), k[0].stride(0), 0 if order is None else order.data_ptr(), stride, per_block,
        out[0].shape[1], visible, q[0].dtype == torch.bfloat16, build.threads(),
    )  # fmt: skip


def kmeans(
    x: list[Tensor], init: list[Tensor], iters: list[int], order: Tensor | None = None
) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """Lloyd's iterations of some heads in one parallel region: x [N, D] and centroids [C, D] of each.

    `order` int64 [n] says which tokens take part. Returns labels int64 [n], centroids fp32, sizes int64 [C] and how many
    iterations each took.
    """
    n = [len(one) if order is None else len(order) for one in x]
    centroids = [start.to(torch.float32, copy=True).contiguous() for start in init]
    labels = [torch.empty(length, dtype=torch.int64) for length in n]
    sizes = [torch.empty(len(start), dtype=torch.int64) for start in init]
    items = bytearray(_CLUSTERING.size * len(x))
    # The largest first: threads that are done take what is left.
    for place, i in enumerate(sorted(range(len(x)), key=lambda i: -n[i] * len(init[i]) * iters[i])):
        _CLUSTERING.pack_into(
            items, place * _CLUSTERING.size, x[i].data_ptr(), n[i], x[i].stride(0), len(init[i]), iters[i],
            centroids[i].data_ptr(), labels[i].data_ptr(), sizes[i].data_ptr(), i, 0,
        )  # fmt: skip
    table = (ctypes.c_char * len(items)).from_buffer(items)
    _call(
        "heart_kmeans", _KMEANS, ctypes.addressof(table), len(x), x[0].shape[1],
        0 if order is None else order.data_ptr(), x[0].dtype == torch.bfloat16, build.threads(),
    )  # fmt: skip
    found = {fields[-2]: fields[-1] for fields in _CLUSTERING.iter_unpack(items)}
    return [(labels[i], centroids[i], sizes[i], found[i]) for i in range(len(x))]


def token_means(x: Tensor) -> Tensor:
    """Means over tokens, fp32: x [B, H, N, D] -> [B, H, D]."""
    out = torch.empty(x.shape[0], x.shape[1], x.shape[3], dtype=torch.float32)
    heads = [head for item in x for head in item]
    table = pointers(heads)
    _call(
        "heart_token_means", _MEANS, len(heads), ctypes.addressof(table), x.shape[2], x.shape[3], x.stride(2),
        out.data_ptr(), x.dtype == torch.bfloat16, build.threads(),
    )  # fmt: skip
    return out


def pointers(tensors: list[Tensor]) -> ctypes.Array:
    """Where tensors begin, as a C array; it must live as long as the call."""
    return (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))


def _call(name: str, form: struct.Struct, *arguments: int | float) -> None:
    if build.call(name, form, *arguments):
        raise HeartError("there is not enough memory to predict the mask: free some, or use a shorter sequence")
