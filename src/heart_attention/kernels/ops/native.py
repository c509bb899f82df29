"""The C code for prediction on a CPU: block scores, nearest centroids, token means. PyTorch serves where it cannot.

`serves` says whether it can; callers keep their own PyTorch path, which is the definition.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...errors import HeartError
from .build import BuildError, load

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "heart_block_scores": [_LONG, *[_POINTER] * 3, _INT, *[_LONG] * 5, _POINTER, *[_LONG] * 4, _INT],
    "heart_token_means": [_LONG, _POINTER, _INT, *[_LONG] * 3, _POINTER, _INT],
    "heart_cluster_sums": [_POINTER, *[_LONG] * 3, _POINTER, _LONG, _POINTER, _POINTER],
    "heart_nearest": [_POINTER, *[_LONG] * 3, _POINTER, _POINTER, _LONG, _POINTER, _INT],
}


def _library() -> ctypes.CDLL | None:
    try:
        return _declared(load())
    except BuildError:
        return None  # `heart info` says why


@functools.lru_cache(maxsize=4)
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _INT
    return library


def serves(*tensors: Tensor) -> bool:
    """Whether the C code can read these tensors: on the CPU, all fp32 or all bf16, rows contiguous."""
    first = tensors[0].dtype
    return (
        first in (torch.float32, torch.bfloat16)
        and all(x.device.type == "cpu" and x.dtype == first and x.stride(-1) == 1 for x in tensors)
        and _library() is not None
    )


def block_scores(
    q: list[Tensor], k: list[Tensor], order: Tensor | None, stride: int, per_block: int, visible: int, out: list[Tensor]
) -> None:
    """XAttention's scores of some heads alike in shape: q, k [N, D] each -> out fp32 [ceil(N/block), Mk] each.

    `visible` groups of keys take part in the softmax; those after the last token have logit 0.
    """
    order = None if order is None else order.to(torch.int64).contiguous()
    arguments = (
        (len(q), *map(_pointers, (q, k, out)), int(q[0].dtype == torch.bfloat16))
        + (q[0].shape[0], k[0].shape[0], q[0].shape[1], q[0].stride(0), k[0].stride(0))
        + (None if order is None else order.data_ptr(), stride, per_block, out[0].shape[1], visible)
    )
    _check(_library().heart_block_scores(*arguments, torch.get_num_threads()))  # type: ignore[union-attr]


def _pointers(tensors: list[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))


def nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each token, ties to the lowest index: fp32 [N, D], [C, D] -> int64 [N]."""
    centroids = centroids.contiguous()
    norms = centroids.square().sum(-1)
    labels = torch.empty(x.shape[0], dtype=torch.int64)
    arguments = (
        (x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), centroids.data_ptr(), norms.data_ptr())
        + (centroids.shape[0], labels.data_ptr(), torch.get_num_threads())
    )  # fmt: skip
    _check(_library().heart_nearest(*arguments))  # type: ignore[union-attr]
    return labels


def cluster_sums(x: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sums [C, D] and sizes int64 [C] of the tokens with each label: fp32 [N, D], int64 [N]."""
    sums, sizes = torch.empty(count, x.shape[1]), torch.empty(count, dtype=torch.int64)
    arguments = (x.data_ptr(), *x.shape, x.stride(0), labels.data_ptr(), count, sums.data_ptr(), sizes.data_ptr())
    _check(_library().heart_cluster_sums(*arguments))  # type: ignore[union-attr]
    return sums, sizes


def token_means(x: Tensor) -> Tensor:
    """Means over tokens, fp32: x [B, H, N, D] -> [B, H, D]."""
    out = torch.empty(x.shape[0], x.shape[1], x.shape[3], dtype=torch.float32)
    heads = [head for item in x for head in item]
    arguments = (len(heads), _pointers(heads), int(x.dtype == torch.bfloat16), x.shape[2], x.shape[3], x.stride(2))
    _check(_library().heart_token_means(*arguments, out.data_ptr(), torch.get_num_threads()))  # type: ignore[union-attr]
    return out


def _check(code: int) -> None:
    if code:
        raise HeartError("there is not enough memory to predict the mask: free some, or use a shorter sequence")
