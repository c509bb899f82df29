"""One threshold candidate per head, least total error, under one budget: solved exactly, with a certified
bound.

    min Σ_i E[i, x_i]   subject to   mean_i S[i, x_i] ≥ S_min    (or mean threshold ≤ τ_max)

Raw errors are 1e-9 … 1e-5, below the absolute tolerances of the usual ILP solvers, which then stop far from
the optimum and call it optimal. So this is an own solver. For any λ ≥ 0, with r = E - λS - min_k(E - λS) ≥ 0,

    ΣE(x) = L(λ) + Σr(x) + λ·(ΣS(x) - B)       hence   ΣE(x) ≥ L(λ) for every x within the budget.

λ is found by secants on the dual; exchanging one or two heads' candidates gives a good x; a candidate with r
above UB - L cannot be part of a better one and is dropped; the few that remain are gone through by a Pareto
DP. What is proved is in the result: `objective - gap` is a lower bound whatever happened on the way.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import HeartError

TOLERANCE = 1e-9  # on the mean sparsity (or threshold): the shared threshold itself is exactly tight
METHODS = ("exact", "dp", "cbc")
_WORK = (300_000, 5_000_000)  # states that the Pareto DP may look at, one attempt after the other: 0.1 s, 3 s
_CELLS = 50_000_000  # up to so many additions the mean-threshold budget goes to the integer DP


@dataclass(frozen=True)
class Budget:
    """What a solution must keep to: `kind` is "shared" (as sparse as one shared τ), "sparsity" or
    "threshold"."""

    kind: str = "shared"
    value: float = 0.9

    def __post_init__(self) -> None:
        if self.kind not in ("shared", "sparsity", "threshold"):
            raise HeartError(f"a budget is shared=τ, sparsity=S or threshold=τ, not {self.kind!r}")
        if not (isinstance(self.value, int | float) and math.isfinite(self.value) and 0 <= self.value <= 1):
            raise HeartError(f"the budget {self.kind}={self.value} is outside 0 … 1")

    @classmethod
    def parse(cls, text: str | float | Budget) -> Budget:
        """From "shared=0.9", "sparsity=0.6", "threshold=0.9", or a bare number, which is a sparsity."""
        if isinstance(text, Budget):
            return text
        kind, _, value = str(text).replace(":", "=").rpartition("=")
        try:
            return cls(kind or "sparsity", float(value))
        except ValueError as error:
            raise (
                error
                if isinstance(error, HeartError)
                else HeartError(
                    f"the budget {text!r} is not shared=τ, sparsity=S or threshold=τ with a number from 0 to 1"
                )
            ) from None

    def __str__(self) -> str:
        return f"{self.kind}={self.value:g}"


@dataclass(frozen=True)
class Result:
    """A chosen candidate per head and what is known about it.

    Args:
        choice: candidate index of every head, shaped as the tables without their last axis.
        objective: Σ E of the choice.  bound: certified lower bound of any choice within the budget.
        gap: objective - bound, computed without cancellation; 0 up to rounding when the optimum is proved.
        sparsity: mean S of the choice.  thresholds: its thresholds, if candidates' thresholds were given.
        budget: what was asked for.  proven: whether the optimum was proved (else only the bound holds).
        seconds: time taken; not part of a comparison.
    """

    choice: np.ndarray
    objective: float
    bound: float
    gap: float
    sparsity: float
    thresholds: np.ndarray | None
    method: str
    budget: dict[str, float]
    proven: bool
    seconds: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """What a calibration file records: figures only, nothing that differs between equal runs."""
        keep = ("method", "budget", "objective", "bound", "gap", "sparsity", "proven")
        out = {name: getattr(self, name) for name in keep}
        if self.thresholds is not None:
            out["mean_threshold"] = math.fsum(self.thresholds.ravel()) / self.thresholds.size
        return out


@dataclass(frozen=True)
class _Problem:
    """min Σ cost, Σ gain ≥ need. Costs are relative to each head's least: no outlier drowns the others."""

    cost: np.ndarray  # [n, K] ≥ 0, inf where the candidate is ruled out
    gain: np.ndarray  # [n, K]
    need: float

    def total_cost(self, x: np.ndarray) -> float:
        return math.fsum(self.cost[np.arange(len(x)), x].tolist())

    def total_gain(self, x: np.ndarray) -> float:
        return math.fsum(self.gain[np.arange(len(x)), x].tolist())

    def totals(self, x: np.ndarray) -> tuple[float, float]:
        return self.total_cost(x), self.total_gain(x)

    def feasible(self, x: np.ndarray) -> bool:
        return self.total_gain(x) >= self.need


