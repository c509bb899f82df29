"""Thresholds of every head: one number, a table, or a calibration, all read in one way."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..errors import HeartError, shown

Table = list[list[tuple[float, ...]]]  # [transformers][layers], a number for each head


class ThresholdSource:
    """What a config's thresholds can do; plain numbers know nothing of a model, calibrations override."""

    thresholds: Any

    def check(self, transformer: Any) -> None:
        """Raise if these thresholds were made for another model."""

    def warnings_for(self, **run: Any) -> list[str]:
        """Sentences about a run that differs from what they were made for."""
        return []

    def of_transformers(self, count: int) -> list[ThresholdSource]:
        """What each of a pipeline's transformers is given; refuses what is not for all of them."""
        return [self] * count

    def head_costs(self) -> Any:
        """What each head costs, [L, H], where that was measured; else None."""
        return None


class PlainThresholds(ThresholdSource):
    """Numbers that a user wrote down."""

    def __init__(self, thresholds: Any) -> None:
        self.thresholds = thresholds


def source(thresholds: Any) -> ThresholdSource:
    """Whatever a config holds, as a source."""
    return thresholds if isinstance(thresholds, ThresholdSource) else PlainThresholds(thresholds)


def freeze(value: Any) -> Any:
    """Numbers as nested tuples (so that a config is hashable and cannot change); a calibration as it is."""
    if isinstance(value, ThresholdSource):
        return value
    if hasattr(value, "tolist"):  # numpy and torch
        value = value.tolist()
    if isinstance(value, list | tuple) and value and all(isinstance(x, ThresholdSource) for x in value):
        from ..calibration.experts import Experts

        return Experts(tuple(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _rows(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise HeartError(f"a threshold is {shown(value)}: give a number above 0, [H], [L, H] or a Calibration")
    if not 0 < value <= sys.float_info.max:  # also refuses NaN, and integers beyond any float
        raise HeartError(f"a threshold is {shown(value)}: it must be above 0 and finite (1 or more means dense)")
    return float(value)


def _rows(value: Sequence[Any], depth: int = 0) -> tuple:
    if depth > 3:
        raise HeartError("the thresholds are nested too deeply: give a number, [H], [L, H] or [transformers, L, H]")
    rows = tuple(_rows(x, depth + 1) if isinstance(x, list | tuple) else freeze(x) for x in value)
    if len({shape(row) for row in rows}) != 1:
        raise HeartError("the thresholds are ragged or empty: give a number, [H], or [L, H] with rows of one length")
    return rows


def shape(value: Any) -> tuple[int, ...]:
    """Sizes of nested tuples; () for a number."""
    return (len(value), *shape(value[0])) if isinstance(value, tuple) else ()


def plain(value: Any) -> Any:
    """As JSON types: a calibration as its numbers."""
    if isinstance(value, ThresholdSource):
        value = freeze(value.thresholds)
    return [plain(x) for x in value] if isinstance(value, tuple) else value


def table(thresholds: Any, transformers: int, layers: int, heads: int) -> Table:
    """Thresholds of every head, [transformers][layers] rows of `heads` numbers, from any of the accepted forms."""
    value = freeze(source(thresholds).thresholds)
    sizes = shape(value)
    if sizes == (heads,):
        value = (value,) * layers
    elif sizes == ():
        value = ((value,) * heads,) * layers
    elif sizes not in ((layers, heads), (transformers, layers, heads)):
        have = " x ".join(map(str, sizes))
        raise HeartError(
            f"the thresholds have shape [{have}] but the model has {layers} layers of {heads} heads:"
            f" give one number, [{heads}] or [{layers} x {heads}]"
        )
    return [list(rows) for rows in (value if len(sizes) == 3 else (value,) * transformers)]
