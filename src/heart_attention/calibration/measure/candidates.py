"""One attention call seen by calibration: the masks of all candidate points, and heads run with any of them.

Points that differ only in the threshold or in what becomes of the rest share one prediction (XAttention's block scores,
SVG2's clustering from scratch, seeded): a *family*. A threshold only decides how much of it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import kernels, token_order
from ...backbones.base import Backbone
from ...masks import Mask
from ...online.call import CallContext
from ...online.points import Point
from ...online.predict import predict_many
from ..points import points_of

DENSE = -1  # a head's choice when it is not sparse


@dataclass(frozen=True)
class Spec:
    """What is tried: operating points, and how they are run.

    Args:
        points: the candidates.
        order: token orders of every head, [layers][heads], in place of the points' own; None: the points' own.
        kernel: a kernel's name, or "auto".
        scale_clusters: fit SVG2's cluster counts to the number of tokens, as in `HeartConfig`.
    """

    points: tuple[Point, ...]
    order: Any = None
    kernel: str = "auto"
    scale_clusters: bool = False

    @classmethod
    def of(
        cls, backbone: Backbone, thresholds: Sequence[float], order: Any = token_order.RASTER, kernel: str = "auto",
        scale_clusters: bool = False, rest: str = "drop",
    ) -> Spec:  # fmt: skip
        """One backbone's thresholds; `order` may be a table of every head."""
        one_order = isinstance(order, str)
        points = points_of(backbone, thresholds, rest, order if one_order else token_order.RASTER)
        return cls(points, None if one_order else order, kernel, scale_clusters)

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The points' thresholds."""
        return tuple(point.threshold for point in self.points)

    def families(self) -> list[Family]:
        """The points by what they share, in the order in which they first come."""
        alike: dict[tuple[str, str], list[int]] = {}
        for k, point in enumerate(self.points):
            alike.setdefault((str(point.backbone.to_dict()), point.order), []).append(k)
        return [Family(self.points[m[0]].backbone, self.points[m[0]].order, tuple(m)) for m in alike.values()]


@dataclass(frozen=True)
class Family:
    """Points of one backbone and token order; `members` are their places in the spec."""

    backbone: Backbone
    order: str
    members: tuple[int, ...]


class ChosenPoints:
    """A spec with only the points that a layer's heads have chosen, and the choice in those terms."""

    def __init__(self, spec: Spec, row: Sequence[int]):
        used = sorted({c for c in row if c != DENSE}) or [0]
        self.spec = replace(spec, points=tuple(spec.points[c] for c in used))
        self.choice = [used.index(c) if c != DENSE else DENSE for c in row]


@dataclass(frozen=True)
class ItemMasks:
    """Masks of one batch item: one for each point, and for each family the one that keeps everything; [1, H] each."""

    of_point: list[Mask]
    full: list[Mask]


@dataclass(frozen=True)
class Part:
    """Heads of one item that one kernel call serves."""

    heads: list[int]
    mask: Mask
    rest: str


