"""Portable block-sparse attention in PyTorch: copy the kept keys and values of a query block, attend densely."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .plan import Plan, make_plan

# Query rows handled at once: a larger cluster is cut, so that its scores stay in cache.
MAX_ROWS = 256


class Gather:
    """Kernel `gather`: runs wherever PyTorch runs."""

    name = "gather"

    def reasons_not(self, mask: Any = None, q: Tensor | None = None) -> list[str]:
        """Nothing stops it."""
        return []

    def plan(self, mask: Any) -> Plan:
        """Plan a mask."""
        return make_plan(mask, self.name)

    def run(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, scale: float | None = None):
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
    keys, values = (_sorted(x, k_perm, plan.n_k) for x in (k, v))  # [Nk, D] in sorted order
    k_starts, q_starts = plan.boundaries("k", b, h).tolist(), plan.boundaries("q", b, h).tolist()
    rows = plan.row_ptr[b, h].tolist()
    cols = plan.cols[rows[0] : rows[-1]].tolist()
    queries = _sorted(q, q_perm, plan.n_q)
    result = torch.empty_like(queries) if q_perm is not None else out[: plan.n_q]
    for i, (start, end) in enumerate(itertools.pairwise(q_starts)):
        if start == end:
            continue
        kept = cols[rows[i] - rows[0] : rows[i + 1] - rows[0]]
        runs = _runs(kept, k_starts)
        row_keys, row_values = _take(keys, runs), _take(values, runs)
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


def _runs(kept: list[int], starts: list[int]) -> list[tuple[int, int]]:
    """Kept blocks as runs of neighbouring tokens: [(start, end)]."""
    runs: list[tuple[int, int]] = []
    for c in kept:
        if runs and runs[-1][1] == starts[c]:
            runs[-1] = (runs[-1][0], starts[c + 1])
        else:
            runs.append((starts[c], starts[c + 1]))
    return runs


def _take(x: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """Those runs of rows of x [n, D], copied together (one run: a view)."""
    return torch.cat([x[s:e] for s, e in runs]) if len(runs) > 1 else x[runs[0][0] : runs[0][1]]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Dense attention of one query block, q [n, D], k and v [m, D]."""
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], scale=scale)[0, 0]
    # Two plain products are quicker here than SDPA, which cuts so few query rows too finely.
    return ((q * scale) @ k.T).softmax(dim=-1) @ v


KERNEL = Gather()
