"""Kernel `flex`: torch's FlexAttention from lists of kept blocks; NVIDIA, AMD and Intel GPUs, and CPUs.

The lists are read by compiled FlexAttention only: outside `torch.compile` they are ignored and attention is dense
without a word. So the compiled function refuses to run uncompiled, and the kernel refuses where compilation is off.
One function is compiled for each head count, head size, type, block, scale and memory layout (6 to 14 s), none for
further masks or lengths; with the rest on a CPU one for each length too. Written against torch 2.13.

`rest="mean"`: the means of all key blocks stand before the keys, padded to whole blocks. They are partial blocks of
FlexAttention, masked down to the groups that a row leaves out and biased by the log of their tokens; kept blocks
are full blocks behind them. So one softmax covers both.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as library

from ..errors import HeartError
from .base import Kernel
from .capability import Call
from .layout import padded_lists, put_back, sides
from .plan import Plan, make_plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPILED = 64  # functions kept compiled


class Flex(Kernel):
    """Kernel `flex`."""

    name = "flex"

    def reasons_on(self, call: Call) -> list[str]:
        """Why it would not serve such a call on such a GPU; empty if it would."""
        if call.block is None:
            return ["it takes equal blocks, not clusters"]
        wrong = [] if call.dtype in DTYPES else [f"it takes fp32, bf16 and fp16, not {call.dtype}"]
        return wrong + _reasons_tiles(*call.block)

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """Why it cannot serve; empty if it can."""
        reasons = _reasons_compiler()
        if mask is not None and mask.block_shape is None:
            reasons.append("it takes equal blocks, not clusters")
        if q is not None:
            reasons += _reasons_input(q)
        place = q.device if q is not None else None if mask is None else mask.device
        if mask is not None and mask.block_shape and place is not None and place.type != "cpu":
            reasons += _reasons_tiles(*mask.block_shape)
        return reasons

    def reasons_not_auto(self, mask: Any = None, q: Tensor | None = None) -> list[str]:
        """Why `auto` passes it over although it could serve."""
        place = q.device.type if q is not None else "cpu" if mask is None else mask.device.type
        return ["on a CPU the kernel cpu is quicker: ask for flex by name"] if place == "cpu" else []

    def plan(self, mask: Any, rest: str = "drop") -> Plan:
        """Plan a mask as padded lists of kept blocks, and for the rest the lists of what is left out."""
        if mask.block_shape is None:
            raise HeartError("the flex kernel takes equal blocks, not clusters: choose another kernel")
        plan = make_plan(mask, self.name, rest=rest)
        plan.extra.update(block=mask.block_shape, lists=padded_lists(plan))
        if rest == "mean":
            plan.extra.update(_rest_lists(mask.approximated(), plan))
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
        reasons = _reasons_compiler() + _reasons_input(q)
        if reasons:
            raise HeartError(f"the flex kernel cannot run this: {'; '.join(reasons)}")
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        out = torch.empty_like(q) if out is None else out
        with torch.no_grad():
            put_back(out[:, :, : plan.n_q], _attend(plan, *sides(plan, q, k, v), scale), plan.q_perm)
        if plan.tail:
            n = plan.n_q
            out[:, :, n:] = F.scaled_dot_product_attention(q[:, :, n:], k[:, :, n:], v[:, :, n:], scale=scale)
        return out


def _reasons_compiler() -> list[str]:
    """Why compiled FlexAttention cannot be had; without compilation it would be dense, silently."""
    if _switched_off():
        return ["compilation is switched off (TORCHDYNAMO_DISABLE), and FlexAttention would then be dense"]
    if not hasattr(library, "AuxRequest"):
        return [f"torch {torch.__version__} is older than 2.9"]
    return []


def _switched_off() -> bool:
    """Whether torch.compile does nothing here; the compiler itself is not imported for the question."""
    config = sys.modules.get("torch._dynamo.config")
    return os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1" if config is None else config.disable


def _reasons_input(q: Tensor) -> list[str]:
    if q.dtype not in DTYPES:
        return [f"it takes fp32, bf16 and fp16, not {q.dtype}"]
    if q.device.type != "cpu" and q.shape[-1] < 16:
        return [f"it takes head sizes from 16 on, not {q.shape[-1]}"]
    return []


def _reasons_tiles(block_q: int, block_k: int) -> list[str]:
    """FlexAttention's GPU tiles are powers of two that must divide the blocks."""
    return [f"it takes blocks of a multiple of 16 tokens on a GPU, not {b}" for b in {block_q, block_k} if b % 16]


def _tile(block: int, most: int) -> int:
    """The largest power of two up to `most` that divides the block."""
    return min(most, block & -block)


