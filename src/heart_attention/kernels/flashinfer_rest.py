"""Kernel `flashinfer_rest`: flashinfer's task-scheduled block-sparse attention, which takes the rest as block means.

On sm_100 and sm_103, head size 128. One launch covers kept blocks and the means of all others: flashinfer adds the
logarithm of a block's tokens to the logit of its mean. Key blocks may be as small as 8 tokens. flashinfer calls this
interface experimental, so only its name brings it. Planning looks at sizes alone and never waits; masks go in as bits.
Written against flashinfer 0.7.2, read and not run.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import HeartError
from ..masks import pack_bits
from .base import Kernel
from .capability import Call, call_of
from .flashinfer import installed, version
from .flex import block_means
from .layout import put_back, sides
from .plan import Plan, make_plan

OLDEST = (0, 7, 2)  # version of flashinfer
GPUS = (100, 103)
DTYPES = (torch.bfloat16, torch.float16)
FINE = (8, 16, 32)  # key blocks that are no multiple of 64
WORD = 32  # bits


@functools.cache
def wrapper_class() -> Any:
    """flashinfer's wrapper; its import costs seconds, so nothing imports it before it is needed."""
    return importlib.import_module("flashinfer.attention.prims_ts.block_sparse").BlockSparseTSWrapper


class FlashInferRest(Kernel):
    """Kernel `flashinfer_rest`."""

    name = "flashinfer_rest"

    def reasons_on(self, call: Call) -> list[str]:
        """Why it cannot serve such a call on such a GPU, by the package's own rules."""
        if call.nvidia not in GPUS:
            return ["it needs an NVIDIA GPU of capability 10.0 or 10.3"]
        reasons = ["it takes equal blocks, not clusters"] if call.block is None else _reasons_block(*call.block)
        if call.dtype not in DTYPES:
            reasons.append(f"it takes bf16 and fp16, not {call.dtype}")
        return reasons + ([] if call.head_size == 128 else [f"it takes head size 128, not {call.head_size}"])

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
        elif mask is not None and mask.block_shape is None:
            reasons.append("it takes equal blocks, not clusters")
        return reasons

    def reasons_not_auto(self, mask: Any = None, q: Tensor | None = None) -> list[str]:
        """Its makers call it experimental."""
        return ["flashinfer calls its interface experimental: ask for flashinfer_rest by name"]

    def plan(self, mask: Any, rest: str = "drop") -> Plan:
        """Plan a mask as bits of kept blocks, 32 a word."""
        if mask.block_shape is None:
            raise HeartError("the flashinfer_rest kernel takes equal blocks, not clusters: choose another kernel")
        plan, flags = make_plan(mask, self.name, rest=rest), mask.for_rest(rest).flags
        words = pack_bits(F.pad(flags, (0, -flags.shape[-1] % WORD))).contiguous().view(torch.uint32)
        plan.extra.update(block=mask.block_shape, bits=words)
        return plan

    def run(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        scale: float | None = None,
        mass: Tensor | None = None,
    ) -> Tensor:
        """Attention over what the plan keeps and approximates, [B, H, N, D]."""
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        out, n = torch.empty_like(q) if out is None else out, plan.n_q
        sorted_q, sorted_k, sorted_v = sides(plan, q, k, v)
        more = {}
        if plan.rest == "mean":
            size, count = plan.extra["block"][1], plan.k_starts.shape[-1] - 1
            means = (_compact(block_means(x, size, count)) for x in (sorted_k, sorted_v))
            more = dict(zip(("k_summary", "v_summary"), means))
        wrapper = _wrapper(q.shape[:2], n, plan.n_k, q.shape[-1], plan.extra["block"], plan.rest, q.dtype, q.device)
        found = wrapper.run(
            *(_compact(x) for x in (sorted_q, sorted_k, sorted_v)), exact_block_bits=plan.extra["bits"], sm_scale=scale,
            **more,
        )  # fmt: skip
        put_back(out[:, :, :n], found.transpose(1, 2), plan.q_perm)
        if plan.tail:
            out[:, :, n:] = F.scaled_dot_product_attention(q[:, :, n:], k[:, :, n:], v[:, :, n:], scale=scale)
        return out


def _reasons_block(block_q: int, block_k: int) -> list[str]:
    reasons = [f"it takes query blocks of a multiple of 8 tokens, not {block_q}"] if block_q % 8 else []
    if block_k not in FINE and block_k % 64:
        reasons.append(f"it takes key blocks of 8, 16, 32 or a multiple of 64 tokens, not {block_k}")
    return reasons


def _compact(x: Tensor) -> Tensor:
    """[B, H, N, D] as the package wants it: [B, N, H, D] without gaps."""
    return x.transpose(1, 2).contiguous()


@functools.lru_cache(maxsize=8)
def _wrapper(
    shape: tuple[int, int],
    n_q: int,
    n_k: int,
    head_size: int,
    block: tuple[int, int],
    rest: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """A planned wrapper for calls of this size: masks are no part of it. Calls follow one another on a stream."""
    made, (batch, heads) = wrapper_class()(), shape
    made.plan(
        batch, n_q, n_k, heads, heads, head_size, *block, device=device, max_blocks_per_row=-(-n_k // block[1]),
        sparse_format="bitmask", use_proxy_routes=rest == "mean", q_data_type=dtype,
    )  # fmt: skip
    return made


KERNEL = FlashInferRest()
