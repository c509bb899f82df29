"""Block-sparse attention on the CPU in C (cpu.c): what fits it, and the call."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import struct
import threading
from collections.abc import Iterator
from ctypes import c_char_p, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError
from .base import Kernel, Visit
from .ops import build
from .ops.first_order import add_linear_terms
from .plan import Plan, make_plan

KEEP_BYTES = 48 << 20  # of scratch space, between calls
_kept: dict[str, Tensor] = {}
_kept_lock = threading.Lock()
TYPES = (torch.float32, torch.bfloat16)
NO_VISIT = (0, 0, 0, 0, 0)  # gains, descending, skip, untested, whole rows: the last fields of the arguments


# `struct heart_attention` of cpu.c, packed in one go: after a long kernel every line of Python is cold, and building it
# field by field took as long as a block of queries.
_ARGUMENTS = struct.Struct("8q 16q q 2q 3q 4q 2q d 2q 5q")
LARGEST_TESTED = (192, 128)  # queries and keys of a block that may be left out: ROWS and TILE of cpu.c


class Cpu(Kernel):
    """Kernel `cpu`."""

    name = "cpu"
    rests = ("drop", "mean", "first-order")
    log_sums = True
    rest_mass = True
    visits = True

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """Why it cannot serve; empty if it can."""
        reasons = build.reasons_not()
        if q is not None:
            reasons += _reasons_not_tensor(q)
        if mask is not None and mask.device.type != "cpu":
            reasons.append(f"the mask is on {mask.device}, not on the CPU")
        return reasons

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
        """Attention over what the plan keeps and approximates; the inputs may be any views with contiguous rows."""
        linear = plan.rest == "first-order"
        share = None if mass is None and not linear else torch.empty(q.shape[:3], dtype=torch.float32)
        result = _run(plan, q, k, v, out, scale, None, share)
        if linear and share is not None:
            add_linear_terms(plan, q, k, v, share, result, scale)
        if mass is not None and share is not None:
            mass.copy_(share[:, :, : plan.n_q].mean(-1))
        return result

    def run_visit(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visit: Visit,
        out: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """As `run`, with what groups gain; those that gain little may be left out."""
        if visit.skip is not None:
            _check_tested(plan)
        gains = None if visit.gains is None else torch.full(visit.gains.shape, -torch.inf)
        held = [None if x is None else x.to(dtype).contiguous() for x, dtype in _per_head(visit)]
        more = _pointer(gains), *map(_pointer, held), visit.untested, visit.whole_rows
        result = _run(plan, q, k, v, out, scale, None, None, more)
        if visit.gains is not None and gains is not None:
            visit.gains.copy_(gains.masked_fill_(gains == -torch.inf, torch.inf))  # what nobody visited
        return result

    def run_part(self, mask: Any, q: Tensor, k: Tensor, v: Tensor, rest: str = "drop") -> tuple[Tensor, Tensor]:
        """Attention over a part of each query's keys, possibly none: outputs [B, H, N, D] and log-sums [B, H, N]."""
        lse = torch.empty(q.shape[:3], dtype=torch.float32)
        return _run(make_plan(mask, self.name, part=True, rest=rest), q, k, v, None, None, lse, None), lse


def _per_head(visit: Visit) -> tuple[tuple[Tensor | None, torch.dtype], ...]:
    return (visit.descending, torch.uint8), (visit.skip, torch.float32)


def _check_tested(plan: Plan) -> None:
    sizes = int(plan.q_starts.diff(dim=-1).max()), int(plan.group_sizes().max())
    if any(size > most for size, most in zip(sizes, LARGEST_TESTED)):
        raise HeartError(
            f"kernel 'cpu' leaves out blocks of at most {LARGEST_TESTED[0]} queries and {LARGEST_TESTED[1]} keys, not "
            f"{sizes[0]} and {sizes[1]}: take smaller blocks, or the kernel eager"
        )


