"""Operating points: which backbone, token order, threshold and rest each head takes, and in which phase.

The simple config, one backbone with thresholds, is the case of one group of heads in every layer and one phase.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import backbones, token_order
from ..backbones.base import Backbone
from ..errors import HeartError, shown
from ..token_order import HeadOrders
from . import thresholds

PHASE_LIMIT = 64


def check_rest(rest: Any, backbone: Backbone) -> str:
    """Raise unless this names what may become of the rest of this backbone's masks."""
    if not isinstance(rest, str) or rest not in backbone.rests:
        known = ", ".join(backbone.rests)
        raise HeartError(f"rest is {shown(rest)}: with {backbone.name} it must be one of {known}")
    return rest


@dataclass(frozen=True)
class Point:
    """One operating point of a head.

    Args:
        backbone: what predicts its mask, with settings.
        threshold: how much the mask keeps; 1 or more is dense attention.
        rest: "drop" leaves the rest out, "mean" approximates each group left out by one key, "first-order" adds PISA's
            linear term.
        order: "raster", "tiles", or a tile such as "4x4x4".
    """

    backbone: Backbone
    threshold: float
    rest: str = "drop"
    order: str = "raster"

    def __post_init__(self) -> None:
        object.__setattr__(self, "backbone", backbones.adapt(self.backbone))
        object.__setattr__(self, "threshold", thresholds.freeze(self.threshold))
        if not isinstance(self.threshold, float):
            raise HeartError("an operating point has one threshold: give a number")
        check_rest(self.rest, self.backbone)
        if not isinstance(self.order, str):
            raise HeartError(f"a point's order is {shown(self.order)}: give raster, tiles or a tile such as 4x4x4")
        if self.order not in (token_order.RASTER, token_order.TILES):
            token_order.shape_of(self.order)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        own = {"threshold": self.threshold, "rest": self.rest, "order": self.order}
        return {"backbone": self.backbone.to_dict(), **own}

    @classmethod
    def from_dict(cls, data: Any) -> Point:
        """From what `to_dict` gave; anything unknown is refused by name."""
        known = {"backbone", "threshold", "rest", "order"}
        if not isinstance(data, dict) or not {"backbone", "threshold"} <= set(data) <= known:
            raise HeartError(f"an operating point is an object with {', '.join(sorted(known))}, not {shown(data)}")
        return cls(**{**data, "backbone": backbones.from_dict(data["backbone"])})


