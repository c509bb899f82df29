"""The definition: masked attention in plain PyTorch, fp32, one head at a time. Slow and for small sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError
from .plan import Plan, make_plan

# Above this many tokens on a side the score matrix of one head alone takes more than 256 MB.
LIMIT = 8192


class Eager:
    """Kernel `eager`."""

    name = "eager"

    def reasons_not(self, mask: Any = None, q: Tensor | None = None) -> list[str]:
        """Why it cannot serve; empty if it can."""
        tokens = 0 if q is None else q.shape[2]
        return [_too_long(tokens)] if tokens > LIMIT else []

    def plan(self, mask: Any) -> Plan:
        """Plan a mask."""
        return make_plan(mask, self.name)

    def run(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, scale: float | None = None):
        """Attention over what the plan keeps, [B, H, N, D]."""
        if max(plan.n_q, plan.n_k) + plan.tail > LIMIT:
            raise HeartError(_too_long(max(plan.n_q, plan.n_k) + plan.tail))
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        out = torch.empty_like(q) if out is None else out
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                out[b, h] = masked_attention(q[b, h], k[b, h], v[b, h], token_mask(plan, b, h), scale).to(out.dtype)
        return out


def _too_long(tokens: int) -> str:
    return f"eager builds the whole score matrix and takes at most {LIMIT} tokens, not {tokens}: use another kernel"


def token_mask(plan: Plan, b: int, h: int) -> Tensor:
    """Which query token attends to which key token in one head, bool [Nq + tail, Nk + tail]."""
    q_block, k_block = _block_of_token(plan, "q", b, h), _block_of_token(plan, "k", b, h)  # [Nq], [Nk]
    rows = plan.row_ptr[b, h]
    kept = torch.zeros(len(rows) - 1, int(k_block.max()) + 1, dtype=torch.bool, device=plan.device)
    row_of = torch.repeat_interleave(torch.arange(len(rows) - 1, device=plan.device), rows.diff())
    kept[row_of, plan.cols[rows[0] : rows[-1]].long()] = True
    mask = torch.zeros(plan.n_q + plan.tail, plan.n_k + plan.tail, dtype=torch.bool, device=plan.device)
    mask[: plan.n_q, : plan.n_k] = kept[q_block][:, k_block]
    mask[plan.n_q :, plan.n_k :] = True
    return mask


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


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q kᵀ · scale over the mask) v of one head in fp32; q [Nq, D], k and v [Nk, D], mask [Nq, Nk]."""
    q, k, v = q.float(), k.float(), v.float()
    weights = (products(q, k) * scale).masked_fill_(~mask, -torch.inf).softmax(dim=-1)
    broken = (~v.isfinite()).any(dim=-1).nonzero().view(-1)
    out = weights @ v.index_fill(0, broken, 0.0)
    for j in broken.tolist():  # 0 · NaN is NaN, so a broken value must be added only where it is attended to
        out += torch.where(mask[:, j, None], weights[:, j, None] * v[j], 0.0)
    return out


KERNEL = Eager()
