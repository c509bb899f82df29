"""Backward of attention over what a mask keeps and approximates: PyTorch, which is the definition, and C (backward.c).

Derivatives go through the means: a token t of an approximated group b has dk_t += dk̄_b / n_b and dv_t += dv̄_b / n_b.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import HeartError
from ..plan import Plan, make_plan
from . import build
from .chooser import Op, Way
from .group_means import group_means, log_sizes

Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


# ---------------------------------------- PyTorch


def torch_attention_backward(
    mask: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grads: Sequence[Tensor],
    scale: float | None = None,
    rest: str = "drop",
) -> list[Gradients]:
    """(dq, dk, dv) for each cotangent in `grads`, all [1, H, N, D], in plain PyTorch: the definition.

    `out` is the attention's output. The softmax is recomputed over the kept keys and the means only. All cotangents are
    taken together, so that each row's probabilities are computed once.
    """
    plan = make_plan(mask, rest=rest)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    made = [tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)) for _ in grads]
    for h in range(q.shape[1]):
        cotangents = torch.stack([g[0, h] for g in grads]).float()  # [G, N, D]
        inner = (cotangents * out[0, h].float()).sum(-1, keepdim=True)  # [G, N, 1]
        means = [] if plan.rest_ptr is None else [group_means(plan, x[0, h], 0, h) for x in (k, v)]
        keys, values = ([x[0, h].float(), *more] for x, more in zip((k, v), [[m] for m in means] or [[], []]))
        head = (q[0, h].float(), torch.cat(keys), torch.cat(values))
        results = [[x.new_zeros(x.shape) for x in head] for _ in grads]
        for rows, cols, bias in _rows(plan, h, q.shape[2], k.shape[2]):
            _row_backward(head, rows, cols, bias, cotangents, inner, scale, results)
        for (dq, dk, dv), (a, b, c) in zip(made, results):
            dq[0, h], dk[0, h], dv[0, h] = a, _spread(plan, h, b, k.shape[2]), _spread(plan, h, c, k.shape[2])
    return made  # type: ignore[return-value]


def _rows(plan: Plan, h: int, n_q: int, n_k: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Query tokens, keys and their bias of every row of one head; keys from n_k on are means of groups."""
    queries, keys = (_tokens(plan, side, h, n) for side, n in (("q", plan.n_q), ("k", plan.n_k)))
    starts, bias = plan.boundaries("k", 0, h).tolist(), log_sizes(plan, 0, h)
    for i, (start, end) in enumerate(itertools.pairwise(plan.boundaries("q", 0, h).tolist())):
        if start == end:
            continue
        kept = plan.cols[plan.row_ptr[0, h, i] : plan.row_ptr[0, h, i + 1]].tolist()
        cols = torch.cat([keys[:0], *(keys[starts[c] : starts[c + 1]] for c in kept)])
        groups = cols[:0]
        if plan.rest_ptr is not None and plan.rest_cols is not None:
            groups = plan.rest_cols[plan.rest_ptr[0, h, i] : plan.rest_ptr[0, h, i + 1]].long()
        yield queries[start:end], torch.cat([cols, n_k + groups]), F.pad(bias[groups], (len(cols), 0))
    if plan.tail:
        tail = torch.arange(plan.n_q, n_q, device=plan.device)
        yield tail, tail, torch.zeros(len(tail), device=plan.device)


def _tokens(plan: Plan, side: str, h: int, n: int) -> Tensor:
    """Token at each sorted position of one head, int64 [n]."""
    perm = plan.permutation(side, 0, h)
    return torch.arange(n, device=plan.device) if perm is None else perm.long()


