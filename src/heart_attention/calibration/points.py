"""Operating points that calibration may choose from: lists by name or from a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..backbones.base import Backbone
from ..errors import HeartError
from ..files import read_json
from ..online.points import Point

PAPER = (0.85, 0.9, 0.95)  # the paper's three candidates
THRESHOLDS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


def points_of(
    backbone: Backbone, thresholds: Sequence[float], rest: str = "drop", order: str = "raster"
) -> tuple[Point, ...]:
    """Points of one backbone that differ in the threshold."""
    return tuple(Point(backbone, float(t), rest, order) for t in thresholds)


def read_points(path: str | os.PathLike) -> tuple[Point, ...]:
    """Points from a JSON file: a list of objects with backbone, threshold, rest and order.

    `threshold` may be a list, rest and order may be left out; a backbone may be its name.
    """
    data = read_json(path)
    rows = data.get("points") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise HeartError(f"{path} holds no operating points: give a JSON list of objects with backbone and threshold")
    return distinct([point for row in rows for point in _expanded(row)])


def _expanded(row: dict[str, Any]) -> list[Point]:
    backbone, threshold = row.get("backbone"), row.get("threshold")
    named = {"name": backbone} if isinstance(backbone, str) else backbone
    taus = threshold if isinstance(threshold, list) else [threshold]
    return [
        Point.from_dict({"rest": "drop", "order": "raster", **row, "backbone": named, "threshold": t}) for t in taus
    ]


def distinct(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points without repetitions, in their order."""
    known: dict[str, Point] = {}
    for point in points:
        known.setdefault(str(point.to_dict()), point)
    return tuple(known.values())
