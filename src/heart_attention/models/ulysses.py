"""Context parallelism after Ulysses: each rank gets all tokens of some heads, so HEART works there unchanged.

Where text shares the sequence with video, each rank brings a part of both; the exchange puts video beside video
and text beside text, so that a rank's heads see the sequence as one process has it.

Sparse heads cost what their masks keep, so that ranks with dense heads hold up the others. Where costs are
known from a calibration, `deal="cost"` in the config shares heads out evenly: the exchange of tokens for heads
sends them to the ranks they were dealt to, and back. `balance` says what that gains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import HeartError

if TYPE_CHECKING:
    from ..masks import Text
    from .attachment import Attachment, Layer
    from .processors import Dense

Deal = list[list[int]]  # the heads of each rank
Costs = Sequence[Sequence[float]]  # [L, H]
Shares = list[list[int]]  # of each rank: how many tokens it holds of each stretch (video, text) of the sequence


def check_parallel(config: Any) -> None:
    """Refuse a parallel config under which no rank sees all tokens of a head."""
    context = getattr(config, "context_parallel_config", None)
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
    context = config.context_parallel_config
    group = context._ulysses_mesh.get_group()
    shares = _shares(attachment, layer, _tokens(query, context, group))
    reason = _reason_not(attachment, layer, dense, query, key, shares)
    if reason is not None:
        attachment.fallback(layer, reason)
        dense.parallel = config
        return dense.raw(query, key, value)
    rank, costs = dist.get_rank(group), attachment.costs
    deal = _deal(None if costs is None else costs[layer.info.index], query.shape[2], context.ulysses_degree)
    q, k, v = (_to_heads(x, deal, shares, rank, group) for x in (query, key, value))  # [B, h, N, D]
    if layer.info.kind == "joint":
        dense.mask = _padding(attachment.sequence[1], q)
    place = {
        "head_offset": deal[rank][0] if costs is None else 0,
        "heads_total": query.shape[2],
        "heads": None if costs is None else deal[rank],
        "all_reduce": _summer(group),
    }
    out = attachment.attend(layer, q, k, v, dense, **place)
    return _to_tokens(out, deal, shares, rank, group)


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
    if layer.info.kind == "self":
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
    if not getattr(context, "ulysses_anything", False):
        return [query.shape[1]] * context.ulysses_degree
    sizes = [torch.zeros(1, dtype=torch.int64, device=query.device) for _ in range(context.ulysses_degree)]
    dist.all_gather(sizes, torch.tensor([query.shape[1]], device=query.device), group=group)
    return [int(size) for size in sizes]


def _to_heads(x: torch.Tensor, deal: Deal, shares: Shares, rank: int, group: Any) -> torch.Tensor:
    """[B, n, H, D] with this rank's tokens -> [B, h, N, D] with its heads and all tokens."""
    batch, _, _, dim = x.shape
    sent = [x[:, :, heads] for heads in deal]  # [B, n, h of that rank, D]
    mine = len(deal[rank])
    parts = _exchange(sent, [(batch, sum(share), mine, dim) for share in shares], group)
    stretches = zip(*(part.split(share, dim=1) for part, share in zip(parts, shares)))
    return torch.cat([piece for stretch in stretches for piece in stretch], dim=1).transpose(1, 2)


def _to_tokens(out: torch.Tensor, deal: Deal, shares: Shares, rank: int, group: Any) -> torch.Tensor:
    """[B, h, N, D] -> [B, n, H, D], every token and head at its own place again."""
    batch, _, _, dim = out.shape
    lengths = [n for stretch in zip(*shares) for n in stretch]  # as `_to_heads` put them together
    pieces = out.transpose(1, 2).split(lengths, dim=1)
    ranks = len(shares)
    sent = [torch.cat(pieces[r::ranks], dim=1) for r in range(ranks)]  # [B, n of that rank, h, D]
    parts = _exchange(sent, [(batch, sum(shares[rank]), len(heads), dim) for heads in deal], group)
    order = torch.tensor([head for heads in deal for head in heads], device=out.device)
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