def _row_backward(
    head: tuple[Tensor, Tensor, Tensor], rows: Tensor, cols: Tensor, bias: Tensor, cotangents: Tensor, inner: Tensor,
    scale: float, results: list[list[Tensor]],
) -> None:  # fmt: skip
    """Add one row's part: P = softmax(qkᵀ + bias), dS = P∘(g vᵀ − ⟨g, o⟩), dq = dS k, dk = dSᵀ q, dv = Pᵀ g."""
    q, k, v = head[0][rows], head[1][cols], head[2][cols]  # [r, D], [c, D], [c, D]
    count, size = len(cotangents), len(rows)
    p = torch.softmax((q * scale) @ k.T + bias, dim=-1)  # [r, c]
    g = cotangents[:, rows]  # [G, r, D]
    ds = (g.flatten(0, 1) @ v.T).view(count, size, -1).sub_(inner[:, rows]).mul_(p)  # [G, r, c]
    dq = (ds.flatten(0, 1) @ k).view(count, size, -1).mul_(scale)
    dv = p.T @ g.transpose(0, 1).flatten(1)  # [c, G·D]
    for i, (to_q, to_k, to_v) in enumerate(results):
        to_q[rows] = dq[i]
        to_k.index_add_(0, cols, ds[i].T @ q, alpha=scale)
        to_v.index_add_(0, cols, dv[:, i * q.shape[1] : (i + 1) * q.shape[1]])


def _spread(plan: Plan, h: int, gradient: Tensor, n: int) -> Tensor:
    """The gradient [N, D] of the tokens, from one [N + Mk, D] that also has those of the means."""
    if plan.rest_ptr is None:
        return gradient
    sizes = plan.boundaries("k", 0, h).diff().long()
    each = (gradient[n:] / sizes.clamp(min=1).unsqueeze(-1)).repeat_interleave(sizes, 0)  # in group order
    return gradient[:n].index_add(0, _tokens(plan, "k", h, plan.n_k), each)


# ---------------------------------------- C

_ARGUMENTS = struct.Struct("7q 8q 2q 3q 2q d q")  # `struct heart_backward` of backward.c


def serves(mask: Any, q: Tensor) -> bool:
    """Whether the C code can take this call."""
    return not reasons_not(mask, q)


def reasons_not(mask: Any = None, q: Tensor | None = None, *more: object, **options: object) -> list[str]:
    """Why the C code cannot serve here, or not for this call; empty if it can."""
    reasons = build.reasons_not()
    if q is not None and q.device.type != "cpu":
        reasons.append(f"the tensors are on {q.device}, not on the CPU")
    if q is not None and q.dtype == torch.float64:
        reasons.append("it computes in float32, not float64")
    if mask is not None and mask.tail:
        reasons.append("it knows no tail of unused text slots")
    return reasons


@torch.no_grad()
def c_attention_backward(
    mask: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grads: Sequence[Tensor],
    scale: float | None = None,
    rest: str = "drop",
) -> list[Gradients]:
    """`attention_backward` in C; sums in fp32."""
    plan = make_plan(mask, rest=rest)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    heads, dim, n_k = q.shape[1], q.shape[3], k.shape[2]
    inner = torch.stack([(g.float() * out.float()).sum(-1)[0] for g in grads], 1)  # [H, G, N]
    cotangents = torch.stack([g[0].float() for g in grads], 1)  # [H, G, N, D]
    order = [_order(plan, side, heads) for side in "qk"]
    keys, values = (_with_means(plan, x[0].float(), order[1]) for x in (k, v))
    given = {
        "q": _padded(_sorted(q[0].float()[:, None], order[0])[:, 0]),
        "k": _padded(keys),
        "v": _padded(values),
        "g": _padded(_sorted(cotangents, order[0])),
        "inner": _sorted(inner.unsqueeze(-1), order[0]).squeeze(-1).contiguous(),
    }
    made = {f"d{side}": torch.zeros(heads, len(grads), *given[side].shape[1:]) for side in "qkv"}
    _call(plan, given | made, scale)
    made["dq"] *= scale
    made = {name: x[..., :dim] for name, x in made.items()}
    if plan.rest_ptr is not None:
        made |= {name: _spread_sorted(plan, made[name], n_k) for name in ("dk", "dv")}
    each = [_unsorted(x, at) for x, at in zip(made.values(), (order[0], order[1], order[1]))]
    each = [x.to(like.dtype) for x, like in zip(each, (q, k, v))]
    return [tuple(x[None, :, i] for x in each) for i in range(len(grads))]  # type: ignore[misc]


