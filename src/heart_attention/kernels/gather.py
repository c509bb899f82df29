"""Portable block-sparse attention in PyTorch: copy the kept keys and values of a query block, attend densely."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Kernel
from .capability import Call
from .eager import products
from .ops.group_means import group_means, log_sizes
from .plan import Plan, make_plan

# Query rows handled at once: a larger cluster is cut, so that its scores stay in cache.
MAX_ROWS = 256


class Gather(Kernel):
    """Kernel `gather`: runs wherever PyTorch runs."""

    name = "gather"
    log_sums = True
    rest_mass = True

    def reasons_on(self, call: Call) -> list[str]:
        """None: it runs wherever PyTorch does, slowly on a GPU."""
        return []

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
        out = torch.empty_like(q) if out is None else out
        share = None if mass is None else torch.zeros(q.shape[:3], device=q.device)
        _run(plan, q, k, v, out, scale, None, share)
        if mass is not None and share is not None:
            mass.copy_(share[:, :, : plan.n_q].mean(-1))
        return out

    def run_part(self, mask: Any, q: Tensor, k: Tensor, v: Tensor, rest: str = "drop") -> tuple[Tensor, Tensor]:
        """Attention over a part of each query's keys, possibly none: outputs [B, H, N, D] and log-sums [B, H, N]."""
        lse, out = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device), torch.empty_like(q)
        _run(make_plan(mask, self.name, part=True, rest=rest), q, k, v, out, None, lse, None)
        return out, lse


class _Sums(NamedTuple):
    """Where the sums of one head's softmax go, [N] each, or None."""

    lse: Tensor | None
    share: Tensor | None  # of the approximated part


def _run(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    scale: float | None,
    lse: Tensor | None,
    share: Tensor | None,
) -> None:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            sums = _Sums(*(None if x is None else x[b, h] for x in (lse, share)))
            _run_head(plan, b, h, q[b, h], k[b, h], v[b, h], out[b, h], scale, sums)


def _run_head(
    plan: Plan, b: int, h: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, sums: _Sums
) -> None:
    """One head: q, k, v, out [N, D]."""
    q, k, v = _compute_type(q), _compute_type(k), _compute_type(v)
    q_perm = plan.permutation("q", b, h)
    queries = _sorted(q, q_perm, plan.n_q)
    result = torch.empty_like(queries) if q_perm is not None else out[: plan.n_q]
    keys = _Keys(plan, b, h, k, v)
    place = torch.arange(plan.n_q, device=q.device) if q_perm is None else q_perm.long()
    for i, (start, end) in enumerate(itertools.pairwise(plan.boundaries("q", b, h).tolist())):
        if start < end:
            row = keys.row(i)
            for s in range(start, end, MAX_ROWS):
                t = min(s + MAX_ROWS, end)
                result[s:t] = _attend(queries[s:t], *row, scale, sums, place[s:t])
    if q_perm is not None:
        out[q_perm.long()] = result.to(out.dtype)
    if plan.tail:
        place = torch.arange(plan.n_q, len(q), device=q.device)
        tail = k[plan.n_k :], v[plan.n_k :], None
        out[plan.n_q :] = _attend(q[plan.n_q :], *tail, scale, sums, place).to(out.dtype)


class _Keys:
    """Keys and values of one head in group order, and the means of its groups if some are approximated."""

    def __init__(self, plan: Plan, b: int, h: int, k: Tensor, v: Tensor):
        perm = plan.permutation("k", b, h)
        self.k, self.v = (_sorted(x, perm, plan.n_k) for x in (k, v))  # [Nk, D]
        self.rows, self.cols = plan.row_ptr[b, h].tolist(), plan.cols
        self.starts, self.scattered = plan.boundaries("k", b, h), plan.kind == "cluster"
        self.rest: list[int] | None = None
        if plan.rest_ptr is not None and plan.rest_cols is not None:
            self.rest, self.rest_cols = plan.rest_ptr[b, h].tolist(), plan.rest_cols
            self.means = [group_means(plan, x, b, h) for x in (k, v)]
            self.log_sizes = log_sizes(plan, b, h)

    def row(self, i: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys [m, D] and values that row i meets, and the bias [means] of those at the end that are means."""
        kept = self.cols[self.rows[i] : self.rows[i + 1]]
        if self.scattered or not len(kept):
            k, v = _take_scattered(self.k, self.v, kept, self.starts)
        else:
            k, v = _take_runs(self.k, self.v, kept, self.starts.tolist())
        if self.rest is None or self.rest[i] == self.rest[i + 1]:
            return k, v, None
        groups = self.rest_cols[self.rest[i] : self.rest[i + 1]].long()
        k, v = (torch.cat([x.float(), mean[groups]]) for x, mean in zip((k, v), self.means))
        return k, v, self.log_sizes[groups]


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
    index = torch.arange(int(sizes.sum()), device=keys.device) + shift.repeat_interleave(sizes)
    return keys.index_select(0, index), values.index_select(0, index)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, sums: _Sums, place: Tensor) -> Tensor:
    """Dense attention of one query block, q [n, D], k and v [m, D]; bias [means] is for the last keys.

    `place` [n] says which tokens the queries are, for the sums.
    """
    plain = bias is None and sums.lse is None
    if plain and q.device.type != "cpu":
        return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], scale=scale)[0, 0]
    # Two plain products are quicker here than SDPA, which cuts so few query rows too finely.
    scores = products(q * scale, k) if plain else products(q.float() * scale, k.float())
    if bias is not None:
        scores = torch.cat([scores[:, : -len(bias)], scores[:, -len(bias) :] + bias], dim=1)
    if sums.lse is not None:
        sums.lse[place] = scores.logsumexp(dim=-1)
        if not len(k):
            return torch.zeros_like(q)
    weights = scores.softmax(dim=-1) if scores.requires_grad else _softmax_in_place(scores)
    if bias is not None and sums.share is not None:
        sums.share[place] = weights[:, -len(bias) :].sum(-1)
    return (weights @ v.to(weights.dtype)).to(q.dtype)


def _softmax_in_place(scores: Tensor) -> Tensor:
    """A fresh matrix each time costs more than the softmax."""
    return torch.softmax(scores, dim=-1, out=scores)


KERNEL = Gather()