class Trials:
    """One attention call: q, k, v [B, H, N, D] and the candidates' masks, item by item of the batch.

    With `heads` only these heads of the call are looked at, and counted from 0 here.
    """

    def __init__(
        self, spec: Spec, call: CallContext, branch: str, q: Tensor, k: Tensor, v: Tensor,
        masks: list[ItemMasks] | None = None, heads: Sequence[int] | None = None,
    ):  # fmt: skip
        self.spec, self.families, self.layer = spec, spec.families(), call.layer
        self.numbers = list(range(q.shape[1]) if heads is None else heads)
        self.q, self.k, self.v = (q, k, v) if heads is None else (x[:, self.numbers] for x in (q, k, v))
        self.family_of = {k: f for f, family in enumerate(self.families) for k in family.members}
        if masks is None:
            with torch.no_grad():
                masks = [self._predict(b, call, branch) for b in range(q.shape[0])]
        self.masks = masks

    def _predict(self, b: int, call: CallContext, branch: str) -> ItemMasks:
        of_point: list[Any] = [None] * len(self.spec.points)
        full = []
        for family in self.families:
            masks, everything = self._predict_family(family, b, call, branch)
            full.append(everything)
            for k, mask in zip(family.members, masks):
                of_point[k] = mask.for_rest(self.spec.points[k].rest)
        return ItemMasks(of_point, full)

    def _predict_family(self, family: Family, b: int, call: CallContext, branch: str) -> tuple[list[Mask], Mask]:
        q, k, v = (x[b : b + 1].detach() for x in (self.q, self.k, self.v))
        text = call.text[b] if call.text else None
        backbone = family.backbone.scaled_to(q.shape[2]) if self.spec.scale_clusters else family.backbone
        table = family.order if self.spec.order is None else self.spec.order
        names = token_order.names_at(table, call.transformer, call.layer, max(self.numbers) + 1)
        orders = token_order.orders_of(
            [names[h] for h in self.numbers], call.grid, q.shape[2], text, backbone.block_tokens, q.device
        )
        taus = [self.spec.points[m].threshold for m in family.members]
        key = (call.layer, branch, call.item + b)
        return predict_many(backbone, q, k, v, taus, text, orders=orders, heads=self.numbers, key=key, grid=call.grid)

    # ---------------------------------------- what masks keep

    def sparsity(self) -> Tensor:
        """Share of token pairs left out (approximated ones too), float64 [K, H], the mean over the batch."""
        return self._mean(lambda mask, rest: 1 - mask.density())

    def cost(self) -> Tensor:
        """Computed keys, kept and approximated, as a share of all, float64 [K, H], the mean over the batch."""
        return self._mean(lambda mask, rest: mask.cost(rest))

    def _mean(self, measure: Any) -> Tensor:
        rests = [point.rest for point in self.spec.points]
        items = [torch.stack([measure(m, r)[0] for m, r in zip(item.of_point, rests)]) for item in self.masks]
        return torch.stack(items).mean(0).cpu()

    def representative(self) -> list[list[int]]:
        """[K][H]: the first point of the family with the same mask and rest, or DENSE where nothing is left out."""
        out: list[list[int]] = [[]] * len(self.spec.points)
        for f, family in enumerate(self.families):
            kept = [[item.of_point[k].kept()[0] for k in family.members] for item in self.masks]  # [B][k], each [H, …]
            full = [item.full[f].kept()[0] for item in self.masks]
            rests = [self.spec.points[k].rest for k in family.members]
            for i, k in enumerate(family.members):
                out[k] = [self._first(h, i, kept, full, rests, family.members) for h in range(len(self.numbers))]
        return out

    @staticmethod
    def _first(h: int, i: int, kept: list, full: list, rests: list[str], members: Sequence[int]) -> int:
        if all(torch.equal(masks[i][h], whole[h]) for masks, whole in zip(kept, full)):
            return DENSE
        for j in range(i):
            if rests[j] == rests[i] and all(torch.equal(masks[i][h], masks[j][h]) for masks in kept):
                return members[j]
        return members[i]

    # ---------------------------------------- running heads

    def run(self, heads: Sequence[int], point: int) -> Tensor:
        """The outputs of some heads at one point (DENSE: everything kept, by the same kernel), [B, h, N, D]."""
        index = list(heads)
        outs = []
        for b, item in enumerate(self.masks):
            mask, rest = (
                (item.full[0], "drop") if point == DENSE else (item.of_point[point], self.spec.points[point].rest)
            )
            outs.append(self._kernel(Part(index, mask.heads(index), rest), b))
        return torch.cat(outs)

    def climb(self) -> Iterator[tuple[int, Tensor]]:
        """(point, outputs of all heads [B, H, N, D]), every point once, families one after the other.

        A higher threshold keeps what a lower one keeps and more. So where the kernel can, only what is new is
        computed and merged: all points of a family together cost little more than the last.
        """
        for family in self.families:
            for rest in dict.fromkeys(self.spec.points[k].rest for k in family.members):
                alike = [k for k in family.members if self.spec.points[k].rest == rest]
                yield from self._climb(sorted(alike, key=lambda k: self.spec.points[k].threshold), rest)

    def _climb(self, points: list[int], rest: str) -> Iterator[tuple[int, Tensor]]:
        everyone = list(range(len(self.numbers)))
        below: int | None = None  # the point whose kept part is in `part`
        part: tuple[Tensor, Tensor] | None = None
        for k in points:
            added = [_beyond(None if below is None else item.of_point[below], item.of_point[k]) for item in self.masks]
            kernel = kernels.choose(added[0], self.q.detach(), self.spec.kernel, rest)
            in_parts = kernel.log_sums and rest in ("drop", "mean")  # what else there is has no log-sums of its own
            if not in_parts or any(mask is None for mask in added):
                yield k, self.run(everyone, k)
                below, part = None, None
                continue
            new = self._part(kernel, added, "drop")
            part = new if part is None else _merge(*part, *new)
            below = k
            if rest == "drop":
                yield k, part[0]
            else:
                groups = self._part(kernel, [item.of_point[k] for item in self.masks], "only")
                yield k, _merge(*part, *groups)[0]

    def _part(self, kernel: Any, masks: list[Any], rest: str) -> tuple[Tensor, Tensor]:
        """Outputs and log-sums over what the masks keep, or ("only") over what they approximate."""
        everyone = list(range(len(self.numbers)))
        items = [kernel.run_part(mask, *self._item(b, everyone), rest=rest) for b, mask in enumerate(masks)]
        return torch.cat([out for out, _ in items]), torch.cat([lse for _, lse in items])

    def mixed(self, choice: Sequence[int], dense: Tensor | None) -> Tensor:
        """All heads, each at its own point; DENSE heads are taken from `dense`, [B, H, N, D]."""
        sparse = [h for h, c in enumerate(choice) if c != DENSE]
        if not sparse:
            assert dense is not None
            return dense
        whole = torch.empty_like(self.q) if dense is None else dense.clone()
        for b in range(len(self.masks)):
            for part in self.parts(b, choice, sparse):
                whole[b : b + 1, part.heads] = self._kernel(part, b)
        return whole

    def parts(self, b: int, choice: Sequence[int], heads: Sequence[int] | None = None) -> list[Part]:
        """The heads of one item by family and rest, each with its mask; DENSE ones keep everything."""
        item, groups = self.masks[b], {}
        for h in range(len(choice)) if heads is None else heads:
            c = choice[h]
            place = (0, "drop") if c == DENSE else (self.family_of[c], self.spec.points[c].rest)
            groups.setdefault(place, []).append(h)
        return [
            Part(members, self._mask_of(item, family, members, choice), rest)
            for (family, rest), members in groups.items()
        ]

    @staticmethod
    def _mask_of(item: ItemMasks, family: int, heads: list[int], choice: Sequence[int]) -> Mask:
        mask = item.full[family].heads(heads)
        for c in sorted({choice[h] for h in heads} - {DENSE}):
            places = [i for i, h in enumerate(heads) if choice[h] == c]
            mask = mask.put(places, item.of_point[c].heads([heads[i] for i in places]))
        return mask

    def _kernel(self, part: Part, b: int) -> Tensor:
        q, k, v = self._item(b, part.heads)
        kernel = kernels.choose(part.mask, q, self.spec.kernel, part.rest)
        return kernel.run(kernel.plan(part.mask, part.rest), q, k, v)

    def _item(self, b: int, heads: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of some heads of one batch item."""
        whole = heads == list(range(self.q.shape[1]))
        q, k, v = (x.detach()[b : b + 1] if whole else x.detach()[b : b + 1, heads] for x in (self.q, self.k, self.v))
        return q, k, v


def _beyond(lower: Mask | None, mask: Mask) -> Mask | None:
    """What `mask` keeps beyond `lower`; None if it does not keep all of `lower`."""
    return mask if lower is None else mask.minus(lower)


def _merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the outputs [B, H, N, D] and log-sums [B, H, N] of both."""
    lse = torch.logaddexp(a_lse, b_lse)
    return torch.lerp(b, a, (a_lse - lse).exp().unsqueeze(-1).to(a.dtype)), lse