# -- sharing out heads -----------------------------------------------------------------------------------
@functools.lru_cache(maxsize=1024)  # asked at every call of every layer
def _deal(costs: tuple[float, ...] | None, heads: int, ranks: int) -> Deal:
    return split_heads(heads, ranks) if costs is None else deal_heads(costs, ranks)


def split_heads(heads: int, ranks: int) -> Deal:
    """Heads in order, as evenly as can be: how diffusers deals them."""
    each = -(-heads // max(ranks, 1))
    deal = [list(range(r * each, min(heads, (r + 1) * each))) for r in range(ranks)]
    if not deal or not all(deal):
        raise HeartError(f"{heads} attention heads cannot be shared by {ranks} ranks; use another number.")
    return deal


def deal_heads(costs: Sequence[float], ranks: int) -> Deal:
    """Share heads out so that all ranks have equally many and about equal cost.

    The dearest head goes to the rank with the least so far that still has room; then pairs of heads change
    places as long as that helps the dearest rank.

    Args:
        costs: one number a head, e.g. the densities a calibration measured.
        ranks: how many devices share the heads.
    """
    rooms = [len(part) for part in split_heads(len(costs), ranks)]
    deal: Deal = [[] for _ in rooms]
    for head in sorted(range(len(costs)), key=lambda h: (-costs[h], h)):
        free = [r for r in range(ranks) if len(deal[r]) < rooms[r]]
        deal[min(free, key=lambda r: (_load(costs, deal[r]), r))].append(head)
    while _improve(costs, deal):
        pass
    return [sorted(part) for part in deal]


def _load(costs: Sequence[float], heads: list[int]) -> float:
    return float(sum(costs[h] for h in heads))


def _improve(costs: Sequence[float], deal: Deal) -> bool:
    """Swap the pair of heads that lowers the dearest rank's load most; False when none does."""
    loads = [_load(costs, part) for part in deal]
    top = max(range(len(deal)), key=loads.__getitem__)
    best, swap = loads[top] * (1 - 1e-12), None
    for r, part in enumerate(deal):
        for i, mine in enumerate(deal[top]):
            for j, other in enumerate(part):
                change = costs[mine] - costs[other]
                worst = max(loads[top] - change, loads[r] + change)
                if r != top and worst < best:
                    best, swap = worst, (i, r, j)
    if swap is None:
        return False
    i, r, j = swap
    deal[top][i], deal[r][j] = deal[r][j], deal[top][i]
    return True


def imbalance(costs: Sequence[float], deal: Deal) -> float:
    """The dearest rank's load over the mean: 1 is even; all others wait for that rank."""
    loads = [_load(costs, part) for part in deal]
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def balance(costs: Costs, ranks: int) -> dict[str, float]:
    """The dearest rank's load over the mean (1 is even), with heads in order and dealt by cost.

    Ranks meet after every layer, so a layer's imbalance counts with that layer's cost; the worst layer is told too.
    """
    found: dict[str, float] = {}
    total = sum(sum(row) for row in costs)
    for name, share in (("order", lambda row: split_heads(len(row), ranks)), ("cost", lambda r: deal_heads(r, ranks))):
        each = [imbalance(row, share(row)) for row in costs]
        mean = sum(x * sum(row) for x, row in zip(each, costs)) / total if total else 1.0
        found |= {name: mean, f"{name}, worst layer": max(each)}
    return found


def costs_of(calibration: Any) -> list[list[float]]:
    """What each head costs [L, H]: the density a calibration measured at the threshold it chose."""
    if getattr(calibration, "S", None) is None:
        raise HeartError(
            "heads can be dealt by cost only where a calibration measured their sparsity, and these thresholds bring no "
            "such table; give thresholds=Calibration.load(...) of a measured calibration, or deal='order'."
        )
    return [
        [1.0 - float(cells[k]) for cells, k in zip(row, chosen)]
        for row, chosen in zip(calibration.S, calibration.choice)
    ]


def deal_by_cost(attachment: Attachment, costs: Costs) -> None:
    """Let a transformer's heads go to ranks by these costs (the same on every rank)."""
    layers = len(attachment.layers)
    if len(costs) != layers:
        raise HeartError(f"costs are for {len(costs)} layers but the transformer has {layers}; give [layers, heads].")
    attachment.costs = [tuple(row) for row in costs]
