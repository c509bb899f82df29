"""The definition: attention over what a plan keeps and approximates, in plain PyTorch and fp32. For small sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError
from .base import Kernel, Visit
from .capability import Call
from .ops.first_order import linear_term
from .ops.group_means import group_means, log_sizes
from .ops.tile_gains import left_out, tile_gains
from .plan import Plan, make_plan

# Above this many tokens on a side the score matrix of one head alone takes more than 256 MB.
LIMIT = 8192


class Eager(Kernel):
    """Kernel `eager`."""

    name = "eager"
    rests = ("drop", "mean", "first-order")
    log_sums = True
    rest_mass = True
    visits = True

    def reasons_on(self, call: Call) -> list[str]:
        """None but length: it runs wherever PyTorch does."""
        return [_too_long(call.tokens)] if call.tokens > LIMIT else []

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """Why it cannot serve; empty if it can."""
        tokens = 0 if q is None else q.shape[2]
        return [_too_long(tokens)] if tokens > LIMIT else []

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
        return _run(plan, q, k, v, torch.empty_like(q) if out is None else out, scale, mass, None)

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
        small = _visit(plan, q, k, scale, visit)
        return _run(plan, q, k, v, torch.empty_like(q) if out is None else out, scale, None, None, small)

    def run_part(self, mask: Any, q: Tensor, k: Tensor, v: Tensor, rest: str = "drop") -> tuple[Tensor, Tensor]:
        """Attention over a part of each query's keys, possibly none: outputs [B, H, N, D] and log-sums [B, H, N]."""
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        plan = make_plan(mask, self.name, part=True, rest=rest)
        return _run(plan, q, k, v, torch.empty_like(q), None, None, lse), lse


def _visit(plan: Plan, q: Tensor, k: Tensor, scale: float | None, visit: Visit) -> Tensor | None:
    """Write down what groups gain; those that are left out for it, bool [B, H, Mq, Mk]."""
    _check_length(plan)
    ascending = torch.zeros(plan.shape, dtype=torch.bool)
    gains = tile_gains(plan, q, k, ascending if visit.descending is None else visit.descending, scale)
    if visit.gains is not None:
        visit.gains.copy_(gains)
    return None if visit.skip is None else left_out(plan, gains, visit)


def _run(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    scale: float | None,
    mass: Tensor | None,
    lse: Tensor | None,
    small: Tensor | None = None,
) -> Tensor:
    """`small`, bool [B, H, Mq, Mk]: groups that are left out although the plan keeps them."""
    _check_length(plan)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values, seen, bias = with_means(plan, b, h, k[b, h], v[b, h])
            if small is not None:
                rows, groups = _block_of_token(plan, "q", b, h), _block_of_token(plan, "k", b, h)
                seen[: plan.n_q, : plan.n_k] &= ~small[b, h][rows][:, groups]
            weights, sums = softmax(q[b, h], keys, seen, bias, scale)
            share = weights[: plan.n_q, k.shape[2] :].sum(-1)  # of the approximated part
            result = weighted(weights, values, seen)
            if plan.rest == "first-order":
                result[: plan.n_q] += linear_term(plan, b, h, q[b, h], k[b, h], v[b, h], share, scale)
            out[b, h] = result.to(out.dtype)
            if mass is not None:
                mass[b, h] = share.mean()
            if lse is not None:
                lse[b, h] = sums
    return out


def _check_length(plan: Plan) -> None:
    if max(plan.n_q, plan.n_k) + plan.tail > LIMIT:
        raise HeartError(_too_long(max(plan.n_q, plan.n_k) + plan.tail))


def _too_long(tokens: int) -> str:
    return f"eager builds the whole score matrix and takes at most {LIMIT} tokens, not {tokens}: use another kernel"