def _order(plan: Plan, side: str, heads: int) -> Tensor | None:
    """Token at each sorted position, int64 [H, n], or None for identity."""
    perm = plan.q_perm if side == "q" else plan.k_perm
    return None if perm is None else perm.view(-1, perm.shape[-1]).expand(heads, -1).long()


def _with_means(plan: Plan, x: Tensor, order: Tensor | None) -> Tensor:
    """Keys or values [H, N, D] in group order, and the means of the groups after them if some are approximated."""
    tokens = _sorted(x[:, None], order)[:, 0]
    if plan.rest_ptr is None:
        return tokens
    return torch.cat([tokens, torch.stack([group_means(plan, one, 0, h) for h, one in enumerate(x)])], 1)


def _spread_sorted(plan: Plan, gradient: Tensor, n: int) -> Tensor:
    """`_spread` for all heads and cotangents, tokens in group order: [H, G, N + Mk, D] -> [H, G, N, D]."""
    sizes = plan.group_sizes().long().expand(1, gradient.shape[0], -1)[0]  # [H, Mk]
    each = gradient[:, :, n:] / sizes.clamp(min=1)[:, None, :, None]
    group = torch.stack([torch.arange(s.numel()).repeat_interleave(s) for s in sizes])  # [H, N]
    return gradient[:, :, :n] + each.gather(
        2, group[:, None, :, None].expand(*gradient.shape[:2], n, gradient.shape[3])
    )


def _sorted(x: Tensor, order: Tensor | None) -> Tensor:
    """x [H, G, N, D] in group order."""
    return x if order is None else x.gather(2, order[:, None, :, None].expand(x.shape))


def _padded(x: Tensor) -> Tensor:
    """Rows filled up with zeros to whole panels."""
    return F.pad(x, (0, -x.shape[-1] % (2 * build.load().heart_vector_floats()))).contiguous()


def _unsorted(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else torch.empty_like(x).scatter_(2, order[:, None, :, None].expand(x.shape), x)


def _call(plan: Plan, arrays: dict[str, Tensor], scale: float) -> None:
    heads, count, n_q, dim = arrays["g"].shape
    starts = [x.expand(1, heads, -1).contiguous() for x in (plan.q_starts, plan.k_starts)]
    rest, bias = (0, 0, 0), plan.group_sizes().float().log().expand(1, heads, -1).contiguous()
    if plan.rest_ptr is not None and plan.rest_cols is not None:
        rest = (plan.rest_ptr.data_ptr(), plan.rest_cols.data_ptr(), bias.data_ptr())
    failed = build.call(
        "heart_attention_backward", _ARGUMENTS, heads, count, dim, n_q, arrays["k"].shape[1],
        starts[0].shape[-1] - 1, starts[1].shape[-1] - 1,
        *(arrays[name].data_ptr() for name in ("q", "k", "v", "g", "inner", "dq", "dk", "dv")),
        plan.row_ptr.data_ptr(), plan.cols.data_ptr(), *rest, *(x.data_ptr() for x in starts), scale, build.threads(),
    )  # fmt: skip
    if failed:
        raise HeartError("there is not enough memory for the backward pass: free some, or use a shorter sequence")


# (dq, dk, dv) for each of the cotangents `grads`, all [1, H, N, D], by what serves; `out` is the attention's output.
attention_backward = Op(
    "attention backward", Way("c", c_attention_backward, reasons_not), Way("torch", torch_attention_backward)
)
