"""The best choice of points for another budget, from a calibration's stored tables: no model is needed."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import HeartError
from .solve.solver import Budget, solve, solve_budget
from .solve.times import TimeModel, table_for

if TYPE_CHECKING:
    from .file import Calibration


def solved(calibration: Calibration, asked: Budget, method: str, cost_table: str | os.PathLike | None) -> Calibration:
    """The calibration with another choice; see `Calibration.resolve`."""
    if calibration.E is None:
        raise HeartError("the calibration has no error and sparsity tables: there is nothing to solve again")
    if asked.kind == "time":
        return _in_time(calibration, asked, method, cost_table)
    taus = [point["threshold"] for point in calibration.points]
    result = solve_budget(calibration.E, calibration.S, taus, asked, method, shares=calibration.shares)
    return calibration.with_choice(result.choice, result.to_dict(), asked)


def _in_time(calibration: Calibration, asked: Budget, method: str, cost_table: str | os.PathLike | None) -> Calibration:
    model, times = _times(calibration, cost_table)
    _refuse_too_quick(calibration, model, times, asked)
    result = solve(
        calibration.E, calibration.S, thresholds=[point["threshold"] for point in calibration.points], method=method,
        times=times, max_time=model.limit(asked.value), shares=calibration.shares,
    )  # fmt: skip
    again = calibration.with_choice(result.choice, result.to_dict(), asked)
    return replace(again, extra={**calibration.extra, "time": model.to_dict()})


def _refuse_too_quick(calibration: Calibration, model: TimeModel, times: np.ndarray, asked: Budget) -> None:
    weights = None if calibration.shares is None else np.broadcast_to(calibration.shares, calibration.choice.shape)
    model.refuse_too_quick(asked.value, float(np.average(times.min(-1), weights=weights)))


def _times(calibration: Calibration, cost_table: str | os.PathLike | None) -> tuple[TimeModel, np.ndarray]:
    """The model of times with a table's digest, and the time of every head and point."""
    if "time" not in calibration.extra or calibration.cost is None:
        raise HeartError("the calibration was not made for a budget of time: calibrate with --budget time=T")
    model = TimeModel.from_dict(calibration.extra["time"])
    table = table_for(model.kind, None if cost_table is None else os.fspath(cost_table))
    fixed, rate = model.lines(calibration.points, table).T
    return replace(model, kind=table.kind, digest=table.digest), fixed + rate * calibration.cost
