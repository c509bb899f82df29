"""Kernel `flashinfer_blocks`: flashinfer's block-sparse attention from block indices, on sm_100.

Where cuDNN's package is not installed it does the same there: kept key blocks of every head and row as indices, log-sums,
the rest joined by them. Blocks of 128 alone. Written against flashinfer 0.7.2, read and not run; its own variable-block
wrapper stays the kernel `flashinfer`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError
from .capability import Call, call_of
from .cudnn import DTYPES, Cudnn, aligned, reasons_block
from .flashinfer import installed, version
from .layout import sides
from .plan import Plan

OLDEST = (0, 7, 2)  # version of flashinfer
GPUS = (100, 103)


@functools.cache
def forward() -> Any:
    """flashinfer's function; its import costs seconds, so nothing imports it before it is needed."""
    name = "flashinfer.cute_dsl.sparse.bsa_attn_sm100_blk128"
    return importlib.import_module(name).bsa_attn_sm100_blk128_fwd


class FlashInferBlocks(Cudnn):
    """Kernel `flashinfer_blocks`."""

    name = "flashinfer_blocks"

    def reasons_on(self, call: Call) -> list[str]:
        """Why it cannot serve such a call on such a GPU, by the package's own rules."""
        if call.nvidia not in GPUS:
            return ["it needs an NVIDIA GPU of capability 10.0 or 10.3"]
        reasons = reasons_block(call)
        if call.block == (64, 64):
            reasons.append("it takes blocks of 128 tokens, not 64")
        if call.dtype not in DTYPES:
            reasons.append(f"it takes bf16 and fp16, not {call.dtype}")
        return reasons + (
            [] if call.head_size in (64, 128) else [f"it takes head sizes 64 and 128, not {call.head_size}"]
        )

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """Why it cannot serve; empty if it can."""
        reasons = [] if installed() else ["flashinfer is not installed: pip install 'heart-attention[gpu]'"]
        if installed() and version() < OLDEST:
            reasons.append(f"flashinfer is older than {'.'.join(map(str, OLDEST))}")
        if not torch.cuda.is_available() or torch.version.hip:
            reasons.append("no CUDA device is available to PyTorch")
        if q is not None and not q.is_cuda:
            reasons.append(f"it runs on a GPU and the tensors are on {q.device.type}")
        if mask is not None and q is not None and q.is_cuda:
            reasons += self.reasons_on(call_of(mask, q, rest))
        elif mask is not None and mask.block_shape != (128, 128):
            reasons.append("it takes equal blocks of 128")
        return reasons

    def _attend(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if scale <= 0:
            raise HeartError(f"the flashinfer_blocks kernel takes a scale above 0, not {scale}")
        q, k, v = (aligned(x).transpose(1, 2) for x in sides(plan, q, k, v))  # [B, N, H, D]
        out, lse = forward()(
            q, k, v, plan.extra["lists"], 0, plan.extra["sizes"], plan.counts.contiguous(),
            allow_empty_block_nums=plan.extra["empty"], softmax_scale=scale, return_lse=True,
        )  # fmt: skip
        return out.transpose(1, 2), lse


KERNEL = FlashInferBlocks()
