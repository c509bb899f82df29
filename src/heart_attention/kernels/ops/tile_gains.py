"""By how much each kept group raises the running maximum of its queries, in the order in which a kernel visits groups."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..base import Visit
from ..plan import Plan
from .first_order import group_of

LOG2_E = math.log2(math.e)


def tile_gains(plan: Plan, q: Tensor, k: Tensor, descending: Tensor, scale: float | None = None) -> Tensor:
    """The gains of all heads, fp32 [B, H, Mq, Mk]: in plain PyTorch, the definition.

    The gain of a group is the most, over the queries of a row, that its largest logit exceeds the largest of the groups
    visited before, in units of log2. It is +inf for the first group visited and for groups that are not kept.

    Args:
        descending: bool [B, H], whether a head's groups are visited from the last to the first.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    heads = [
        _of_head(plan, q[b, h], k[b, h], b, h, bool(descending[b, h]), scale * LOG2_E)
        for b, h in torch.ones(plan.shape).nonzero().tolist()
    ]
    return torch.stack(heads).unflatten(0, plan.shape)


def left_out(plan: Plan, gains: Tensor, visit: Visit) -> Tensor:
    """The groups that a visit leaves out because they gain too little, bool [B, H, Mq, Mk]."""
    assert visit.skip is not None
    kept = torch.stack([_kept(plan, b, h, gains.shape[3]) for b, h in torch.ones(plan.shape).nonzero().tolist()])
    kept = kept.unflatten(0, plan.shape)
    later = kept.flip(-1).cumsum(-1).flip(-1)  # this group and the kept ones after it
    small = kept & (gains <= -visit.skip.to(gains)[..., None, None]) & (later > visit.untested)
    small[:, :, visit.whole_rows :] = False
    return small


def _of_head(plan: Plan, q: Tensor, k: Tensor, b: int, h: int, descending: bool, scale: float) -> Tensor:
    rows, groups = group_of(plan, "q", b, h), group_of(plan, "k", b, h)
    count = plan.k_starts.shape[-1] - 1
    kept = _kept(plan, b, h, count)  # [Mq, Mk]
    logits = q[: plan.n_q].float() @ k[: plan.n_k].float().T * scale
    top = torch.full((plan.n_q, count), -torch.inf, device=q.device)
    top.scatter_reduce_(1, groups.expand(plan.n_q, -1), logits, "amax")  # largest logit of each group
    top.masked_fill_(~kept[rows], -torch.inf)
    top = top.flip(1) if descending else top
    before = torch.nn.functional.pad(top.cummax(1).values[:, :-1], (1, 0), value=-torch.inf)
    gain = (top - before).flip(1) if descending else top - before
    found = torch.full(kept.shape, -torch.inf, device=q.device)
    found.scatter_reduce_(0, rows[:, None].expand(-1, count), gain.nan_to_num(torch.inf, torch.inf, -torch.inf), "amax")
    return found.masked_fill(~kept, torch.inf)


def _kept(plan: Plan, b: int, h: int, count: int) -> Tensor:
    pointer = plan.row_ptr[b, h]
    rows = torch.repeat_interleave(torch.arange(len(pointer) - 1, device=plan.device), pointer.diff())
    kept = torch.zeros(len(pointer) - 1, count, dtype=torch.bool, device=plan.device)
    kept[rows, plan.cols[pointer[0] : pointer[-1]].long()] = True
    return kept
