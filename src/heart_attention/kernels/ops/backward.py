"""The way back through block-sparse attention on a CPU, in C (backward.c). `calibration.gradient` has the definition."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import HeartError
from ..cpu import threads
from ..plan import Plan, make_plan
from . import build

Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


class _Arguments(ctypes.Structure):
    """`struct heart_backward` of backward.c."""

    _fields_ = (
        *((name, c_int64) for name in ("heads", "count", "dim", "n_q", "n_k", "q_blocks", "k_blocks")),
        *((name, c_void_p) for name in ("q", "k", "v", "g", "inner", "dq", "dk", "dv", "row_ptr", "cols")),
        *((name, c_void_p) for name in ("q_starts", "k_starts")),
        ("scale", c_double),
        ("threads", c_int64),
    )


def serves(mask: Any, q: Tensor) -> bool:
    """Whether the C code can take this call; fp64 and a tail of unused text slots are left to PyTorch."""
    if q.device.type != "cpu" or q.dtype == torch.float64 or getattr(mask, "tail", 0):
        return False
    try:
        return build.load() is not None
    except build.BuildError:
        return False  # `heart info` says why


@torch.no_grad()
def attention_backward(
    mask: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grads: Sequence[Tensor], scale: float | None = None
) -> list[Gradients]:
    """(dq, dk, dv) for each cotangent, all [1, H, N, D]; sums in fp32."""
    plan = make_plan(mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    heads, dim = q.shape[1], q.shape[3]
    inner = torch.stack([(g.float() * out.float()).sum(-1)[0] for g in grads], 1)  # [H, G, N]
    cotangents = torch.stack([g[0].float() for g in grads], 1)  # [H, G, N, D]
    order = [_order(plan, side, heads) for side in "qk"]
    given = {
        "q": _sorted(q[0].float()[:, None], order[0])[:, 0],
        "k": _sorted(k[0].float()[:, None], order[1])[:, 0],
        "v": _sorted(v[0].float()[:, None], order[1])[:, 0],
        "g": _sorted(cotangents, order[0]),
        "inner": _sorted(inner.unsqueeze(-1), order[0], pad=False).squeeze(-1),
    }
    made = {f"d{side}": torch.zeros(heads, len(grads), *given[side].shape[1:]) for side in "qkv"}
    _call(plan, given | made, scale)
    made["dq"] *= scale
    each = [
        _unsorted(made[name], at)[..., :dim].to(x.dtype)
        for name, at, x in zip(made, (order[0], order[1], order[1]), (q, k, v))
    ]
    return [tuple(x[None, :, i] for x in each) for i in range(len(grads))]  # type: ignore[misc]


def _order(plan: Plan, side: str, heads: int) -> Tensor | None:
    """Token at each sorted position, int64 [H, n], or None for identity."""
    perm = plan.q_perm if side == "q" else plan.k_perm
    return None if perm is None else perm.view(-1, perm.shape[-1]).expand(heads, -1).long()


def _sorted(x: Tensor, order: Tensor | None, pad: bool = True) -> Tensor:
    """x [H, G, N, D] in block order, rows filled up with zeros to whole panels."""
    if order is not None:
        x = x.gather(2, order[:, None, :, None].expand(x.shape))
    lanes = 2 * build.load().heart_vector_floats()
    return F.pad(x, (0, -x.shape[-1] % lanes if pad else 0)).contiguous()


def _unsorted(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else torch.empty_like(x).scatter_(2, order[:, None, :, None].expand(x.shape), x)


def _call(plan: Plan, arrays: dict[str, Tensor], scale: float) -> None:
    heads, count, n_q, dim = arrays["g"].shape
    starts = [x.expand(1, heads, -1).contiguous() for x in (plan.q_starts, plan.k_starts)]
    arguments = _Arguments(
        heads, count, dim, n_q, arrays["k"].shape[1], starts[0].shape[-1] - 1, starts[1].shape[-1] - 1,
        *(arrays[name].data_ptr() for name in ("q", "k", "v", "g", "inner", "dq", "dk", "dv")),
        plan.row_ptr.data_ptr(), plan.cols.data_ptr(), *(x.data_ptr() for x in starts), scale, threads(),
    )  # fmt: skip
    if build.load().heart_attention_backward(ctypes.byref(arguments)):
        raise HeartError("there is not enough memory for the backward pass: free some, or use a shorter sequence")
