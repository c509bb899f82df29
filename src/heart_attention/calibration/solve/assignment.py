"""The exact solver's inside: a knapsack with one choice per head, closed by duality, exchanges and a Pareto DP.

    min Σ_i cost[i, x_i]   subject to   Σ_i gain[i, x_i] ≥ need

For any price λ ≥ 0, with r = cost - λ·gain - min_k(cost - λ·gain) ≥ 0,

    Σcost(x) = L(λ) + Σr(x) + λ·(Σgain(x) - need),

so L(λ) bounds every choice within the budget from below, and a candidate with r above UB - L is part of no better one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .problem import Problem, make_problem, moves
from .sums import exchange_four, through_sums

__all__ = ["Problem", "exact", "lagrangian", "make_problem", "rounding", "start"]

_WORK = (300_000, 5_000_000)  # states that the Pareto DP may look at, one attempt after the other: 0.1 s, 3 s


def start(problem: Problem) -> tuple[np.ndarray, float]:
    """A choice within the budget and the price λ* of gain; 0 where the budget does not bind."""
    cheapest = _argmin(problem.cost, problem.gain)
    return (cheapest, 0.0) if problem.feasible(cheapest) else _dual(problem, cheapest)


def exact(problem: Problem) -> tuple[np.ndarray, float, bool]:
    """The choice, its certified gap, and whether the optimum is proved."""
    x, price = start(problem)
    if price == 0.0 and problem.total_cost(x) == 0.0:  # every head has its least error: the budget does not bind
        return x, 0.0, True
    lower, r = lagrangian(problem, price)
    slack = rounding(problem, price)
    x = _exchange(problem, x, r, price)
    for work in _WORK:
        cost = problem.total_cost(x)
        gap = cost - lower
        if gap <= slack:
            return x, slack, True
        if work > _WORK[0] and gap <= 1e-9 * cost:  # as good as closed, and the rest is a matter of subset sums
            x = exchange_four(problem, x, r, price, lower + slack)
            return x, max(problem.total_cost(x) - lower, slack), problem.total_cost(x) - lower <= slack
        x, complete = through_sums(problem, x, r, price, gap + slack)
        if complete:
            return x, slack, True
        x, complete = _pareto(problem, x, r, price, gap + slack, work)
        if complete:
            return x, slack, True
        x = exchange_four(problem, _exchange(problem, x, r, price), r, price, lower + slack, tries=2)
    return x, max(problem.total_cost(x) - lower, 0.0) + slack, False


def _argmin(score: np.ndarray, tie: np.ndarray) -> np.ndarray:
    """Candidate with the least score, of those the one with the greatest `tie`."""
    least = score == score.min(1, keepdims=True)
    return np.where(least, tie, -np.inf).argmax(1)


def _dual(problem: Problem, low: np.ndarray) -> tuple[np.ndarray, float]:
    """Secants on the concave dual: the price λ* of gain, and a within-budget choice that is best at it."""
    high = _argmin(np.where(np.isfinite(problem.cost), -problem.gain, np.inf), -problem.cost)
    price, at_low, at_high = 0.0, problem.totals(low), problem.totals(high)
    for _ in range(500):  # every turn finds a new vertex of the dual's hull; a dozen is usual
        price = max((at_high[0] - at_low[0]) / (at_high[1] - at_low[1]), 0.0)
        x = _argmin(problem.cost - price * problem.gain, problem.gain)
        cost, gain = problem.totals(x)
        if cost - price * gain >= at_low[0] - price * at_low[1] - 1e-15 * (at_low[0] + price * abs(at_low[1])):
            break
        if gain >= problem.need:
            high, at_high = x, (cost, gain)
        else:
            low, at_low = x, (cost, gain)
    return _fill(problem, low, high), price


def _fill(problem: Problem, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """From `high`, take heads back to `low` while the budget holds: where many tie, far better than either."""
    x = high.copy()
    rows = np.nonzero(low != high)[0]
    less = problem.gain[rows, high[rows]] - problem.gain[rows, low[rows]]
    spare = problem.total_gain(high) - problem.need
    for i in np.argsort(-less, kind="stable"):
        if less[i] <= spare and problem.cost[rows[i], low[rows[i]]] <= problem.cost[rows[i], high[rows[i]]]:
            x[rows[i]] = low[rows[i]]
            spare -= less[i]
    return x if problem.feasible(x) else high


def lagrangian(problem: Problem, price: float) -> tuple[float, np.ndarray]:
    """L(λ), a lower bound up to `rounding`, and the reduced costs r [n, K] ≥ 0."""
    reduced = problem.cost - price * problem.gain
    least = reduced.min(1)
    return math.fsum([*least.tolist(), price * problem.need]), reduced - least[:, None]


def rounding(problem: Problem, price: float) -> float:
    """An upper bound of what rounding can have done to L(λ) and to a sum of reduced costs."""
    cost = np.where(np.isfinite(problem.cost), problem.cost, 0.0)
    least = (problem.cost - price * problem.gain).argmin(1)  # where the minimum was taken
    rows = np.arange(len(least))
    size = math.fsum(cost[rows, least] + price * np.abs(problem.gain[rows, least]))
    size += price * abs(problem.need)
    return 4 * float(np.finfo(np.float64).eps) * size


def _exchange(problem: Problem, x: np.ndarray, r: np.ndarray, price: float, work: int = 1_000_000) -> np.ndarray:
    """Improve a within-budget choice by changing one head, or two at once, while that helps."""
    x = x.copy()
    while work > 0:
        spare = problem.total_gain(x) - problem.need
        limit = math.fsum(r[np.arange(len(x)), x]) + price * spare  # what is left to win at this price
        head, candidate, cost, gain = moves(problem, x, r <= limit)
        work -= len(head) + len(x)
        picked = _best_one(cost, gain, spare)
        pair = _best_two(head, cost, gain, spare)
        if pair and (picked is None or cost[list(pair)].sum() < cost[picked]):
            change = list(pair)
        elif picked is not None:
            change = [picked]
        else:
            break
        trial = x.copy()
        trial[head[change]] = candidate[change]
        if not problem.feasible(trial) or problem.total_cost(trial) >= problem.total_cost(x):
            break
        x = trial
    return x


def _best_one(cost: np.ndarray, gain: np.ndarray, spare: float) -> int | None:
    within = np.where(gain >= -spare, cost, 0.0)
    return int(within.argmin()) if len(within) and within.min() < 0 else None


def _best_two(head: np.ndarray, cost: np.ndarray, gain: np.ndarray, spare: float) -> tuple[int, int] | None:
    """The pair with the least Δcost whose Δgains fit; a pair on one head is passed over."""
    if len(head) < 2:
        return None
    order = np.argsort(-gain, kind="stable")
    sorted_cost = cost[order]
    best = np.minimum.accumulate(sorted_cost)  # least Δcost among the greater gains
    where = np.maximum.accumulate(np.where(sorted_cost == best, np.arange(len(order)), 0))
    # Partners of a: every move whose gain is at least -spare - gain[a].
    count = np.searchsorted(-gain[order], gain + spare, side="right")
    partner = order[where[np.maximum(count - 1, 0)]]
    total = np.where((count > 0) & (head[partner] != head), cost + cost[partner], 0.0)
    a = int(total.argmin())
    return (a, int(partner[a])) if total[a] < 0 else None


def _pareto(
    problem: Problem, x: np.ndarray, r: np.ndarray, price: float, limit: float, work: int
) -> tuple[np.ndarray, bool]:
    """Go through all choices with Σr + λ·(ΣS - B) ≤ limit; the best of them, and whether none was left out.

    The heads with more than one candidate left are dealt into two halves, each is gone through by itself, and
    the two lists of states meet: n states a half stand for n² choices.
    """
    keep = r <= limit
    free = np.nonzero(keep.sum(1) > 1)[0]
    fixed = np.where(keep, r, np.inf).argmin(1)
    rest = np.setdiff1d(np.arange(len(x)), free)
    need = problem.need - math.fsum(problem.gain[rest, fixed[rest]])
    low = np.where(keep, problem.gain, np.inf)[free].min(1)
    high = np.where(keep, problem.gain, -np.inf)[free].max(1)
    order = np.argsort(low - high, kind="stable")  # wide heads first: the window closes quickly
    states = max(work // int(keep[free].sum()), 16)
    halves = []
    for part in (order[::2], order[1::2]):
        other = np.setdiff1d(order, part)
        window = _Window(need - high[other].sum(), need - low[other].sum(), price, limit)
        halves.append(_half(problem, free[part], keep, r, window, states))
    one, two = halves
    complete = one.complete and two.complete
    if not (len(one.gain) and len(two.gain)):
        return x, complete
    return _meet(problem, x, fixed, one, two, need, price), complete


@dataclass(frozen=True)
class _Window:
    """What a half must bring so that the other can still make it: gain from `low`; above `high` it pays λ."""

    low: float
    high: float
    price: float
    limit: float


@dataclass
class _Half:
    """States of one half of the heads: gain, Σr, and the predecessors that lead to each."""

    heads: np.ndarray
    gain: np.ndarray
    paid: np.ndarray
    back: list[tuple[np.ndarray, np.ndarray]]
    complete: bool = True

    def put(self, x: np.ndarray, state: int) -> None:
        """Write a state's candidates into x."""
        for head, (parent, candidate) in zip(self.heads[::-1], self.back[::-1]):
            x[head] = candidate[state]
            state = int(parent[state])