@dataclass(frozen=True)
class PointTable:
    """A list of points and which of them each head takes.

    Args:
        points: the operating points.
        choice: index into `points` for every head, `[transformers][phases][layers][heads]`.
        phases: noise levels σ that divide the phases, descending, one fewer than there are phases.
    """

    points: tuple[Point, ...]
    choice: tuple
    phases: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(self.points))
        object.__setattr__(self, "choice", _nested(self.choice))
        object.__setattr__(self, "phases", _boundaries(self.phases))
        sizes = thresholds.shape(self.choice)
        if len(sizes) != 4 or not self.points:
            raise HeartError(
                f"the choice of points has shape {list(sizes)}: give [transformers][phases][layers][heads]"
            )
        if len(self.phases) != sizes[1] - 1 or sizes[1] > PHASE_LIMIT:
            raise HeartError(f"{len(self.phases)} boundaries for {sizes[1]} phases: give one fewer than phases")
        falling = all(a > b for a, b in zip(self.phases, self.phases[1:]))
        if not falling:
            raise HeartError(f"phase boundaries are {shown(list(self.phases))}: give noise levels above 0, descending")
        flat = _flat(self.choice)
        if min(flat) < 0 or max(flat) >= len(self.points):
            raise HeartError(f"a head chooses point {shown(max(flat))} of {len(self.points)}: count points from 0")

    def phase(self, sigma: float | None) -> int:
        """The phase at this noise level; the first where nothing tells."""
        return 0 if sigma is None else sum(sigma <= bound for bound in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        points = [point.to_dict() for point in self.points]
        return {"points": points, "choice": thresholds.plain(self.choice), "phases": list(self.phases)}

    @classmethod
    def from_dict(cls, data: Any) -> PointTable:
        """From what `to_dict` gave."""
        if not isinstance(data, dict) or set(data) != {"points", "choice", "phases"}:
            raise HeartError("a table of points is an object with points, choice and phases")
        if not isinstance(data["points"], list) or not isinstance(data["phases"], list):
            raise HeartError("points and phases of a table of points are lists")
        return cls(tuple(map(Point.from_dict, data["points"])), data["choice"], tuple(data["phases"]))


def _boundaries(values: Any) -> tuple[float, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise HeartError(f"a phase boundary is {shown(value)}: give noise levels above 0, descending")
    return tuple(map(float, values))


def _nested(value: Any, depth: int = 0) -> Any:
    if isinstance(value, list | tuple) and depth < 5:
        rows = tuple(_nested(x, depth + 1) for x in value)
        if len({thresholds.shape(row) for row in rows}) == 1:
            return rows
        raise HeartError("the choice of points is ragged or empty: give rows of one length")
    if isinstance(value, bool) or not isinstance(value, int):
        raise HeartError(f"the choice of points holds {shown(value)}: give whole numbers")
    return value


def _flat(value: Any) -> list[int]:
    return [x for row in value for x in _flat(row)] if isinstance(value, tuple) else [value]


# ---------------------------------------- what the engine asks


@dataclass(frozen=True)
class GroupSpec:
    """Heads of one layer that share a backbone and what becomes of the rest.

    Args:
        backbone, rest: theirs.
        orders: token orders of the model's heads under this backbone.
        heads: the model's numbers of these heads.
        tau: their thresholds.
    """

    backbone: Backbone
    rest: str
    orders: HeadOrders
    heads: tuple[int, ...]
    tau: tuple[float, ...]


class ModelPoints:
    """The operating points of every head of a model, as groups for each layer and phase."""

    def __init__(self, config: Any, transformers: int, layers: int, heads: int) -> None:
        self.config, self.sizes = config, (transformers, layers, heads)
        self.table: PointTable | None = config.points
        self._backbones = [config.backbone] if self.table is None else [point.backbone for point in self.table.points]
        self.set_thresholds(config.thresholds)
        if self.table is not None:
            self._check_table()
            self._kinds = [(_hashable(point.backbone), point.rest) for point in self.table.points]
        self._orders: dict[tuple, HeadOrders] = {}
        if self.table is None:
            self._head_orders(config.backbone, config.order)

    @property
    def warms_up(self) -> bool:
        """Whether any backbone looks at the last dense step."""
        return any(b.warms_up for b in self._backbones)

    def check_decision(self, policy: Any) -> None:
        """Raise where a decision on the device would have to take back what a backbone has learnt."""
        if policy.decide != "device":
            return
        for backbone in self._backbones:
            if backbone.learns or not callable(getattr(backbone.new_state(), "keep", None)):
                raise HeartError(
                    f"TMR(decide='device') cannot take back what {backbone.name} remembers of a call: use decide='host'"
                )

    def set_thresholds(self, value: Any) -> None:
        """Other thresholds from now on, in any form a config takes."""
        self._tau = [] if self.table is not None else thresholds.table(value, *self.sizes)
        self._groups: dict[tuple, tuple[GroupSpec, ...]] = {}

    def _check_table(self) -> None:
        assert self.table is not None
        transformers, layers, heads = self.sizes
        sizes = thresholds.shape(self.table.choice)
        if (sizes[0], *sizes[2:]) != (transformers, layers, heads):
            raise HeartError(
                f"operating points for {sizes[0]} transformers of {sizes[2]} layers and {sizes[3]} heads, but the "
                f"model has {transformers} of {layers} and {heads}: calibrate this model"
            )

    def _head_orders(self, backbone: Backbone, order: Any) -> HeadOrders:
        key = (backbone.block_tokens, order)
        if key not in self._orders:
            self._orders[key] = HeadOrders(order, *self.sizes, backbone.block_tokens)
        return self._orders[key]

    def phase(self, sigma: float | None) -> int:
        """The phase at a noise level."""
        return 0 if self.table is None else self.table.phase(sigma)

    @property
    def has_phases(self) -> bool:
        """Whether heads take other points as the noise goes down."""
        return self.table is not None and bool(self.table.phases)

    def groups(self, transformer: int, phase: int, layer: int) -> tuple[GroupSpec, ...]:
        """All heads of a layer in a phase, in groups."""
        key = (transformer, phase, layer)
        if key not in self._groups:
            made = self._shared(transformer, layer) if self.table is None else self._chosen(transformer, phase, layer)
            self._groups[key] = made
        return self._groups[key]

    def _shared(self, transformer: int, layer: int) -> tuple[GroupSpec, ...]:
        config = self.config
        orders = self._head_orders(config.backbone, config.order)
        heads = tuple(range(self.sizes[2]))
        return (GroupSpec(config.backbone, config.rest, orders, heads, self._tau[transformer][layer]),)

    def _chosen(self, transformer: int, phase: int, layer: int) -> tuple[GroupSpec, ...]:
        assert self.table is not None
        row = self.table.choice[transformer][phase][layer]
        chosen = [self.table.points[i] for i in row]
        alike: dict[tuple, list[int]] = {}
        for head, i in enumerate(row):
            alike.setdefault(self._kinds[i], []).append(head)
        groups = []
        for heads in alike.values():
            first = chosen[heads[0]]
            names = tuple(chosen[h].order if h in heads else token_order.RASTER for h in range(len(chosen)))
            orders = self._layer_orders(first.backbone, names, transformer, layer)
            tau = tuple(chosen[h].threshold for h in heads)
            groups.append(GroupSpec(first.backbone, first.rest, orders, tuple(heads), tau))
        return tuple(groups)

    def _layer_orders(self, backbone: Backbone, names: tuple[str, ...], transformer: int, layer: int) -> HeadOrders:
        """Orders of one layer's heads; all other layers are in raster."""
        if len(set(names)) == 1:
            return self._head_orders(backbone, names[0])
        transformers, layers, heads = self.sizes
        raster = (token_order.RASTER,) * heads
        rows = tuple(
            tuple(names if (t, n) == (transformer, layer) else raster for n in range(layers))
            for t in range(transformers)
        )
        return self._head_orders(backbone, rows)

    def dense_layer(self, transformer: int, phase: int, layer: int) -> bool:
        """Whether every head of the layer has a threshold of 1 or more."""
        if self.table is not None:
            points = self.table.points
            return all(points[i].threshold >= 1 for i in self.table.choice[transformer][phase][layer])
        return min(self._tau[transformer][layer]) >= 1


def _hashable(backbone: Backbone) -> Any:
    return (backbone.name, tuple(sorted((k, str(v)) for k, v in backbone.to_dict().items())))


def restrict(groups: Sequence[GroupSpec], heads: Sequence[int]) -> list[tuple[GroupSpec, list[int]]]:
    """The groups that the heads at hand belong to, each with the positions of its heads among them."""
    place = {head: i for i, head in enumerate(heads)}
    out = []
    for group in groups:
        mine = [(h, t) for h, t in zip(group.heads, group.tau) if h in place]
        if mine:
            numbers, tau = zip(*mine)
            spec = GroupSpec(group.backbone, group.rest, group.orders, numbers, tau)
            out.append((spec, [place[h] for h in numbers]))
    return out
