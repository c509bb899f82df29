"""The rest as a second, small dense part: for kernels that give log-sums but know no means."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import Plan
from .group_means import group_means, log_sizes

SCORE_FLOATS = 1 << 24  # scores of queries against means that exist at once


def rest_part(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over the approximated groups alone, fp32: outputs [B, H, n_q, D] and log-sums [B, H, n_q].

    A query that approximates nothing has an output of zero and a log-sum of −inf.
    """
    batch, heads = plan.shape
    out = torch.zeros(batch, heads, plan.n_q, q.shape[-1], device=q.device)
    lse = torch.full((batch, heads, plan.n_q), -torch.inf, device=q.device)
    for b in range(batch):
        for h in range(heads):
            _head(plan, b, h, q[b, h], k[b, h], v[b, h], scale, out[b, h], lse[b, h])
    return out, lse


def _head(plan: Plan, b: int, h: int, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
    """One head, some queries at a time."""
    bias = _row_bias(plan, b, h)  # [Mq, Mk]
    starts, perm = plan.boundaries("q", b, h), plan.permutation("q", b, h)
    row = torch.repeat_interleave(torch.arange(len(bias), device=q.device), starts.diff().long())  # [n_q]
    token = torch.arange(plan.n_q, device=q.device) if perm is None else perm.long()
    keys, values = group_means(plan, k, b, h), group_means(plan, v, b, h)  # [Mk, D]
    step = max(1, SCORE_FLOATS // bias.shape[1])
    for some in torch.arange(plan.n_q, device=q.device).split(step):
        logits = q[token[some]].float() @ keys.T * scale + bias[row[some]]
        lse[token[some]] = logits.logsumexp(-1)
        weights = logits.softmax(-1).masked_fill(lse[token[some], None] == -torch.inf, 0.0)
        out[token[some]] = weights @ values


def _row_bias(plan: Plan, b: int, h: int) -> Tensor:
    """What the logit of each group's mean gains in each row, fp32 [Mq, Mk]: −inf where it is not approximated."""
    assert plan.rest_ptr is not None and plan.rest_cols is not None
    rows, sizes = plan.rest_ptr[b, h], log_sizes(plan, b, h)
    bias = torch.full((len(rows) - 1, len(sizes)), -torch.inf, device=plan.device)
    cols = plan.rest_cols[rows[0] : rows[-1]].long()
    bias[torch.repeat_interleave(torch.arange(len(bias), device=plan.device), rows.diff()), cols] = sizes[cols]
    return bias


def merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the outputs [B, H, N, D] and log-sums [B, H, N] of both."""
    lse = torch.logaddexp(a_lse, b_lse)
    return torch.lerp(b, a, (a_lse - lse).exp().unsqueeze(-1).to(a.dtype)), lse
