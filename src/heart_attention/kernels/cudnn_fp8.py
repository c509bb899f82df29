"""Kernel `cudnn_fp8`: block-sparse attention in 8-bit floating point, of the package nvidia-cudnn-frontend.

It changes results, so only its name brings it. Written against version 1.32 of the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError
from .base import Kernel
from .capability import Call
from .cudnn import Cudnn, module, reasons_block
from .layout import sides
from .plan import Plan


class CudnnFp8(Cudnn):
    """Kernel `cudnn_fp8`: the same blocks in 8-bit floating point."""

    name = "cudnn_fp8"
    log_sums = False

    def reasons_on(self, call: Call) -> list[str]:
        """Why it cannot serve such a call on such a GPU, by the package's own rules."""
        reasons = reasons_block(call)
        if not (call.nvidia in (100, 103) and call.block == (128, 128)) and call.nvidia // 10 != 12:
            reasons.append("it takes rows of different lengths only on sm_120, and in blocks of 128 on sm_100")
        if call.dtype != torch.bfloat16 or call.head_size != 128:
            reasons.append(f"it takes bf16 and head size 128, not {call.dtype} and {call.head_size}")
        return reasons + ([] if call.rest == "drop" else ["it gives no log-sums, so it cannot approximate the rest"])

    def reasons_not_auto(self, mask: Any = None, q: Tensor | None = None) -> list[str]:
        """Results in 8 bits are a choice."""
        return ["8-bit products change the results: ask for cudnn_fp8 by name"]

    def _attend(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if scale <= 0:
            raise HeartError(f"the cudnn_fp8 kernel takes a scale above 0, not {scale}")
        q, k, v = (x.contiguous() for x in sides(plan, q, k, v))
        found = module().block_sparse_attention_fp8_forward(
            q, k, v, plan.extra["lists"], None, plan.extra["sizes"], plan.counts.contiguous(),
            softmax_scale=scale, sparse_block_size=plan.extra["block"],
        )  # fmt: skip
        return found["o_tensor"], found["o_tensor"].new_zeros(q.shape[:3])

    def run_part(self, mask: Any, q: Tensor, k: Tensor, v: Tensor, rest: str = "drop") -> tuple[Tensor, Tensor]:
        """Refuse: there are no log-sums."""
        return Kernel.run_part(self, mask, q, k, v, rest)


KERNEL = CudnnFp8()
