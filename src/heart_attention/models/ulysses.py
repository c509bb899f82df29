"""Context parallelism after Ulysses: each rank gets all tokens of some heads, so HEART works there unchanged.

Where text shares the sequence with video, each rank brings a part of both; the exchange puts video beside video
and text beside text, so that a rank's heads see the sequence as one process has it.

Which heads a rank gets is said in head_assignment.py; the exchange of tokens for heads sends them there and back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import HeartError
from . import compat, head_assignment
from .head_assignment import Assignment

if TYPE_CHECKING:
    from ..masks import Text
    from .attachment import Attachment, Layer
    from .processors import Dense

Shares = list[list[int]]  # of each rank: how many tokens it holds of each stretch (video, text) of the sequence


def check_parallel(config: Any) -> None:
    """Refuse a parallel config (or a transformer with one) under which no rank sees all tokens of a head."""
    context = compat.context_parallel(config)
    if context is not None and context.ring_degree > 1:
        raise HeartError(
            f"HEART needs all tokens of a head on one device, which ring attention (ring_degree={context.ring_degree}) "
            f"does not give; use ContextParallelConfig(ulysses_degree={context.ring_degree * context.ulysses_degree})."
        )


def attend_in_parallel(
    attachment: Attachment,
    layer: Layer,
    dense: Dense,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    config: Any,
) -> torch.Tensor:
    """One call of a layer whose tokens are spread over ranks; q, k, v [B, n, H, D] with this rank's n tokens."""
    check_parallel(config)
    context = compat.context_parallel(config)
    group = compat.ulysses_group(context)
    shares = _shares(attachment, layer, _tokens(query, context, group))
    reason = _reason_not(attachment, layer, dense, query, key, shares)
    if reason is not None:
        attachment.fallback(layer, reason)
        dense.parallel = config
        return dense.raw(query, key, value)
    rank, costs = dist.get_rank(group), attachment.costs
    assignment = head_assignment.assign(
        None if costs is None else costs[layer.info.index], query.shape[2], context.ulysses_degree
    )
    q, k, v = (_to_heads(x, assignment, shares, rank, group) for x in (query, key, value))  # [B, h, N, D]
    if layer.info.kind == "joint" and not attachment.family.packed:
        dense.mask = _padding(attachment.sequence[1] or [], q)
    place = {
        "head_offset": assignment[rank][0] if costs is None else 0,
        "heads_total": query.shape[2],
        "heads": None if costs is None else assignment[rank],
        "all_reduce": _summer(group),
    }
    out = attachment.attend(layer, q, k, v, dense, **place)
    return _to_tokens(out, assignment, shares, rank, group)


def _reason_not(
    attachment: Attachment, layer: Layer, dense: Dense, query: torch.Tensor, key: torch.Tensor, shares: Shares
) -> str | None:
    if not shares:
        return "joint text tokens spread over ranks in a way HEART does not know"
    known = dense.mask is None or (layer.info.kind == "joint" and attachment.family.mask_is_padding)
    if not known or dense.extra or query.shape != key.shape:
        return "an attention mask or options under context parallelism"
    return None


def _shares(attachment: Attachment, layer: Layer, tokens: list[int]) -> Shares:
    """How the ranks' tokens make up the sequence, stretch after stretch; nothing if that cannot be told."""
    if layer.info.kind == "self" or attachment.family.packed:
        return [[n] for n in tokens]
    video, texts = attachment.sequence
    places = {(text.start, text.end) for text in texts or []}
    if len(places) != 1 or attachment.family.item_by_item:
        return []
    start, end = places.pop()
    if start not in (0, video):
        return []
    stretches = (video, end - start) if start else (end, video)
    shares = [[_share(n, rank, len(tokens)) for n in stretches] for rank in range(len(tokens))]
    return shares if [sum(share) for share in shares] == tokens else []


def _share(n: int, rank: int, ranks: int) -> int:
    """Tokens of `n` that a rank holds: diffusers gives the first ranks one more where they do not divide."""
    return n // ranks + (rank < n % ranks)


def _padding(texts: list[Text], q: torch.Tensor) -> torch.Tensor | None:
    """Which keys are no unused text slots, bool [B, 1, 1, N]; None where there are none.

    The model's own mask is for another order of tokens than the exchange gives, or for this rank's alone.
    """
    if not any(text.unused for text in texts):
        return None
    place = torch.arange(q.shape[2], device=q.device)
    used = [(place < text.start + text.prompt) | (place >= text.end) for text in texts]
    return torch.stack(used)[:, None, None]


def _tokens(query: torch.Tensor, context: Any, group: Any) -> list[int]:
    """How many tokens each rank holds."""
    if not compat.ulysses_anything(context):
        return [query.shape[1]] * context.ulysses_degree
    sizes = [torch.zeros(1, dtype=torch.int64, device=query.device) for _ in range(context.ulysses_degree)]
    dist.all_gather(sizes, torch.tensor([query.shape[1]], device=query.device), group=group)
    return [int(size) for size in sizes]


def _to_heads(x: torch.Tensor, assignment: Assignment, shares: Shares, rank: int, group: Any) -> torch.Tensor:
    """[B, n, H, D] with this rank's tokens -> [B, h, N, D] with its heads and all tokens."""
    batch, _, _, dim = x.shape
    sent = [x[:, :, heads] for heads in assignment]  # [B, n, h of that rank, D]
    mine = len(assignment[rank])
    parts = _exchange(sent, [(batch, sum(share), mine, dim) for share in shares], group)
    stretches = zip(*(part.split(share, dim=1) for part, share in zip(parts, shares)))
    return torch.cat([piece for stretch in stretches for piece in stretch], dim=1).transpose(1, 2)


def _to_tokens(out: torch.Tensor, assignment: Assignment, shares: Shares, rank: int, group: Any) -> torch.Tensor:
    """[B, h, N, D] -> [B, n, H, D], every token and head at its own place again."""
    batch, _, _, dim = out.shape
    lengths = [n for stretch in zip(*shares) for n in stretch]  # as `_to_heads` put them together
    pieces = out.transpose(1, 2).split(lengths, dim=1)
    ranks = len(shares)
    sent = [torch.cat(pieces[r::ranks], dim=1) for r in range(ranks)]  # [B, n of that rank, h, D]
    parts = _exchange(sent, [(batch, sum(shares[rank]), len(heads), dim) for heads in assignment], group)
    order = torch.tensor([head for heads in assignment for head in heads], device=out.device)
    return torch.cat(parts, dim=2)[:, :, order.argsort()]


def _exchange(sent: list[torch.Tensor], shapes: list[tuple[int, ...]], group: Any) -> list[torch.Tensor]:
    """Give `sent[r]` to rank r; what rank r gives has `shapes[r]`."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = sent[0].new_empty(sum(sizes))
    flat = torch.cat([x.reshape(-1) for x in sent])
    dist.all_to_all_single(received, flat, sizes, [x.numel() for x in sent], group=group)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes)]


def _summer(group: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that share this layer's heads."""
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    return all_reduce


# ---------------------------------------- old names, for one more version

_RENAMED = {
    "split_heads": "in_order",
    "deal_heads": "by_cost",
    "imbalance": "imbalance",
    "balance": "balance",
    "costs_of": "head_costs",
}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(f"{__name__}.{name} is models.head_assignment.{new} now", DeprecationWarning, stacklevel=2)
    return getattr(head_assignment, new)
