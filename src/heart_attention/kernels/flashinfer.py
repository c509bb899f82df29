"""Kernel `flashinfer`: adapter to the sparse wrappers of the package flashinfer, used when it is installed.

`VariableBlockSparseAttentionWrapper` takes a mask and block sizes per head, so it fits block masks (also with a
short last block) and clusters alike; batch items become further heads. When all heads share one block mask that
fills its blocks, `BlockSparseAttentionWrapper` serves, whose plan is far smaller. flashinfer plans for a head size,
a type and a scale, so its own planning happens at the first run and is kept with the plan, that is with the mask. The
rest as means is a second, small dense part in PyTorch, merged by flashinfer's log-sums.
Written against flashinfer 0.7.2; 0.6.0 takes the same arguments, earlier ones are refused unread.
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
from .capability import Call
from .ops.rest_part import merge, rest_part
from .plan import Plan, make_plan

WORKSPACE = 128 << 20  # bytes; what flashinfer recommends
INT_WORKSPACE = 8 << 20  # bytes flashinfer itself allocates for its schedule; it grows with the rows
BYTES_A_ROW = 512  # generous space for one query row in that schedule
PLAN_LIMIT = 128 << 20  # bytes; flashinfer lists every kept key of every query row
OLDEST = (0, 6)  # version of flashinfer
PLANS = 64  # plans alive at once in a usual model: one for each layer and guidance branch
DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128, 256)


@functools.cache
def module() -> Any:
    """The package flashinfer; its import costs seconds, so nothing imports it before it is needed."""
    return importlib.import_module("flashinfer")


def installed() -> bool:
    """Whether the package can be found (it is not imported)."""
    return importlib.util.find_spec("flashinfer") is not None


def version() -> tuple[int, ...]:
    """Version of the installed package, as far as it is numbers; a build from source without a record counts as new."""
    try:
        words = importlib.metadata.version("flashinfer-python").split(".")
    except importlib.metadata.PackageNotFoundError:
        return OLDEST
    return tuple(int(word) for word in words[:3] if word.isdecimal())


class FlashInfer(Kernel):
    """Kernel `flashinfer`."""

    name = "flashinfer"
    rest_mass = True

    def reasons_on(self, call: Call) -> list[str]:
        """Why it would not serve such a call on such a GPU, every head with a mask of its own; empty if it would."""
        reasons = [] if call.nvidia >= 80 else ["it needs an NVIDIA GPU of capability 8.0 or later"]
        rows = 300 if call.block is None else -(-call.tokens // call.block[0])
        listed = 4 * rows * call.tokens * call.density * call.heads
        return reasons + _reasons_type(call.dtype, call.head_size) + _reasons_listed(listed, PLAN_LIMIT)

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """Why it cannot serve; empty if it can."""
        reasons = []
        if not installed():
            reasons.append("flashinfer is not installed: pip install 'heart-attention[gpu]'")
        elif (found := version())[: len(OLDEST)] < OLDEST:
            reasons.append(f"flashinfer {'.'.join(map(str, found))} is older than {'.'.join(map(str, OLDEST))}")
        if not torch.cuda.is_available() or torch.version.hip:
            reasons.append("no CUDA device is available to PyTorch")
        elif torch.cuda.get_device_capability()[0] < 8:
            reasons.append("it needs an NVIDIA GPU of capability 8.0 or later")
        if q is not None:
            if not q.is_cuda:
                reasons.append(f"it runs on a GPU and the tensors are on {q.device.type}")
            reasons += _reasons_input(q)
        if mask is not None:
            reasons += _reasons_mask(mask)
        return reasons

    def plan(self, mask: Any, rest: str = "drop") -> Plan:
        """Plan a mask; flashinfer's own planning waits for the head size and type of the first run."""
        plan, mask = make_plan(mask, self.name, rest=rest), mask.for_rest(rest)
        plan.extra["kept"] = mask.flags
        plan.extra["block"] = mask.block_shape
        plan.extra["shared"] = _shared(mask)
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
        """Attention over what the plan keeps, [B, H, N, D]."""
        reasons = _reasons_input(q)
        if reasons:
            raise HeartError(f"the flashinfer kernel cannot run this: {'; '.join(reasons)}")
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        out = torch.empty_like(q) if out is None else out
        wrapper, n = _wrapper(plan, q, scale), plan.n_q
        run = _run_shared if plan.extra["shared"] else _run_variable
        found, lse = run(wrapper, plan, q, k, v)  # in block order
        _put(out[:, :, :n], found, plan.q_perm)
        if lse is not None:
            _add_rest(plan, q, k, v, scale, out, lse, mass)
        elif mass is not None:
            mass.zero_()
        if plan.tail:
            out[:, :, n:] = F.scaled_dot_product_attention(q[:, :, n:], k[:, :, n:], v[:, :, n:], scale=scale)
        return out


