"""What adapters to other people's block kernels share: tokens in the order of a plan, kept blocks as padded lists."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import Plan


def in_order(x: Tensor, n: int, perm: Tensor | None) -> Tensor:
    """The first `n` tokens of x [B, H, N, D] in block order; a view when they already are.

    Copies lie in memory as diffusers' tensors do, [B, N, H, D]: compiled kernels meet one layout.
    """
    x = x.narrow(2, 0, n)
    if perm is None:
        return x
    tokens = x.transpose(1, 2)
    if perm.ndim == 1:
        return tokens.index_select(1, perm.long()).transpose(1, 2)
    index = perm.long().transpose(1, 2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return tokens.gather(1, index).transpose(1, 2)


def put_back(out: Tensor, found: Tensor, perm: Tensor | None) -> None:
    """Write tokens [B, H, n, D] in block order to their places in out."""
    if perm is None:
        out.copy_(found)
    elif perm.ndim == 1:
        out.index_copy_(2, perm.long(), found.to(out.dtype))
    else:
        out.scatter_(2, perm.long()[..., None].expand(-1, -1, -1, found.shape[-1]), found.to(out.dtype))


def sides(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v without the unused tail, in block order."""
    return (
        in_order(q, plan.n_q, plan.q_perm),
        in_order(k, plan.n_k, plan.k_perm),
        in_order(v, plan.n_k, plan.k_perm),
    )


def padded_lists(plan: Plan) -> Tensor:
    """Kept key blocks of every row side by side, int32 [B, H, Mq, room], zeros behind the shorter rows."""
    on_gpu = plan.counts.is_cuda  # the longest row there could be: asking for the longest one would make the call wait
    longest = max(1, plan.k_starts.shape[-1] - 1 if on_gpu else int(plan.counts.max()))
    nth = torch.arange(longest, dtype=torch.int64, device=plan.device)
    inside = nth < plan.counts.unsqueeze(-1)  # [B, H, Mq, longest]
    place = torch.where(inside, plan.row_ptr[..., :-1, None] + nth, 0)
    return torch.where(inside, plan.cols.take(place), 0) if plan.cols.numel() else place.to(torch.int32)