# ---------------------------------------------------------------- the public function


def solve(
    E: Any,
    S: Any,
    min_sparsity: float | None = None,
    max_mean_threshold: float | None = None,
    thresholds: Any = None,
    shared: float | None = None,
    method: str = "exact",
    tolerance: float = TOLERANCE,
) -> Result:
    """Choose one candidate per head: least Σ E within the budget.

    Args:
        E, S: errors and realised sparsities, [heads, candidates] or [layers, heads, candidates].
        min_sparsity: least mean S.  max_mean_threshold: greatest mean threshold.  shared: at least the mean S
        of the
            candidate with this threshold (0.9 when no budget is given).
        thresholds: the candidates' thresholds, [candidates] or one row a head.
        method: "exact" (own solver, certified), "cbc" (PuLP with CBC as in the paper, scaled and verified) or
            "dp" (integer dynamic programme; mean-threshold budget only).
    """
    start = time.perf_counter()
    E, S, tau, shape = _checked(E, S, thresholds)
    if method not in METHODS:
        raise HeartError(f"the solver's method is one of {', '.join(METHODS)}, not {method!r}")
    given = [b for b in (min_sparsity, max_mean_threshold, shared) if b is not None]
    if len(given) > 1:
        raise HeartError("give one budget only: min_sparsity, max_mean_threshold or shared")
    if max_mean_threshold is not None:
        x, gap, proven, budget, used = _by_threshold(E, tau, max_mean_threshold, tolerance, method)
    else:
        if method == "dp":
            raise HeartError("the integer DP serves the mean-threshold budget only: use method 'exact' or 'cbc'")
        budget = _sparsity_budget(S, tau, min_sparsity, shared)
        problem = _problem(E, S, len(E) * (budget["min_sparsity"] - tolerance))
        _refuse_infeasible(problem, "sparsity", budget["min_sparsity"], 1.0)
        x, gap, proven = _run(problem, method)
        used = method
    rows = np.arange(len(x))
    objective = math.fsum(E[rows, x])
    return Result(
        choice=x.reshape(shape),
        objective=objective,
        bound=objective - gap,
        gap=gap,
        sparsity=math.fsum(S[rows, x]) / len(x),
        thresholds=None if tau is None else tau[rows, x].reshape(shape),
        method=used,
        budget=budget,
        proven=proven,
        seconds=time.perf_counter() - start,
    )


def solve_budget(E: Any, S: Any, thresholds: Any, budget: Budget | str | float, method: str = "exact") -> Result:
    """`solve` with a `Budget`."""
    budget = Budget.parse(budget)
    key = {"shared": "shared", "sparsity": "min_sparsity", "threshold": "max_mean_threshold"}[budget.kind]
    return solve(E, S, thresholds=thresholds, method=method, **{key: budget.value})


def reachable(S: Any) -> tuple[float, float]:
    """Least and greatest mean sparsity that these candidates can give."""
    S = np.asarray(S, dtype=np.float64).reshape(-1, np.shape(S)[-1])
    return math.fsum(S.min(1)) / len(S), math.fsum(S.max(1)) / len(S)


# ---------------------------------------------------------------- inputs and budgets


