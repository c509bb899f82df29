"""Means of keys or values over the groups of a plan: what stands for a group that a mask leaves out."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import Plan


def group_means(plan: Plan, x: Tensor, b: int, h: int) -> Tensor:
    """Means of one head's tokens x [N, D] over its key groups, fp32 [Mk, D]; an empty group has zeros."""
    perm = plan.permutation("k", b, h)
    tokens = x[: plan.n_k] if perm is None else x.index_select(0, perm.long())  # in group order
    sizes = plan.boundaries("k", b, h).diff().long()
    sums = torch.segment_reduce(tokens.float(), "sum", lengths=sizes)
    return sums / sizes.clamp(min=1).unsqueeze(-1)


def log_sizes(plan: Plan, b: int, h: int) -> Tensor:
    """Logarithm of each key group's size, fp32 [Mk]: what a mean's logit gains; −inf for an empty group."""
    return plan.boundaries("k", b, h).diff().float().log()
