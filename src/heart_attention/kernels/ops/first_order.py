"""PISA's first order: what the means of groups leave out, to the linear term, by one D×D matrix a head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..plan import Plan
from .group_means import group_means


def linear_term(plan: Plan, b: int, h: int, q: Tensor, k: Tensor, v: Tensor, share: Tensor, scale: float) -> Tensor:
    """(g/N)·σ·qᵀG over the softmax's sum, for one head, fp32 [n_q, D]; G = Σ_t (k_t − k̄) v_tᵀ over all groups.

    `share` [n_q] is the approximated part of each query's softmax, g over the sum. Its mean weight g/N stands for each
    group's own, which is what lets one matrix serve all queries.
    """
    n = plan.n_k
    spread = k[:n].float() - group_means(plan, k, b, h)[group_of(plan, "k", b, h)]
    matrix = spread.T @ v[:n].float()  # [D, D]
    return (q[: plan.n_q].float() @ matrix) * (share * (scale / n)).unsqueeze(-1)


def add_linear_terms(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, share: Tensor, out: Tensor, scale: float | None
) -> None:
    """Add every head's linear term to `out` [B, H, N, D]; share [B, H, N]."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for b, h in torch.ones(plan.shape).nonzero().tolist():
        own = share[b, h, : plan.n_q]
        out[b, h, : plan.n_q] += linear_term(plan, b, h, q[b, h], k[b, h], v[b, h], own, scale).to(out.dtype)


def group_of(plan: Plan, side: str, b: int, h: int) -> Tensor:
    """Group of each query ("q") or key ("k") of one head, int64 [n]."""
    starts, perm = plan.boundaries(side, b, h), plan.permutation(side, b, h)
    groups = torch.repeat_interleave(torch.arange(len(starts) - 1, device=starts.device), starts.diff())
    return groups if perm is None else torch.empty_like(groups).scatter_(0, perm.long(), groups)
