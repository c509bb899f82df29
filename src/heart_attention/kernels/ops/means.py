"""Means over all tokens of each head, for the drift: in fp32, whatever the tokens are."""

from __future__ import annotations

import torch
from torch import Tensor

from . import native, triton_predict
from .chooser import Op, Way

_CHUNK = 512  # tokens widened to fp32 at a time: stays in cache, and torch sums bf16 itself ten times slower


def torch_token_means(x: Tensor) -> Tensor:
    """Means over tokens in plain PyTorch: the definition. x [B, H, N, D] -> fp32 [B, H, D]."""
    if x.dtype == torch.float32 and _is_matrix(x):
        return torch.stack([_sum_rows(item) for item in x]) / x.shape[2]
    if x.is_cuda or x.dtype in (torch.float32, torch.float64):
        return x.mean(2, dtype=torch.float32)
    total = x.new_zeros((x.shape[0], x.shape[1], x.shape[3]), dtype=torch.float32)
    for start in range(0, x.shape[2], _CHUNK):
        total += x[:, :, start : start + _CHUNK].float().sum(2)
    return total / x.shape[2]


def _is_matrix(x: Tensor) -> bool:
    """Whether the tokens of all heads are rows of one matrix on the CPU, as diffusers lays them out."""
    return x.device.type == "cpu" and x.stride()[1:] == (x.shape[3], x.shape[1] * x.shape[3], 1)


def _sum_rows(x: Tensor) -> Tensor:
    """Sum over tokens of such an [H, N, D], as one product at the speed of memory: -> [H, D]."""
    heads, n, dim = x.shape
    return torch.mm(x.new_ones(1, n), x.transpose(0, 1).reshape(n, heads * dim)).view(heads, dim)


def _c_reasons(x: Tensor | None = None) -> list[str]:
    if x is None:
        return native.reasons_not()
    if x.dtype == torch.float32 and _is_matrix(x):
        return ["PyTorch sums the rows of one fp32 matrix as quickly as memory gives them"]
    return native.reasons_not(x)


token_means = Op(
    "token means",
    Way("triton", lambda x: triton_predict.pooled_means(x), lambda x=None: triton_predict.op_reasons(x)),
    Way("c", native.token_means, _c_reasons),
    Way("torch", torch_token_means),
)
