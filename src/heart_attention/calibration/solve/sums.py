"""Where sums decide: gains that are whole numbers, and thousands of candidates on one line."""

from __future__ import annotations

import math

import numpy as np

from .problem import Problem
from .problem import moves as moves_of

_SUMS = 400_000_000  # bytes and steps that going through all sums of whole gains may take
_EACH = 1_300  # moves of each of four parts of the heads that are tried together


def through_sums(problem: Problem, x: np.ndarray, r: np.ndarray, price: float, limit: float) -> tuple[np.ndarray, bool]:
    """As the Pareto DP where gains are whole numbers: the least Σr for every sum of gains, if there are not too many."""
    if not problem.unit or price <= 0:
        return x, False
    base = r.argmin(1)
    rows = np.arange(len(base))
    keep = (r <= limit) & (np.arange(r.shape[1]) != base[:, None])
    heads = np.nonzero(keep.any(1))[0]
    steps = problem.gain - problem.gain[rows, base][:, None]  # of each candidate against the base
    down, up = (_reach(sign * steps, keep, r, limit) for sign in (-1, 1))
    size, zero = down + up + 1, down
    if len(heads) * size > _SUMS:
        return x, False
    paid, chosen = np.full(size, np.inf), np.zeros((len(heads), size), np.uint8 if r.shape[1] < 255 else np.uint16)
    paid[zero] = 0.0
    for i, head in enumerate(heads):
        before = paid.copy()
        for k in np.nonzero(keep[head])[0]:
            step = int(steps[head, k])
            into, of = slice(max(step, 0), size + min(step, 0)), slice(max(-step, 0), size - max(step, 0))
            better = before[of] + r[head, k] < paid[into]
            paid[into][better] = (before[of] + r[head, k])[better]
            chosen[i, into][better] = k + 1
    least = int(problem.need - problem.total_gain(base)) + zero  # the first sum that keeps the budget
    return _best_sum(problem, x, base, heads, steps, paid, chosen, max(least, 0), price), True


def _reach(steps: np.ndarray, keep: np.ndarray, r: np.ndarray, limit: float) -> int:
    """How far the sum of gains can move up: free moves as they are, dear ones as long as Σr stays within the limit."""
    free = keep & (r <= 1e-9 * limit)
    dear = keep & ~free & (steps > 0)
    whole = np.where(keep, np.maximum(steps, 0), 0).max(1).sum()
    paid = limit * float((steps[dear] / r[dear]).max()) if dear.any() else 0.0
    return int(min(whole, np.where(free, np.maximum(steps, 0), 0).max(1).sum() + math.ceil(paid)))


def _best_sum(
    problem: Problem, x: np.ndarray, base: np.ndarray, heads: np.ndarray, steps: np.ndarray, paid: np.ndarray,
    chosen: np.ndarray, least: int, price: float,
) -> np.ndarray:  # fmt: skip
    """The choice behind the cheapest sum from `least` on, if it is better than x."""
    if least >= len(paid):
        return x
    at = least + int((paid[least:] + price * np.arange(len(paid) - least)).argmin())
    if not math.isfinite(paid[at]):
        return x
    trial = base.copy()
    for i in range(len(heads) - 1, -1, -1):
        if chosen[i, at]:
            trial[heads[i]] = chosen[i, at] - 1
            at -= int(steps[heads[i], trial[heads[i]]])
    better = problem.feasible(trial) and problem.total_cost(trial) < problem.total_cost(x)
    return trial if better else x


def exchange_four(
    problem: Problem, x: np.ndarray, r: np.ndarray, price: float, aim: float, tries: int = 6
) -> np.ndarray:
    """Improve a choice by changing up to four heads at once, until it costs no more than `aim` or tries are used up.

    Where thousands of candidates lie on one line, the best choice is a matter of subset sums: 10¹² of them come close.
    """
    rng = np.random.default_rng(0)
    for _ in range(tries):
        if problem.total_cost(x) <= aim:
            break
        spare = problem.total_gain(x) - problem.need
        limit = math.fsum(r[np.arange(len(x)), x]) + price * spare
        moves = moves_of(problem, x, r <= limit)
        one, other = _pairs(moves, (0, 1), rng), _pairs(moves, (2, 3), rng)
        trial = _with_moves(x, moves, _meeting(one, other, spare))
        if problem.feasible(trial) and problem.total_cost(trial) < problem.total_cost(x):
            x = trial
    return x


def _pairs(moves: tuple[np.ndarray, ...], part: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Two moves of different heads, or one or none: numbers of both (-1 is none), Δcost, Δgain."""
    head, _, cost, gain = moves
    sides = []
    for number in part:  # heads in four parts, so that no two moves are of one head
        mine = np.nonzero(head % 4 == number)[0]
        few = rng.choice(mine, min(len(mine), _EACH), replace=False) if len(mine) else mine
        sides.append(np.append(few, -1))
    value = [np.append(column, 0.0) for column in (cost, gain)]  # -1 finds the 0 at the end
    one, two = (side.ravel() for side in np.meshgrid(*sides, indexing="ij"))
    return one, two, value[0][one] + value[0][two], value[1][one] + value[1][two]


def _meeting(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...], spare: float) -> list[int]:
    """The moves of the two pairs with the least Δcost together whose Δgains fit; none if nothing helps."""
    order = np.argsort(-b[3], kind="stable")
    sorted_cost = b[2][order]
    least = np.minimum.accumulate(sorted_cost)
    where = np.maximum.accumulate(np.where(sorted_cost == least, np.arange(len(order)), 0))
    count = np.searchsorted(-b[3][order], a[3] + spare, side="right")
    partner = where[np.maximum(count - 1, 0)]
    total = np.where(count > 0, a[2] + sorted_cost[partner], np.inf)
    i = int(total.argmin())
    j = order[partner[i]]
    return [int(m) for m in (a[0][i], a[1][i], b[0][j], b[1][j]) if m >= 0] if total[i] < 0 else []


def _with_moves(x: np.ndarray, moves: tuple[np.ndarray, ...], picked: list[int]) -> np.ndarray:
    trial = x.copy()
    trial[moves[0][picked]] = moves[1][picked]
    return trial