def _half(problem: Problem, heads: np.ndarray, keep: np.ndarray, r: np.ndarray, window: _Window, states: int) -> _Half:
    """All states of these heads that may be part of a better choice.

    One is dropped when another gains no less and costs no more, when the budget is out of its reach, or when
    what it must pay at least is above the limit.
    """
    low = np.array([problem.gain[h, keep[h]].min() for h in heads])
    high = np.array([problem.gain[h, keep[h]].max() for h in heads])
    low_after, high_after = (np.append(np.cumsum(v[::-1])[::-1], 0.0) for v in (low, high))
    eps = 1e-13 * (1.0 + len(r))  # sums here are rounded, the final check is not
    out = _Half(heads, np.zeros(1), np.zeros(1), [])
    for i, head in enumerate(heads):
        candidates = np.nonzero(keep[head])[0]
        gain = (out.gain[:, None] + problem.gain[head, candidates]).ravel()
        paid = (out.paid[:, None] + r[head, candidates]).ravel()
        surely = paid + window.price * np.maximum(gain + low_after[i + 1] - window.high - eps, 0.0)
        alive = np.nonzero((gain + high_after[i + 1] >= window.low - eps) & (surely <= window.limit))[0]
        alive = alive[_front(gain[alive], paid[alive] + window.price * gain[alive])]
        if len(alive) > states:
            out.complete = False
            alive = _thin(alive, surely[alive], gain[alive], states)
        out.gain, out.paid = gain[alive], paid[alive]
        out.back.append((alive // len(candidates), candidates[alive % len(candidates)]))
    return out


def _front(gain: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Indices of the states that no other dominates, ascending."""
    order = np.lexsort((cost, -gain))
    best = np.minimum.accumulate(cost[order])
    first = np.ones(len(order), bool)
    first[1:] = best[1:] < best[:-1]
    return np.sort(order[first])


def _thin(alive: np.ndarray, value: np.ndarray, gain: np.ndarray, states: int) -> np.ndarray:
    """Too many states: keep the cheapest, half of the number allowed, and as many spread over the gain."""
    cheap = np.argsort(value, kind="stable")[: states // 2]
    spread = np.argsort(gain, kind="stable")[np.linspace(0, len(gain) - 1, states - states // 2).astype(int)]
    return alive[np.union1d(cheap, spread)]


def _meet(
    problem: Problem, x: np.ndarray, fixed: np.ndarray, one: _Half, two: _Half, need: float, price: float
) -> np.ndarray:
    """The best pair of states that really keeps the budget (sums taken anew), if it is better than x."""
    order = np.argsort(-two.gain, kind="stable")
    cost = (two.paid + price * two.gain)[order]
    least = np.minimum.accumulate(cost)
    where = np.maximum.accumulate(np.where(cost == least, np.arange(len(cost)), 0))
    count = np.asarray(np.searchsorted(-two.gain[order], one.gain - need + 1e-13 * len(x), side="right"))
    partner = where[np.maximum(count - 1, 0)]
    total = np.where(count > 0, one.paid + price * one.gain + cost[partner], np.inf)
    best, best_cost = x, problem.total_cost(x)
    for state in np.argsort(total, kind="stable")[:16].tolist():  # the first within the budget is best, up to rounding
        trial = fixed.copy()
        one.put(trial, state)
        two.put(trial, int(order[partner[state]]))
        if count[state] and problem.feasible(trial) and (value := problem.total_cost(trial)) < best_cost:
            best, best_cost = trial, value
    return best
