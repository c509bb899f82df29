"""Dense or sparse: a pure function of config, shapes, densities and a recorded table of costs.

Every cost is `fixed + rate · work` seconds. Work: token pairs times head size for attention, the backbone's own
count for prediction. A table for each kind of device ships with the package and is the default, so that the same
calls run dense on all machines; one measured here (`heart tune-costs`) is used only when a config names it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..backbones.base import Backbone, pairs, tokens
from ..errors import HeartError, shown
from ..files import read_json

SCHEMA = 1
FOLDER = Path(__file__).parent / "cost_tables"
PARTS = ("dense", "kernel", "prediction", "drift", "first", "means")
DIGITS = 3  # densities are rounded to so many before they are compared
LIMIT = 1 << 20  # bytes of a table
LARGEST_HEAD = 1 << 16  # no head size comes near it
MOST = 1e6  # seconds, or seconds a unit of work: no cost comes near it


@dataclass(frozen=True)
class Line:
    """Seconds as a straight line in the amount of work."""

    fixed: float
    rate: float

    def __call__(self, work: float) -> float:
        """Seconds for so much work."""
        return self.fixed + self.rate * work


@dataclass(frozen=True)
class Costs:
    """What the parts of a call cost, for one backbone and head size.

    Args:
        dense, kernel: attention, by pairs times head size.
        prediction: masks and planning, by the backbone's work.
        drift: token means and decision, by numbers in q.
        first: a generation's first prediction (SVG2 clusters from random tokens then), by the backbone's work.
        means: means of the groups that are approximated, by numbers in q.
    """

    dense: Line
    kernel: Line
    prediction: Line
    drift: Line
    first: Line
    means: Line

    def sparse_seconds(
        self, shape: tuple[int, ...], cost: float, refresh: float, backbone: Backbone, rest: str
    ) -> float:
        """Expected time of a sparse call on q of this shape, when `refresh` of its masks are predicted anew."""
        predict = self.prediction(backbone.prediction_work(shape))
        extra = self.means(tokens(shape)) if rest != "drop" else 0.0
        return self.drift(tokens(shape)) + self.kernel(cost * pairs(shape)) + refresh * predict + extra

    def cold_seconds(self, refresh: float, rest: str) -> float:
        """What a call inside a generation takes beyond `sparse_seconds`, whose parts are measured in a loop.

        Between two calls of a layer everything else runs: what does not grow with the tokens takes twice as long there.
        """
        means = self.means.fixed if rest != "drop" else 0.0
        return self.drift.fixed + refresh * self.prediction.fixed + means

    def dense_seconds(self, shape: tuple[int, ...]) -> float:
        """Expected time of dense attention on q of this shape."""
        return self.dense(pairs(shape))

    def first_extra(self, shape: tuple[int, ...], backbone: Backbone) -> float:
        """What a generation's first prediction costs beyond a later one."""
        work = backbone.prediction_work(shape)
        later = self.prediction(work)
        return max(0.0, min(self.first(work), later * backbone.first_prediction_factor) - later)

    def cold_first_extra(self, shape: tuple[int, ...], backbone: Backbone) -> float:
        """The same inside a generation: here too what does not grow with the tokens takes twice as long."""
        extra = self.first_extra(shape, backbone)
        return extra + min(self.first.fixed, extra)


@dataclass(frozen=True)
class Share:
    """Heads of a layer that share a backbone and a rest, as the cost model sees them."""

    shape: tuple[int, ...]  # of their q, [B, h, N, D]
    backbone: Backbone
    rest: str
    cost: float  # mean share of keys computed, approximated ones included


