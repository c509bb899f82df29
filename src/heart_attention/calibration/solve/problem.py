"""The assignment as a knapsack with one choice per head: min Σ cost, Σ gain ≥ need."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_GRID, _NEAR = 20_000, 1e-6  # so many different gains may lie on a grid; how near to whole numbers they must be


@dataclass(frozen=True)
class Problem:
    """min Σ cost, Σ gain ≥ need. Costs are relative to each head's least: no outlier drowns the others."""

    cost: np.ndarray  # [n, K] ≥ 0, inf where the candidate is ruled out
    gain: np.ndarray  # [n, K]
    need: float
    unit: float = 0.0  # gains and need are whole numbers of it; 0 where they are as they are

    def total_cost(self, x: np.ndarray) -> float:
        """Σ cost of a choice, correctly rounded."""
        return math.fsum(self.cost[np.arange(len(x)), x].tolist())

    def total_gain(self, x: np.ndarray) -> float:
        """Σ gain of a choice, correctly rounded."""
        return math.fsum(self.gain[np.arange(len(x)), x].tolist())

    def totals(self, x: np.ndarray) -> tuple[float, float]:
        """Both sums."""
        return self.total_cost(x), self.total_gain(x)

    def feasible(self, x: np.ndarray) -> bool:
        """Whether a choice keeps the budget."""
        return self.total_gain(x) >= self.need


def make_problem(E: np.ndarray, gain: np.ndarray, need: float) -> Problem:
    """The problem without dominated candidates, costs relative to each head's least, gains in whole units if they can."""
    cost = E - E.min(1, keepdims=True)
    unit = _unit(gain)
    if unit:
        gain, need = np.rint(gain / unit), float(math.ceil(need / unit - _NEAR))
    return Problem(np.where(_dominated(cost, gain), np.inf, cost), gain, need, unit)


def _unit(gain: np.ndarray) -> float:
    """What all gains are whole multiples of, or 0: sums of whole numbers are exact, and equal ones are seen to be equal."""
    values = np.abs(gain).ravel()
    values = values[np.unique(np.round(values, 12), return_index=True)[1]]  # not rounded: remainders enlarge errors
    if len(values) > _GRID:
        return 0.0
    unit = 0.0
    for value in values.tolist():
        unit = _common(unit, value)
        if unit < 1e-6 and unit:
            return 0.0
    return unit if unit and np.abs(gain / unit - np.rint(gain / unit)).max() < _NEAR else 0.0


def _common(a: float, b: float) -> float:
    """The greatest common measure of two numbers, remainders below 1e-9 taken for none."""
    while b > 1e-9:
        a, b = b, a % b if a % b < b - 1e-9 else 0.0
    return a


def _dominated(cost: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """bool [n, K]: another candidate of the head costs no more and gains no less (of equals one stays)."""
    index = np.broadcast_to(np.arange(cost.shape[1]), cost.shape)
    order = np.lexsort((index, -gain, cost), axis=1)
    sorted_gain = np.take_along_axis(gain, order, 1)
    best_before = np.maximum.accumulate(sorted_gain, 1)[:, :-1]
    out = np.zeros(cost.shape, bool)
    np.put_along_axis(out, order[:, 1:], sorted_gain[:, 1:] <= best_before, 1)
    return out


def moves(problem: Problem, x: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, ...]:
    """All changes of one head among the kept candidates: head, candidate, Δcost, Δgain."""
    head, candidate = np.nonzero(keep & (np.arange(keep.shape[1]) != x[:, None]))
    now = x[head]
    return (
        head,
        candidate,
        problem.cost[head, candidate] - problem.cost[head, now],
        problem.gain[head, candidate] - problem.gain[head, now],
    )