def _table(values: Any, name: str) -> np.ndarray:
    try:
        table = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise HeartError(f"{name} is not a rectangular table of numbers") from None
    if table.ndim not in (2, 3) or table.size == 0:
        raise HeartError(f"{name} has shape {table.shape}, not [heads, candidates] or [layers, heads, candidates]")
    if not np.isfinite(table).all():
        raise HeartError(f"{name} holds {int((~np.isfinite(table)).sum())} numbers that are not finite: measure again")
    return table


def _checked(E: Any, S: Any, thresholds: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, tuple[int, ...]]:
    E, S = _table(E, "the error table"), _table(S, "the sparsity table")
    if E.shape != S.shape:
        raise HeartError(f"the error table's shape {E.shape} differs from the sparsity table's {S.shape}")
    shape, count = E.shape[:-1], E.shape[-1]
    if not (S >= 0).all() or not (S <= 1).all():
        raise HeartError(f"sparsities must lie in 0 … 1, not {S.min():g} … {S.max():g}")
    tau = None
    if thresholds is not None:
        try:
            tau = np.asarray(thresholds, dtype=np.float64)
            tau = np.broadcast_to(tau, E.shape).reshape(-1, count)
        except ValueError:
            raise HeartError(f"thresholds of shape {np.shape(thresholds)} do not fit tables of {E.shape}") from None
        if not np.isfinite(tau).all():
            raise HeartError("the candidates' thresholds hold a number that is not finite")
    return E.reshape(-1, count), S.reshape(-1, count), tau, shape


def _sparsity_budget(
    S: np.ndarray, tau: np.ndarray | None, min_sparsity: float | None, shared: float | None
) -> dict[str, float]:
    if min_sparsity is not None:
        if not math.isfinite(min_sparsity):
            raise HeartError(f"the budget min_sparsity={min_sparsity} is not a finite number")
        return {"min_sparsity": float(min_sparsity)}
    shared = 0.9 if shared is None else float(shared)
    if tau is None:
        raise HeartError("a budget is missing: give min_sparsity, or the candidates' thresholds to match a shared one")
    at = np.isclose(tau, shared, rtol=0, atol=1e-9)
    if not at.any(1).all():
        known = ", ".join(f"{t:g}" for t in np.unique(tau)[:20])
        raise HeartError(f"no candidate has the shared threshold {shared:g} to match: candidates are {known}")
    column = at.argmax(1)
    return {"shared": shared, "min_sparsity": math.fsum(S[np.arange(len(S)), column]) / len(S)}


def _problem(E: np.ndarray, gain: np.ndarray, need: float) -> _Problem:
    cost = E - E.min(1, keepdims=True)
    return _Problem(np.where(_dominated(cost, gain), np.inf, cost), gain, need)