def _add_rest(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor, mass: Tensor | None
) -> None:
    """Merge the means into `out`; `lse` [B, H, n_q] is flashinfer's, in block order and to base 2."""
    sizes = plan.q_starts.diff().expand(*plan.shape, -1).reshape(-1)
    empty = (plan.counts.reshape(-1) == 0).repeat_interleave(sizes).view(lse.shape)  # queries that keep no key
    kept_lse = torch.empty_like(lse)
    _put(kept_lse[..., None], (lse * math.log(2)).masked_fill(empty, -torch.inf)[..., None], plan.q_perm)
    kept = out[:, :, : plan.n_q].float().masked_fill((kept_lse == -torch.inf)[..., None], 0.0)
    means, means_lse = rest_part(plan, q, k, v, scale)
    whole, total = merge(kept, kept_lse, means, means_lse)
    out[:, :, : plan.n_q] = whole.to(out.dtype)
    if mass is not None:
        mass.copy_((means_lse - total).exp().mean(-1))


def _reasons_input(q: Tensor) -> list[str]:
    return _reasons_type(q.dtype, q.shape[-1])


def _reasons_type(dtype: torch.dtype, head_size: int) -> list[str]:
    reasons = []
    if dtype not in DTYPES:
        reasons.append(f"it takes bf16 and fp16, not {dtype}")
    if head_size not in HEAD_SIZES:
        reasons.append(f"it takes head sizes 64, 128 and 256, not {head_size}")
    return reasons


def _reasons_listed(listed: float, limit: int) -> list[str]:
    if listed <= limit:
        return []
    return [f"its plan of this mask would take {listed / 2**20:.0f} MB a layer, over {limit / 2**20:.0f}"]