def with_means(plan: Plan, b: int, h: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values of one head, [Nk, D] and a mean for each group; which query sees which; what its logit gains.

    With a rest there are Mk further keys: a query sees those of the groups that it approximates, with the logarithm of
    the group's size on their logits.
    """
    k, v, seen = k.float(), v.float(), token_mask(plan, b, h)
    bias = torch.zeros(k.shape[0], device=k.device)
    if plan.rest_ptr is None:
        return k, v, seen, bias
    keys, values = (torch.cat([x, group_means(plan, x, b, h)]) for x in (k, v))
    return keys, values, torch.cat([seen, _approximated(plan, b, h)], 1), torch.cat([bias, log_sizes(plan, b, h)])


def token_mask(plan: Plan, b: int, h: int) -> Tensor:
    """Which query token attends to which key token in one head, bool [Nq + tail, Nk + tail]."""
    q_block, k_block = _block_of_token(plan, "q", b, h), _block_of_token(plan, "k", b, h)  # [Nq], [Nk]
    kept = listed(plan.row_ptr[b, h], plan.cols, plan.k_starts.shape[-1] - 1)
    mask = torch.zeros(plan.n_q + plan.tail, plan.n_k + plan.tail, dtype=torch.bool, device=plan.device)
    mask[: plan.n_q, : plan.n_k] = kept[q_block][:, k_block]
    mask[plan.n_q :, plan.n_k :] = True
    return mask


def _approximated(plan: Plan, b: int, h: int) -> Tensor:
    """Which query token approximates which key group in one head, bool [Nq + tail, Mk]."""
    assert plan.rest_ptr is not None and plan.rest_cols is not None
    groups = listed(plan.rest_ptr[b, h], plan.rest_cols, plan.k_starts.shape[-1] - 1)
    return torch.nn.functional.pad(groups[_block_of_token(plan, "q", b, h)], (0, 0, 0, plan.tail))


def listed(rows: Tensor, cols: Tensor, columns: int) -> Tensor:
    """The entries that each row lists, bool [M, columns]; rows [M + 1] says where its entries begin in `cols`."""
    found = torch.zeros(len(rows) - 1, columns, dtype=torch.bool, device=cols.device)
    row_of = torch.repeat_interleave(torch.arange(len(rows) - 1, device=cols.device), rows.diff())
    found[row_of, cols[rows[0] : rows[-1]].long()] = True
    return found


def _block_of_token(plan: Plan, side: str, b: int, h: int) -> Tensor:
    """Block that each token lies in, int64 [n]."""
    starts, perm = plan.boundaries(side, b, h), plan.permutation(side, b, h)
    block = torch.repeat_interleave(torch.arange(len(starts) - 1, device=starts.device), starts.diff())
    if perm is None:
        return block
    return torch.empty_like(block).scatter_(0, perm.long(), block)


def products(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ, [Nq, Nk], in parts of 64 dimensions: the rounding error of one long sum grows with its length."""
    first, *rest = zip(q.split(64, dim=-1), k.split(64, dim=-1))
    total = first[0] @ first[1].T
    for a, b in rest:
        total.addmm_(a, b.T)
    return total


def softmax(q: Tensor, k: Tensor, seen: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Weights [Nq, Nk] and log-sums [Nq] of one head in fp32; a query that sees nothing has weights of zero."""
    logits = (products(q.float(), k) * scale + bias).masked_fill_(~seen, -torch.inf)
    empty = ~seen.any(dim=-1, keepdim=True)
    return logits.softmax(dim=-1).masked_fill(empty, 0.0), logits.logsumexp(dim=-1)


def weighted(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Weights [Nq, Nk] times values [Nk, D]; 0 · NaN is NaN, so a broken value is added only where it is seen."""
    broken = (~v.isfinite()).any(dim=-1).nonzero().view(-1)
    out = weights @ v.index_fill(0, broken, 0.0)
    for j in broken.tolist():
        out += torch.where(seen[:, j, None], weights[:, j, None] * v[j], 0.0)
    return out


KERNEL = Eager()