def _dominated(cost: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """bool [n, K]: another candidate of the head costs no more and gains no less (of equals one stays)."""
    index = np.broadcast_to(np.arange(cost.shape[1]), cost.shape)
    order = np.lexsort((index, -gain, cost), axis=1)
    sorted_gain = np.take_along_axis(gain, order, 1)
    best_before = np.maximum.accumulate(sorted_gain, 1)[:, :-1]
    out = np.zeros(cost.shape, bool)
    np.put_along_axis(out, order[:, 1:], sorted_gain[:, 1:] <= best_before, 1)
    return out


def _refuse_infeasible(problem: _Problem, what: str, asked: float, sign: float) -> None:
    best = problem.gain.argmax(1)
    if problem.feasible(best):
        return
    reach = sign * problem.total_gain(best) / len(best)
    end, relation = ("greatest", "at least") if sign > 0 else ("least", "at most")
    raise HeartError(
        f"no choice of candidates reaches a mean {what} of {relation} {asked:.9g}: the {end} reachable is {reach:.9g}"
    )


def _run(problem: _Problem, method: str) -> tuple[np.ndarray, float, bool]:
    return _cbc(problem) if method == "cbc" else _exact(problem)


def _by_threshold(
    E: np.ndarray, tau: np.ndarray | None, most: float, tolerance: float, method: str
) -> tuple[np.ndarray, float, bool, dict[str, float], str]:
    """The mean-threshold budget: the same problem with gain -τ, where sums lie on a grid."""
    if tau is None:
        raise HeartError("the mean-threshold budget needs the candidates' thresholds: give thresholds=")
    if not math.isfinite(most):
        raise HeartError(f"the budget max_mean_threshold={most} is not a finite number")
    problem = _problem(E, -tau, -len(E) * (most + tolerance))
    _refuse_infeasible(problem, "threshold", most, -1.0)
    budget = {"max_mean_threshold": float(most)}
    grid = _Grid.of(tau)
    capacity = grid.capacity(most, tolerance) if grid else 0
    if method == "dp" and not grid:
        raise HeartError("the integer DP needs thresholds with at most six decimals: use method 'exact'")
    if grid and (method == "dp" or (method == "exact" and capacity * E.size <= _CELLS)):
        x = _integer_dp(problem.cost, grid.steps, capacity)
        return x, 4 * np.finfo(np.float64).eps * problem.total_cost(x), True, budget, "dp"
    return *_run(problem, method), budget, method


# ---------------------------------------------------------------- exact: dual, exchange, Pareto DP


def _exact(problem: _Problem) -> tuple[np.ndarray, float, bool]:
    """Choice, certified gap, whether the optimum is proved."""
    x, price = _start(problem)
    if price == 0.0 and problem.total_cost(x) == 0.0:  # every head has its least error: the budget does not bind
        return x, 0.0, True
    lower, r = _lagrangian(problem, price)
    slack = _rounding(problem, price)
    x = _exchange(problem, x, r, price)
    for work in _WORK:
        cost = problem.total_cost(x)
        gap = cost - lower
        if gap <= slack:
            return x, slack, True
        if work > _WORK[0] and gap <= 1e-9 * cost:  # as good as closed, and the rest is a matter of subset sums
            break
        x, complete = _pareto(problem, x, r, price, gap + slack, work)
        if complete:
            return x, slack, True
        x = _exchange(problem, x, r, price)
    return x, max(problem.total_cost(x) - lower, 0.0) + slack, False


def _argmin(score: np.ndarray, tie: np.ndarray) -> np.ndarray:
    """Candidate with the least score, of those the one with the greatest `tie`."""
    least = score == score.min(1, keepdims=True)
    return np.where(least, tie, -np.inf).argmax(1)


def _dual(problem: _Problem, low: np.ndarray) -> tuple[np.ndarray, float]:
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


def _fill(problem: _Problem, low: np.ndarray, high: np.ndarray) -> np.ndarray:
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


def _lagrangian(problem: _Problem, price: float) -> tuple[float, np.ndarray]:
    """L(λ), a lower bound up to `_rounding`, and the reduced costs r [n, K] ≥ 0."""
    reduced = problem.cost - price * problem.gain
    least = reduced.min(1)
    return math.fsum([*least.tolist(), price * problem.need]), reduced - least[:, None]


def _rounding(problem: _Problem, price: float) -> float:
    """An upper bound of what rounding can have done to L(λ) and to a sum of reduced costs."""
    cost = np.where(np.isfinite(problem.cost), problem.cost, 0.0)
    least = (problem.cost - price * problem.gain).argmin(1)  # where the minimum was taken
    rows = np.arange(len(least))
    size = math.fsum(cost[rows, least] + price * np.abs(problem.gain[rows, least]))
    size += price * abs(problem.need)
    return 4 * np.finfo(np.float64).eps * size


def _moves(problem: _Problem, x: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, ...]:
    """All changes of one head among the kept candidates: head, candidate, Δcost, Δgain."""
    head, candidate = np.nonzero(keep & (np.arange(keep.shape[1]) != x[:, None]))
    now = x[head]
    return (
        head,
        candidate,
        problem.cost[head, candidate] - problem.cost[head, now],
        problem.gain[head, candidate] - problem.gain[head, now],
    )


def _exchange(problem: _Problem, x: np.ndarray, r: np.ndarray, price: float, work: int = 1_000_000) -> np.ndarray:
    """Improve a within-budget choice by changing one head, or two at once, while that helps."""
    x = x.copy()
    while work > 0:
        spare = problem.total_gain(x) - problem.need
        limit = math.fsum(r[np.arange(len(x)), x]) + price * spare  # what is left to win at this price
        head, candidate, cost, gain = _moves(problem, x, r <= limit)
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
    problem: _Problem, x: np.ndarray, r: np.ndarray, price: float, limit: float, work: int
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
    if not all(len(h.gain) for h in halves):
        return x, all(h.complete for h in halves)
    return _meet(problem, x, fixed, *halves, need, price), all(h.complete for h in halves)


@dataclass(frozen=True)
class _Window:
    """What a half must bring so that the other can still make it: gain from `low`; above `high` it pays λ."""

    low: float
    high: float
    price: float
    limit: float


@dataclass
class _Half:
    """States of one half of the heads: gain, Σr, and the way back to each."""

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


def _half(problem: _Problem, heads: np.ndarray, keep: np.ndarray, r: np.ndarray, window: _Window, states: int) -> _Half:
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
    problem: _Problem, x: np.ndarray, fixed: np.ndarray, one: _Half, two: _Half, need: float, price: float
) -> np.ndarray:
    """The best pair of states that really keeps the budget (sums taken anew), if it is better than x."""
    order = np.argsort(-two.gain, kind="stable")
    cost = (two.paid + price * two.gain)[order]
    least = np.minimum.accumulate(cost)
    where = np.maximum.accumulate(np.where(cost == least, np.arange(len(cost)), 0))
    count = np.searchsorted(-two.gain[order], one.gain - need + 1e-13 * len(x), side="right")
    partner = where[np.maximum(count - 1, 0)]
    total = np.where(count > 0, one.paid + price * one.gain + cost[partner], np.inf)
    best, best_cost = x, problem.total_cost(x)
    for state in np.argsort(total, kind="stable")[:16]:  # the first within the budget is best, up to rounding
        trial = fixed.copy()
        one.put(trial, int(state))
        two.put(trial, int(order[partner[state]]))
        if count[state] and problem.feasible(trial) and (value := problem.total_cost(trial)) < best_cost:
            best, best_cost = trial, value
    return best