def _reasons_mask(mask: Any) -> list[str]:
    """Every row of the mask lists its kept keys one by one, 4 bytes each, unless all heads share the mask.

    A GPU is not asked how many a mask keeps: the call would wait. A usual density stands for it there.
    """
    if _shared(mask):
        return []
    kept = Call.density * mask.shape[0] * mask.shape[1] if mask.flags.is_cuda else float(mask.density().sum())
    listed = 4 * mask.flags.shape[2] * mask.n_k * kept
    limit = min(PLAN_LIMIT, _free_memory(mask.device) // (2 * PLANS))
    return _reasons_listed(listed, limit)


def _free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU; elsewhere it does not matter."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 62


def _shared(mask: Any) -> bool:
    """Whether one mask of whole blocks serves all heads and batch items; on a GPU only where that shows without values."""
    shape, flags = mask.block_shape, mask.flags
    if shape is None or mask.n_q % shape[0] or mask.n_k % shape[1]:
        return False
    if all(size == 1 or step == 0 for size, step in zip(flags.shape[:2], flags.stride())):  # one head, or one repeated
        return True
    return not flags.is_cuda and bool((flags == flags[:1, :1]).all())


def _wrapper(plan: Plan, q: Tensor, scale: float) -> Any:
    """flashinfer's planned wrapper for this mask, head size, type and scale; kept with the plan."""
    key = f"wrapper {q.shape[-1]} {q.dtype} {scale!r} {q.device}"
    if key not in plan.extra:
        make = _plan_shared if plan.extra["shared"] else _plan_variable
        plan.extra[key] = make(plan, q, scale)
    return plan.extra[key]


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """One float workspace a device: calls run one after another on a stream, so all plans may share it."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def _plan_variable(plan: Plan, q: Tensor, scale: float) -> Any:
    kept = plan.extra["kept"].flatten(0, 1)  # [B·H, Mq, Mk]
    heads = kept.shape[0]
    workspace = _workspace(q.device)
    wrapper = module().VariableBlockSparseAttentionWrapper(workspace, backend="auto")
    rows = kept.shape[0] * kept.shape[1]
    if rows * BYTES_A_ROW > INT_WORKSPACE:
        schedule = torch.empty(rows * BYTES_A_ROW, dtype=torch.uint8, device=q.device)
        wrapper.reset_workspace_buffer(workspace, schedule)
    wrapper.plan(
        block_mask_map=kept,
        block_row_sz=_sizes(plan.q_starts, heads),
        block_col_sz=_sizes(plan.k_starts, heads),
        num_qo_heads=heads,
        num_kv_heads=heads,
        head_dim=q.shape[-1],
        sm_scale=scale,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    return wrapper


def _sizes(starts: Tensor, heads: int) -> Tensor:
    """Block sizes of every head, int32 [heads, M]."""
    sizes = starts.diff(dim=-1).to(torch.int32)
    return sizes.expand(heads, -1).contiguous() if sizes.ndim == 1 else sizes.flatten(0, 1).contiguous()


def _run_variable(wrapper: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, n_q, D] in block order, and log-sums [B, H, n_q] if something is approximated."""
    sides = (_sorted(x[:, :, :n], perm) for x, n, perm in _sides(plan, q, k, v))
    found, lse = _with_sums(wrapper, plan, *sides)  # [B·H, N, D] in and out
    return found.view(*plan.shape, plan.n_q, -1), None if lse is None else lse.reshape(*plan.shape, plan.n_q)


def _with_sums(wrapper: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the wrapper returns, with log-sums only where they are needed."""
    return (wrapper.run(q, k, v), None) if plan.rest_ptr is None else wrapper.run(q, k, v, return_lse=True)


def _sides(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple:
    return (q, plan.n_q, plan.q_perm), (k, plan.n_k, plan.k_perm), (v, plan.n_k, plan.k_perm)


def _sorted(x: Tensor, perm: Tensor | None) -> Tensor:
    """Tokens in block order, heads and batch items in one dimension: [B·H, n, D]."""
    if perm is None:
        return x.reshape(-1, *x.shape[2:])
    if perm.ndim == 1:
        return x.index_select(2, perm.long()).flatten(0, 1)
    return x.gather(2, perm.long()[..., None].expand(-1, -1, -1, x.shape[-1])).flatten(0, 1)


def _put(out: Tensor, found: Tensor, perm: Tensor | None) -> None:
    """Write tokens in block order back to their places."""
    if perm is None:
        out.copy_(found)
    elif perm.ndim == 1:
        out.index_copy_(2, perm.long(), found)
    else:
        out.scatter_(2, perm.long()[..., None].expand(-1, -1, -1, found.shape[-1]), found)


def _plan_shared(plan: Plan, q: Tensor, scale: float) -> Any:
    heads = plan.shape[0] * plan.shape[1]
    wrapper = module().BlockSparseAttentionWrapper(_workspace(q.device), backend="auto")
    rows = plan.row_ptr[0, 0]
    wrapper.plan(
        (rows - rows[0]).to(torch.int32),
        plan.cols[: int(rows[-1] - rows[0])].contiguous(),
        plan.n_q,
        plan.n_k,
        *plan.extra["block"],
        heads,
        heads,
        q.shape[-1],
        sm_scale=scale,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
        o_data_type=q.dtype,
    )
    return wrapper


def _run_shared(wrapper: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """As `_run_variable`."""
    sides = (_sorted(x[:, :, :n], perm).transpose(0, 1).contiguous() for x, n, perm in _sides(plan, q, k, v))
    found, lse = _with_sums(wrapper, plan, *sides)  # [N, B·H, D]
    return found.transpose(0, 1).unflatten(0, plan.shape), None if lse is None else lse.T.unflatten(0, plan.shape)


KERNEL = FlashInfer()
