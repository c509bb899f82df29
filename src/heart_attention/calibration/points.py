"""Operating points that calibration may choose from: lists by name or from a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import backbones
from ..backbones.base import Backbone
from ..errors import HeartError
from ..files import read_json
from ..online.points import Point, PointTable

if TYPE_CHECKING:
    from .file import Calibration

PAPER = (0.85, 0.9, 0.95)  # the paper's three candidates
THRESHOLDS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


def points_of(
    backbone: Backbone, thresholds: Sequence[float], rest: str = "drop", order: str = "raster"
) -> tuple[Point, ...]:
    """Points of one backbone that differ in the threshold."""
    return tuple(Point(backbone, float(t), rest, order) for t in thresholds)


def read_points(path: str | os.PathLike, by_name: Callable[[str], Backbone] = backbones.by_name) -> tuple[Point, ...]:
    """Points from a JSON file: a list of objects with backbone, threshold, rest and order.

    `threshold` may be a list, rest and order may be left out. A backbone may be a name alone: `by_name` then says its
    settings.
    """
    data = read_json(path)
    rows = data.get("points") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise HeartError(f"{path} holds no operating points: give a JSON list of objects with backbone and threshold")
    return distinct([point for row in rows for point in _expanded(row, by_name)])


def _expanded(row: dict[str, Any], by_name: Callable[[str], Backbone]) -> list[Point]:
    backbone, threshold = row.get("backbone"), row.get("threshold")
    settings = by_name(backbone).to_dict() if isinstance(backbone, str) else backbone
    taus = threshold if isinstance(threshold, list) else [threshold]
    return [Point.from_dict({**row, "backbone": settings, "threshold": tau}) for tau in taus]


def distinct(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points without repetitions, in their order."""
    known: dict[str, Point] = {}
    for point in points:
        known.setdefault(str(point.to_dict()), point)
    return tuple(known.values())


def point_table(calibrations: Sequence[Calibration]) -> PointTable:
    """The choice of one calibration a transformer as a config holds it.

    Phases of both are cut at the boundaries of either; an order for every head becomes points of their own.
    """
    points: dict[str, Point] = {}
    places: dict[str, int] = {}

    def place(point: dict[str, Any], layer: int, head: int) -> int:
        order = point["order"] if isinstance(point["order"], str) else point["order"][layer][head]
        key = json.dumps({**point, "order": order}, sort_keys=True)
        if key not in places:
            places[key], points[key] = len(places), Point.from_dict({**point, "order": order})
        return places[key]

    bounds = sorted({sigma for c in calibrations for sigma in c.phases.get("sigmas", [])}, reverse=True)
    choice = []
    for calibration in calibrations:
        phases = []
        for level in [*bounds, 0.0]:  # the level at which a phase ends lies in it
            phase = sum(level < sigma for sigma in calibration.phases.get("sigmas", []))
            rows = calibration.choice if calibration.choice.ndim == 2 else calibration.choice[phase]
            phases.append(
                [[place(calibration.points[k], l, h) for h, k in enumerate(row)] for l, row in enumerate(rows.tolist())]
            )
        choice.append(phases)
    return PointTable(tuple(points.values()), tuple(choice), tuple(bounds))