def _rest_lists(approximated: Tensor, plan: Plan) -> dict[str, Tensor]:
    """For each row what it approximates, and which blocks of means hold any of that.

    `dropped` bool [B, H, Mq, P]: P is the number of key blocks padded to whole blocks of means.
    """
    size = plan.extra["block"][1]
    room = -approximated.shape[-1] % size
    dropped = F.pad(approximated, (0, room))
    some = dropped.unflatten(-1, (-1, size)).any(-1)  # [B, H, Mq, P / size]
    return {
        "dropped": dropped,
        "mean_counts": some.sum(-1, dtype=torch.int32),
        "mean_lists": torch.argsort(~some, dim=-1, stable=True).to(torch.int32),
        # fp32 [P + n_k]: log of a group's tokens, 0 for a key
        "bias": F.pad(F.pad(plan.group_sizes(), (0, room), value=1).float().log(), (0, plan.n_k)),
    }


def _attend(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compiled FlexAttention over tokens in block order, [B, H, n_q, D]."""
    extra = plan.extra
    if plan.rest == "mean":
        size, padded = extra["block"][1], extra["dropped"].shape[-1]
        k, v = (torch.cat([block_means(x, size, padded), x], dim=2) for x in (k, v))
    fixed = (q.shape[2], k.shape[2]) if plan.rest == "mean" and q.device.type == "cpu" else ()
    call = _compiled(plan.rest, fixed, q.device.type, q.dtype, q.shape[:2], q.shape[3], extra["block"], scale)
    blocks = -(-k.shape[2] // extra["block"][1])
    lists = extra["lists"] + (k.shape[2] - plan.n_k) // extra["block"][1]
    kept = (plan.counts, _widened(lists, blocks), extra["block"], scale)
    if plan.rest == "drop":
        return call(q, k, v, *kept)
    means = (extra["mean_counts"], _widened(extra["mean_lists"], blocks), extra["dropped"], extra["bias"])
    return call(q, k, v, *kept, *means)


def _widened(lists: Tensor, blocks: int) -> Tensor:
    """FlexAttention wants room for all key blocks in every row; plans keep no more than the longest row."""
    return F.pad(lists, (0, blocks - lists.shape[-1]))


def block_means(x: Tensor, size: int, padded: int) -> Tensor:
    """Mean of every block of `size` tokens in fp32, rounded to x's type: [B, H, n, D] -> [B, H, padded, D]."""
    whole = x.shape[2] // size * size
    parts = [x[:, :, :whole].unflatten(2, (-1, size)).mean(3, dtype=torch.float32)]
    if whole < x.shape[2]:
        parts.append(x[:, :, whole:].mean(2, keepdim=True, dtype=torch.float32))
    means = torch.cat(parts, dim=2)
    return F.pad(means, (0, 0, 0, padded - means.shape[2])).to(x.dtype)


def _kept(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, lists: Tensor, block: tuple[int, int], scale: float):
    """FlexAttention over kept blocks; only compiled code reads the lists."""
    _refuse_uncompiled()
    mask = library.BlockMask.from_kv_blocks(
        counts, lists, BLOCK_SIZE=block, seq_lengths=(q.shape[2], k.shape[2]), compute_q_blocks=False
    )
    return library.flex_attention(q, k, v, block_mask=mask, scale=scale, kernel_options=_options(q, block))


def _kept_and_means(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, lists: Tensor, block: tuple[int, int], scale: float,
    mean_counts: Tensor, mean_lists: Tensor, dropped: Tensor, bias: Tensor,
):  # fmt: skip
    """FlexAttention over means of what a row leaves out, then over kept blocks."""
    _refuse_uncompiled()

    def left_out(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return dropped[b, h, i // block[0], j]

    def weighed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[j]

    mask = library.BlockMask.from_kv_blocks(
        mean_counts, mean_lists, counts, lists, BLOCK_SIZE=block, mask_mod=left_out,
        seq_lengths=(q.shape[2], k.shape[2]), compute_q_blocks=False,
    )  # fmt: skip
    options = _options(q, block)
    return library.flex_attention(q, k, v, score_mod=weighed, block_mask=mask, scale=scale, kernel_options=options)


def _refuse_uncompiled() -> None:
    """Traced away by the compiler; left to Python it means that the lists would be ignored."""
    if not torch.compiler.is_compiling():
        raise HeartError(
            "FlexAttention was not compiled, so it would ignore the mask: allow torch.compile or choose another kernel"
        )


def _options(q: Tensor, block: tuple[int, int]) -> dict[str, Any] | None:
    """Tiles that divide the blocks, and the template that reads lists; a CPU has no choice of either."""
    if q.device.type == "cpu":
        return None
    return {"BACKEND": "TRITON", "fwd_BLOCK_M": _tile(block[0], 128), "fwd_BLOCK_N": _tile(block[1], 64)}


@functools.lru_cache(maxsize=COMPILED)
def _compiled(rest: str, fixed: tuple, *key: Any) -> Any:
    """A compiled function of its own for each key: the compiler gives up after a few variants of one function.

    `fixed` sequence lengths are compiled for these alone: torch 2.13 writes wrong C++ for means of any number.
    """
    function = _kept if rest == "drop" else _kept_and_means
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, dynamic=not fixed, fullgraph=True)


KERNEL = Flex()