# ---------------------------------------------------------------- the mean-threshold budget on its grid


@dataclass(frozen=True)
class _Grid:
    """Thresholds as integers: τ of head i and candidate k is base_i + unit · steps[i, k], `base` = Σ
    base_i."""

    steps: np.ndarray
    unit: Fraction
    base: Fraction

    @classmethod
    def of(cls, tau: np.ndarray) -> _Grid | None:
        """The coarsest grid that holds all thresholds; None if they have more than six decimals."""
        micro = np.round(tau * 1e6)
        if np.abs(micro - tau * 1e6).max() > 1e-6:
            return None
        least = micro.min(1)
        steps = (micro - least[:, None]).astype(np.int64)
        unit = int(np.gcd.reduce(steps, axis=None)) or 1
        return cls(steps // unit, Fraction(unit, 10**6), Fraction(int(least.sum()), 10**6))

    def capacity(self, most: float, tolerance: float) -> int:
        """How many steps all heads may take together."""
        room = (Fraction(most) + Fraction(tolerance)) * len(self.steps) - self.base
        return min(math.floor(room / self.unit), int(self.steps.max(1).sum()))


def _integer_dp(cost: np.ndarray, steps: np.ndarray, capacity: int) -> np.ndarray:
    """Least Σ cost with Σ steps ≤ capacity, by the table over all capacities."""
    best = np.zeros(capacity + 1)
    chosen = np.zeros((len(cost), capacity + 1), np.int32)
    for i in range(len(cost)):
        new = np.full(capacity + 1, np.inf)
        for k in np.nonzero(np.isfinite(cost[i]) & (steps[i] <= capacity))[0]:
            value = best[: capacity + 1 - steps[i, k]] + cost[i, k]
            better = value < new[steps[i, k] :]
            new[steps[i, k] :][better] = value[better]
            chosen[i, steps[i, k] :][better] = k
        best = new
    x, left = np.empty(len(cost), np.int64), capacity
    for i in range(len(cost) - 1, -1, -1):
        x[i] = chosen[i, left]
        left -= steps[i, x[i]]
    return x


# ---------------------------------------------------------------- cross-check: PuLP with CBC, as in the paper


def _cbc(problem: _Problem, attempts: int = 5, seconds: int = 300) -> tuple[np.ndarray, float, bool]:
    """The ILP by CBC: costs scaled, the status checked, the choice verified and bounded by our own dual."""
    import pulp

    start, price = _start(problem)
    upper = problem.total_cost(start)
    lower, slack = _lagrangian(problem, price)[0], _rounding(problem, price)
    if upper <= 0:
        return start, 0.0, True
    # One candidate that alone costs more than a known choice is never used; without those, costs fit CBC's
    # scale.
    usable = problem.cost <= upper
    ilp = pulp.LpProblem("heart", pulp.LpMinimize)
    pairs = np.argwhere(usable).tolist()
    x = {(i, k): pulp.LpVariable(f"x_{i}_{k}", cat="Binary") for i, k in pairs}
    ilp += pulp.lpSum(problem.cost[i, k] / upper * 1e4 * v for (i, k), v in x.items())
    for i in range(len(usable)):
        ilp += pulp.lpSum(x[i, k] for k in np.nonzero(usable[i])[0].tolist()) == 1
    # The row is scaled so that CBC's tolerance of 1e-9 there is below ours on the mean.
    ilp += pulp.lpSum(1e3 * problem.gain[i, k] * v for (i, k), v in x.items()) >= 1e3 * problem.need
    for _ in range(attempts):
        choice = _cbc_once(pulp, ilp, x, len(usable), seconds)
        if problem.feasible(choice):
            gap = max(problem.total_cost(choice) - lower, 0.0) + slack
            return choice, gap, False
        ilp += (
            pulp.lpSum(x[i, int(k)] for i, k in enumerate(choice)) <= len(choice) - 1
        )  # over the budget: not this one
    raise HeartError(f"CBC gave {attempts} choices that miss the budget by its tolerance: use the exact solver")


def _start(problem: _Problem) -> tuple[np.ndarray, float]:
    cheapest = _argmin(problem.cost, problem.gain)
    return (cheapest, 0.0) if problem.feasible(cheapest) else _dual(problem, cheapest)


def _cbc_once(pulp: Any, ilp: Any, x: dict, heads: int, seconds: int) -> np.ndarray:
    options = ["primalTolerance 1e-9", "dualTolerance 1e-9", "integerTolerance 1e-9"]
    ilp.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=0.0, gapAbs=0.0, timeLimit=seconds, options=options))
    # PuLP reports "Optimal" when CBC ran out of time, and leaves values behind when infeasible: sol_status
    # tells.
    if ilp.status != pulp.LpStatusOptimal or ilp.sol_status != pulp.LpSolutionOptimal:
        status = pulp.LpSolution.get(ilp.sol_status, ilp.sol_status)
        raise HeartError(f"CBC did not prove an optimum within {seconds} s (it says {status!r}): use the exact solver")
    choice = np.full(heads, -1, np.int64)
    for (i, k), v in x.items():
        if v.value() is not None and v.value() > 0.5:
            choice[i] = k
    if (choice < 0).any():
        raise HeartError("CBC left a head without a candidate: use the exact solver")
    return choice