def _run(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, scale: float | None, lse: Tensor | None,
    share: Tensor | None, visit: tuple[int, ...] = NO_VISIT,
) -> Tensor:  # fmt: skip
    """`lse` and `share` [B, H, N] take the log-sums, and the share of the approximated part in each query's softmax."""
    for reason in _reasons_not_tensor(q):
        raise HeartError(f"kernel 'cpu' cannot serve: {reason}")
    q, k, v = _rows(q), _rows(k), _rows(v)
    result = torch.empty_like(q) if out is None else out  # keeps the layout of a transposed view
    target = _rows(result, copy=False)
    _call(_arguments(plan, q, k, v, target, scale, lse, share, visit))
    if target is not result:
        result.copy_(target)
    return result


def _reasons_not_tensor(q: Tensor) -> list[str]:
    reasons = []
    if not q.is_cpu:
        reasons.append(f"the tensors are on {q.device}, not on the CPU")
    if q.dtype not in TYPES:
        reasons.append(f"it takes float32 and bfloat16, not {str(q.dtype).removeprefix('torch.')}")
    if q.requires_grad and torch.is_grad_enabled():
        reasons.append("it has no backward pass: use torch.no_grad(), or the kernel gather")
    return reasons


def _rows(x: Tensor, copy: bool = True) -> Tensor:
    """x if its rows are contiguous, else a copy of it (or space for one)."""
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    return x.contiguous() if copy else torch.empty(x.shape, dtype=x.dtype)


def _arguments(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float | None, lse: Tensor | None,
    share: Tensor | None, visit: tuple[int, ...],
) -> bytes:  # fmt: skip
    dim, q_starts, q_perm = q.shape[-1], plan.q_starts, plan.q_perm
    rest = (
        (0, 0)
        if plan.rest_cols is None or not len(plan.rest_cols)
        else (_pointer(plan.rest_ptr), _pointer(plan.rest_cols))
    )
    return _ARGUMENTS.pack(
        *plan.counts.shape[:2], dim, plan.n_q, plan.n_k, plan.tail, q_starts.shape[-1] - 1, plan.k_starts.shape[-1] - 1,
        q.data_ptr(), *q.stride()[:3], k.data_ptr(), *k.stride()[:3],
        v.data_ptr(), *v.stride()[:3], out.data_ptr(), *out.stride()[:3], _pointer(lse),
        plan.row_ptr.data_ptr(), plan.cols.data_ptr(), *rest, _pointer(share),
        q_starts.data_ptr(), plan.k_starts.data_ptr(),
        _pointer(q_perm), _pointer(plan.k_perm), q_starts.ndim == 3, q_perm is not None and q_perm.ndim == 3,
        1 / math.sqrt(dim) if scale is None else scale, q.dtype == torch.bfloat16, build.threads(), *visit,
    )  # fmt: skip


def _call(arguments: bytes) -> None:
    library = _library()
    with _buffer(library.heart_attention_bytes(arguments)) as buffer:
        if library.heart_attention(arguments, buffer.data_ptr()):
            raise MemoryError("no memory for the scratch space of the kernel cpu")


@functools.cache
def _library() -> ctypes.CDLL:
    library = build.load()
    library.heart_attention_bytes.argtypes, library.heart_attention_bytes.restype = (c_char_p,), c_int64
    library.heart_attention.argtypes = (c_char_p, c_void_p)
    return library


@contextlib.contextmanager
def _buffer(size: int) -> Iterator[Tensor]:
    """Scratch space for packed keys and values, kept for the next call unless another thread has it."""
    mine = _kept_lock.acquire(blocking=False)
    try:
        buffer = _kept.get("buffer") if mine else None
        if buffer is None or buffer.nbytes < size:
            buffer = torch.empty(size, dtype=torch.uint8)  # torch aligns to 64 bytes
            if mine and size <= KEEP_BYTES:
                _kept["buffer"] = buffer
        yield buffer
    finally:
        if mine:
            _kept_lock.release()


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


KERNEL = Cpu()