@dataclass(frozen=True)
class CostTable:
    """Costs of one kind of device, by backbone and head size.

    Args:
        kind: "cpu-c", "cpu-portable", "cuda-sm80", ...
        origin: who measured it and how, or that it is reasoned.
        margin: by how much sparse must be quicker than dense on paper.
        entries: name of a backbone's costs -> head size -> costs. "block" and "cluster" serve backbones that are not named.
    """

    kind: str
    origin: str
    margin: float
    entries: dict[str, dict[int, Costs]]

    def costs(self, backbone: Backbone, dim: int) -> Costs:
        """The costs for a backbone at the head size nearest to `dim` on a logarithmic scale."""
        kind = "block" if backbone.block_tokens is not None else "cluster"
        names = (backbone.cost_name, backbone.name, kind)
        sizes = next(self.entries[name] for name in names if name in self.entries)
        return sizes[min(sizes, key=lambda size: (abs(math.log(size / dim)), size))]

    @functools.cached_property
    def digest(self) -> str:
        """A short name for exactly these numbers."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    def seconds(self, shares: Sequence[Share], refresh: float) -> tuple[float, float]:
        """(sparse, dense) expected time of one call on all these heads."""
        sparse = dense = 0.0
        for share in shares:
            costs = self.costs(share.backbone, share.shape[3])
            cost = round(share.cost, DIGITS)
            sparse += costs.sparse_seconds(share.shape, cost, refresh, share.backbone, share.rest)
            dense += costs.dense_seconds(share.shape)
        return sparse, dense

    def cold_seconds(self, shares: Sequence[Share], refresh: float) -> float:
        """What a sparse call on all these heads takes longer inside a generation."""
        return sum(self.costs(s.backbone, s.shape[3]).cold_seconds(refresh, s.rest) for s in shares)

    def pays(self, sparse: float, dense: float) -> bool:
        """Whether a sparse call is expected to be quicker than dense, by the table's margin."""
        return sparse * (1 + self.margin) < dense

    def first_pays(self, shares: Sequence[Share], refresh: float, calls: int) -> bool:
        """Whether what a first prediction costs more than a later one is won back over the `calls` to come."""
        sparse, dense = self.seconds(shares, refresh)
        sparse += self.cold_seconds(shares, refresh)
        extra = sum(self.costs(s.backbone, s.shape[3]).cold_first_extra(s.shape, s.backbone) for s in shares)
        return calls * (dense - sparse * (1 + self.margin)) > extra

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        entries = {
            name: {
                str(size): {p: [getattr(c, p).fixed, getattr(c, p).rate] for p in PARTS} for size, c in sizes.items()
            }
            for name, sizes in self.entries.items()
        }
        head = {"schema": SCHEMA, "kind": self.kind, "origin": self.origin, "margin": self.margin}
        return {**head, "entries": entries}

    @classmethod
    def from_dict(cls, data: Any) -> CostTable:
        """From what `to_dict` gave; anything odd is refused."""
        try:
            if (
                not isinstance(data, dict)
                or set(data) != {"schema", "kind", "origin", "margin", "entries"}
                or data["schema"] != SCHEMA
            ):
                raise HeartError("it is of another version")
            entries = {
                str(name): {_size(size): Costs(**{p: _line(parts[p]) for p in PARTS}) for size, parts in sizes.items()}
                for name, sizes in data["entries"].items()
            }
            table = cls(_text(data["kind"]), _text(data["origin"]), _number(data["margin"]), entries)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise HeartError(f"this is no table of costs ({shown(str(error), 80)}): run heart tune-costs") from None
        if not {"block", "cluster"} <= set(entries) or not all(entries.values()):
            raise HeartError("the table of costs lacks its entries for blocks and clusters: run heart tune-costs")
        return table


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise ValueError(f"{shown(value)} is no cost")
    return float(value)


def _size(text: str) -> int:
    size = int(text)
    if not 1 <= size <= LARGEST_HEAD:
        raise ValueError(f"{shown(text)} is no head size")
    return size


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
        raise ValueError(f"{shown(value)} is no text")
    return value


def _line(value: Any) -> Line:
    fixed, rate = value
    return Line(_number(fixed), _number(rate))


# ---------------------------------------- finding a table


def load(path: str) -> CostTable:
    """The table in a file of `heart tune-costs`."""
    return CostTable.from_dict(read_json(path, limit=LIMIT))


@functools.cache
def shipped(kind: str) -> CostTable:
    """The table that ships for this kind of device."""
    known = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}  # a kind may come from a file: it is no path
    if kind not in known:
        raise HeartError(f"there is no table of costs for {shown(kind)}: known are {', '.join(known)}")
    return load(str(known[kind]))


def kind_of(device: torch.device, kernel: str) -> str:
    """The kind of device that a table is for."""
    if device.type == "cpu":
        return "cpu-c" if kernel == "cpu" else "cpu-portable"
    if device.type == "cuda" and torch.version.hip is None:
        major, _ = torch.cuda.get_device_capability(device)
        return "cuda-sm100" if major >= 10 else "cuda-sm90" if major == 9 else "cuda-sm80"
    return "cuda-sm80"  # reasoned for nothing else: the slowest of the GPUs that have one
