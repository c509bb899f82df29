"""Kernel `cudnn`: adapter to block-sparse attention of the package nvidia-cudnn-frontend, from sm_90 on.

It takes the kept key blocks of every head and row as indices, so its plan is small, and gives log-sums. What a mask leaves
out is then added as a second part: our Triton kernel over the group means alone, joined by the log-sums. Written against
version 1.32 of the package, whose kernels are compiled on first use.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import HeartError
from .base import Kernel
from .capability import Call, call_of
from .layout import padded_lists, put_back, sides
from .plan import Plan, make_plan

OLDEST = (1, 32)  # version of nvidia-cudnn-frontend
DTYPES = (torch.bfloat16, torch.float16)
BLOCKS = (64, 128)


@functools.cache
def module() -> Any:
    """Block-sparse attention of the package; its import costs seconds, so nothing imports it before it is needed."""
    return importlib.import_module("cudnn.block_sparse_attention").BSA


def installed() -> bool:
    """Whether the package and its compiler can be found (they are not imported)."""
    return all(importlib.util.find_spec(name) is not None for name in ("cudnn", "cutlass"))


def _version() -> tuple[int, ...]:
    words = importlib.metadata.version("nvidia-cudnn-frontend").split(".")
    return tuple(int(word) for word in words[:2] if word.isdecimal())


class Cudnn(Kernel):
    """Kernel `cudnn`."""

    name = "cudnn"
    log_sums = True

    def reasons_on(self, call: Call) -> list[str]:
        """Why it cannot serve such a call on such a GPU, by the package's own rules."""
        if call.nvidia < 90:
            return ["it needs an NVIDIA GPU of capability 9.0 or later"]
        reasons = reasons_block(call)
        if call.dtype not in DTYPES:
            reasons.append(f"it takes bf16 and fp16, not {call.dtype}")
        return reasons + _reasons_size(call)

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """Why it cannot serve; empty if it can."""
        reasons = _reasons_here()
        if q is not None and not q.is_cuda:
            reasons.append(f"it runs on a GPU and the tensors are on {q.device.type}")
        if mask is not None and q is not None and q.is_cuda:
            reasons += self.reasons_on(call_of(mask, q, rest))
        elif mask is not None and mask.block_shape is None:
            reasons.append("it takes equal blocks, not clusters")
        return reasons

    def plan(self, mask: Any, rest: str = "drop") -> Plan:
        """Plan a mask: padded lists of kept blocks, the tokens in a cut last block, and for the rest a Triton plan."""
        return self._plan(mask, rest, part=False)

    def _plan(self, mask: Any, rest: str, part: bool) -> Plan:
        if mask.block_shape is None:
            raise HeartError(f"the {self.name} kernel takes equal blocks, not clusters: choose another kernel")
        plan = make_plan(mask, self.name, part=part, rest=rest)
        cut = plan.n_k % mask.block_shape[1]
        plan.extra.update(
            block=mask.block_shape[0],
            lists=padded_lists(plan),
            sizes=plan.group_sizes().contiguous() if cut else None,
            empty=part or rest != "drop",  # rows without keys are refused otherwise
        )
        if rest != "drop":
            plan.extra["means"] = _triton()._plan(mask, "only", part=True)
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
        out = torch.empty_like(q) if out is None else out
        if plan.rest == "drop":
            found = self._attend(plan, q, k, v, scale)[0]
            put_back(out[:, :, : plan.n_q], found, plan.q_perm)
        else:
            out.copy_(self._with_means(plan, q, k, v, scale)[0])
        if plan.tail:
            n = plan.n_q
            out[:, :, n:] = F.scaled_dot_product_attention(q[:, :, n:], k[:, :, n:], v[:, :, n:], scale=scale)
        return out

    def run_part(self, mask: Any, q: Tensor, k: Tensor, v: Tensor, rest: str = "drop") -> tuple[Tensor, Tensor]:
        """Attention over a part of each query's keys, possibly none: outputs [B, H, N, D] and log-sums [B, H, N]."""
        if rest == "only":
            return _triton().run_part(mask, q, k, v, rest)
        plan = self._plan(mask, rest, part=True)
        scale = 1 / math.sqrt(q.shape[-1])
        if rest == "mean":
            out, lse = self._with_means(plan, q, k, v, scale)
        else:
            out, lse = self._in_place(plan, q, *self._attend(plan, q, k, v, scale))
        if plan.tail:  # whole in every part: equal outputs stay what they are, however they are weighed
            n = plan.n_q
            out[:, :, n:] = F.scaled_dot_product_attention(q[:, :, n:], k[:, :, n:], v[:, :, n:], scale=scale)
        return out, lse

    def _attend(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The package's attention over kept blocks, tokens in block order: [B, H, n_q, D] and log-sums [B, H, n_q]."""
        if scale <= 0:
            raise HeartError(f"the cudnn kernel takes a scale above 0, not {scale}")
        q, k, v = (aligned(x) for x in sides(plan, q, k, v))
        if plan.extra["block"] == 64 and plan.n_q % 64:  # sm_90 wants whole blocks of queries
            q = F.pad(q, (0, 0, 0, -plan.n_q % 64))
        found = module().block_sparse_attention_forward(
            q, k, v, plan.extra["lists"], None, plan.extra["sizes"], plan.counts.contiguous(),
            sparse_block_size=plan.extra["block"], allow_empty_block_nums=plan.extra["empty"], softmax_scale=scale,
            layout="bhsd",
        )  # fmt: skip
        return found["o_tensor"].narrow(2, 0, plan.n_q), found["lse_tensor"].narrow(2, 0, plan.n_q)

    def _in_place(self, plan: Plan, q: Tensor, found: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and log-sums at the places of their tokens, fp32; zeros for the tail."""
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
        put_back(out[:, :, : plan.n_q], found, plan.q_perm)
        put_back(lse[:, :, : plan.n_q, None], sums[..., None], plan.q_perm)
        return out, lse

    def _with_means(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Kept blocks here and the means of the others in Triton, joined by their log-sums; fp32."""
        out, lse = self._in_place(plan, q, *self._attend(plan, q, k, v, scale))
        means = torch.zeros_like(out)
        mean_lse = torch.zeros_like(lse)
        _triton()._run(plan.extra["means"], q, k, v, means, scale, mean_lse)
        return joined(out, lse, means, mean_lse)


def _reasons_here() -> list[str]:
    reasons = []
    if not installed():
        reasons.append("nvidia-cudnn-frontend is not installed: pip install 'heart-attention[cudnn]'")
    elif _version() < OLDEST:
        reasons.append(f"nvidia-cudnn-frontend is older than {'.'.join(map(str, OLDEST))}")
    if not torch.cuda.is_available() or torch.version.hip:
        reasons.append("no CUDA device is available to PyTorch")
    return reasons


def reasons_block(call: Call) -> list[str]:
    """Why the package cannot take these groups."""
    if call.block is None:
        return ["it takes equal blocks, not clusters"]
    if call.block[0] != call.block[1] or call.block[0] not in BLOCKS:
        return [f"it takes blocks of 64 and 128 tokens, not {call.block[0]} × {call.block[1]}"]
    return []


def _reasons_size(call: Call) -> list[str]:
    """Head sizes, and what the kernels for blocks of 64 ask beyond that."""
    if call.nvidia // 10 == 12 and call.head_size != 128:
        return [f"it takes head size 128 on sm_120, not {call.head_size}"]
    if call.head_size not in (64, 96, 128):
        return [f"it takes head sizes 64, 96 and 128, not {call.head_size}"]
    small = call.block == (64, 64) and call.nvidia // 10 in (10, 11)
    if small and (call.head_size != 128 or call.dtype != torch.bfloat16):
        return ["its blocks of 64 on sm_100 need bf16 and head size 128"]
    return []


def aligned(x: Tensor) -> Tensor:
    """x, copied if its rows are not 16 bytes aligned (the kernels fetch them by descriptor)."""
    fits = (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(step * x.element_size() % 16 == 0 for step in x.stride()[:3])
    )
    return x if fits else x.contiguous()


def joined(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of attention over different keys as one; a part without keys has a log-sum of −inf."""
    lse = torch.logaddexp(a_lse, b_lse)
    share = torch.where(lse.isneginf(), 0.0, (b_lse - lse).exp()).unsqueeze(-1)
    return a.lerp_(b, share), lse


def _triton() -> Any:
    from .triton_attention import KERNEL

    return KERNEL


KERNEL = Cudnn()
