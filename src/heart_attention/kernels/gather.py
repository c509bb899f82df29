"""Portable block-sparse attention in PyTorch: copy the kept keys and values of a query block, attend densely."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Kernel
from .eager import products
from .plan import Plan

# Query rows handled at once: a larger cluster is cut, so that its scores stay in cache.
MAX_ROWS = 256


class Gather(Kernel):
    """Kernel `gather`: runs wherever PyTorch runs."""

    name = "gather"

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """Why it cannot serve; empty if it can."""
        return [] if rest == "drop" else ["it does not approximate the rest"]

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
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        out = torch.empty_like(q) if out is None else out
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                _run_head(plan, b, h, q[b, h], k[b, h], v[b, h], out[b, h], scale)
        return out


def _run_head(plan: Plan, b: int, h: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> None:
    """One head: q, k, v, out [N, D]."""
    q, k, v = _compute_type(q), _compute_type(k), _compute_type(v)
    q_perm, k_perm = plan.permutation("q", b, h), plan.permutation("k", b, h)
    queries = _sorted(q, q_perm, plan.n_q)
    keys, values = (_sorted(x, k_perm, plan.n_k) for x in (k, v))  # [Nk, D]
    result = torch.empty_like(queries) if q_perm is not None else out[: plan.n_q]
    q_starts, rows = plan.boundaries("q", b, h).tolist(), plan.row_ptr[b, h].tolist()
    starts = plan.boundaries("k", b, h)
    if plan.kind == "block":
        take, starts = _take_runs, starts.tolist()
    else:
        take = _take_scattered
    for i, (start, end) in enumerate(itertools.pairwise(q_starts)):
        if start < end:
            row_keys, row_values = take(keys, values, plan.cols[rows[i] : rows[i + 1]], starts)
            for s in range(start, end, MAX_ROWS):
                t = min(s + MAX_ROWS, end)
                result[s:t] = _attend(queries[s:t], row_keys, row_values, scale)
    if q_perm is not None:
        out[q_perm.long()] = result.to(out.dtype)
    if plan.tail:
        out[plan.n_q :] = _attend(q[plan.n_q :], k[plan.n_k :], v[plan.n_k :], scale).to(out.dtype)


def _compute_type(x: Tensor) -> Tensor:
    """16-bit products are slow and coarse on a CPU: convert a head once."""
    return x.float() if x.device.type == "cpu" else x


def _sorted(x: Tensor, perm: Tensor | None, n: int) -> Tensor:
    return x[:n] if perm is None else x.index_select(0, perm.long())


def _take_runs(keys: Tensor, values: Tensor, kept: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of the kept blocks, neighbouring blocks copied as one run (a single run: a view)."""
    runs: list[tuple[int, int]] = []
    for block in kept.tolist():
        if runs and runs[-1][1] == starts[block]:
            runs[-1] = (runs[-1][0], starts[block + 1])
        else:
            runs.append((starts[block], starts[block + 1]))
    if len(runs) == 1:
        return keys[runs[0][0] : runs[0][1]], values[runs[0][0] : runs[0][1]]
    return torch.cat([keys[s:e] for s, e in runs]), torch.cat([values[s:e] for s, e in runs])


def _take_scattered(keys: Tensor, values: Tensor, kept: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The same for hundreds of small clusters, where one indexed copy is quicker than many short ones."""
    sizes = (starts[kept + 1] - starts[kept]).long()
    ends = sizes.cumsum(0)
    shift = starts[kept] - (ends - sizes)  # from place in the copy to sorted position
    index = torch.arange(int(ends[-1]), device=keys.device) + shift.repeat_interleave(sizes)
    return keys.index_select(0, index), values.index_select(0, index)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Dense attention of one query block, q [n, D], k and v [m, D]."""
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], scale=scale)[0, 0]
    # Two plain products are quicker here than SDPA, which cuts so few query rows too finely.
    scores = products(q * scale, k)
    if scores.requires_grad:
        return scores.softmax(dim=-1) @ v
    torch.softmax(scores, dim=-1, out=scores)  # in place: a fresh matrix each time costs more than the softmax
    return scores @ v


KERNEL = Gather()
