"""One candidate per head, least total error, under one budget: solved exactly, with a certified bound.

    min Σ_i E[i, x_i]   subject to   mean_i S[i, x_i] ≥ S_min    (or mean threshold ≤ τ_max, or mean time ≤ T)

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

from ...errors import HeartError
from .assignment import Problem, exact, make_problem
from .budget import Budget

TOLERANCE = 1e-9  # on the mean sparsity (or threshold): the shared threshold itself is exactly tight
METHODS = ("exact", "dp", "cbc")
_CELLS = 50_000_000  # up to so many additions the mean-threshold budget goes to the integer DP


@dataclass(frozen=True)
class Result:
    """A chosen candidate per head and what is known about it.

    Args:
        choice: candidate index of every head, shaped as the tables without their last axis.
        objective: Σ E of the choice.  bound: certified lower bound of any choice within the budget.
        gap: objective - bound, computed without cancellation; 0 up to rounding when the optimum is proved.
        sparsity: mean S of the choice.  thresholds: its thresholds, if candidates' thresholds were given.
        budget: what was asked for.  proven: whether the optimum was proved (else only the bound holds).
        time: mean time of the choice, if times were given.
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
    time: float | None = None
    seconds: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """What a calibration file records: figures only, nothing that differs between equal runs."""
        keep = ("method", "budget", "objective", "bound", "gap", "sparsity", "proven")
        out = {name: getattr(self, name) for name in keep}
        if self.thresholds is not None:
            out["mean_threshold"] = math.fsum(self.thresholds.ravel()) / self.thresholds.size
        return out if self.time is None else out | {"time": self.time}


# ---------------------------------------- the public function


def solve(
    E: Any,
    S: Any,
    min_sparsity: float | None = None,
    max_mean_threshold: float | None = None,
    thresholds: Any = None,
    shared: float | None = None,
    method: str = "exact",
    tolerance: float = TOLERANCE,
    *,
    times: Any = None,
    max_time: float | None = None,
    shares: Any = None,
) -> Result:
    """Choose one candidate per head: least Σ E within the budget.

    Args:
        E, S: errors and realised sparsities, [heads, candidates], with further axes (layers, phases) in front or not.
        min_sparsity: least mean S.  max_mean_threshold: greatest mean threshold.  shared: at least the mean S of the
            candidate with this threshold (0.9 when no budget is given).  max_time: greatest mean of `times`.
        thresholds: the candidates' thresholds, [candidates] or one row a head.
        method: "exact" (own solver, certified), "cbc" (PuLP with CBC as in the paper, scaled and verified) or
            "dp" (integer dynamic programme; mean-threshold budget only).
        times: what each candidate takes, shaped as E.
        shares: how much each head counts in a mean of S or of times, as E without its last axis or what broadcasts to
            it; phases of different length, say. None: all alike.
    """
    start = time.perf_counter()
    tables = _Tables.checked(E, S, thresholds, times, shares)
    if method not in METHODS:
        raise HeartError(f"the solver's method is one of {', '.join(METHODS)}, not {method!r}")
    if sum(b is not None for b in (min_sparsity, max_mean_threshold, shared, max_time)) > 1:
        raise HeartError("give one budget only: min_sparsity, max_mean_threshold, shared or max_time")
    if max_mean_threshold is None and method == "dp":
        raise HeartError("the integer DP serves the mean-threshold budget only: use method 'exact' or 'cbc'")
    if max_mean_threshold is not None:
        x, gap, proven, budget, used = _by_threshold(tables.E, tables.tau, max_mean_threshold, tolerance, method)
    elif max_time is not None:
        x, gap, proven, budget, used = _by_time(tables, max_time, tolerance, method)
    else:
        x, gap, proven, budget, used = _by_sparsity(tables, min_sparsity, shared, tolerance, method)
    objective = math.fsum(tables.E[np.arange(len(x)), x])
    return Result(
        choice=x.reshape(tables.shape),
        objective=objective,
        bound=objective - gap,
        gap=gap,
        sparsity=tables.mean(tables.S, x),
        thresholds=None if tables.tau is None else tables.tau[np.arange(len(x)), x].reshape(tables.shape),
        method=used,
        budget=budget,
        proven=proven,
        time=None if tables.times is None else tables.mean(tables.times, x),
        seconds=time.perf_counter() - start,
    )


def solve_budget(
    E: Any, S: Any, thresholds: Any, budget: Budget | str | float, method: str = "exact", **more: Any
) -> Result:
    """`solve` with a `Budget`; one of time needs `times` besides."""
    budget = Budget.parse(budget)
    return solve(E, S, thresholds=thresholds, method=method, **{_KEYS[budget.kind]: budget.value}, **more)


def reachable(S: Any) -> tuple[float, float]:
    """Least and greatest mean sparsity that these candidates can give."""
    S = np.asarray(S, dtype=np.float64).reshape(-1, np.shape(S)[-1])
    return math.fsum(S.min(1)) / len(S), math.fsum(S.max(1)) / len(S)


# ---------------------------------------- inputs and budgets

_KEYS = {"shared": "shared", "sparsity": "min_sparsity", "threshold": "max_mean_threshold", "time": "max_time"}
_Solved = tuple[np.ndarray, float, bool, dict[str, float], str]  # choice, gap, proven, budget, method


@dataclass(frozen=True)
class _Tables:
    """The inputs as checked tables with a row a head, [n, K]."""

    E: np.ndarray
    S: np.ndarray
    tau: np.ndarray | None
    times: np.ndarray | None
    shares: np.ndarray  # [n], the mean is 1
    shape: tuple[int, ...]

    @classmethod
    def checked(cls, E: Any, S: Any, thresholds: Any, times: Any, shares: Any) -> _Tables:
        """Refuse what does not fit."""
        E, S = _table(E, "the error table"), _table(S, "the sparsity table")
        if E.shape != S.shape:
            raise HeartError(f"the error table's shape {E.shape} differs from the sparsity table's {S.shape}")
        if not (S >= 0).all() or not (S <= 1).all():
            raise HeartError(f"sparsities must lie in 0 … 1, not {S.min():g} … {S.max():g}")
        tau = None if thresholds is None else _thresholds(thresholds, E.shape)
        if times is not None:
            times = _table(times, "the table of times")
            if times.shape != E.shape or (times < 0).any():
                raise HeartError(f"times of shape {times.shape}, least {times.min():g}, do not fit tables of {E.shape}")
        count = E.shape[-1]
        flat = [None if x is None else x.reshape(-1, count) for x in (E, S, tau, times)]
        return cls(flat[0], flat[1], flat[2], flat[3], _shares(shares, E.shape[:-1]), E.shape[:-1])  # type: ignore

    def mean(self, table: np.ndarray, x: np.ndarray) -> float:
        """The mean of a choice's entries, heads weighed by their shares."""
        return math.fsum(self.shares * table[np.arange(len(x)), x]) / len(x)


def _table(values: Any, name: str) -> np.ndarray:
    try:
        table = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise HeartError(f"{name} is not a rectangular table of numbers") from None
    if table.ndim not in (2, 3, 4) or table.size == 0:
        raise HeartError(f"{name} has shape {table.shape}, not [heads, candidates] or [layers, heads, candidates]")
    if not np.isfinite(table).all():
        raise HeartError(f"{name} holds {int((~np.isfinite(table)).sum())} numbers that are not finite: measure again")
    return table


def _thresholds(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    try:
        tau = np.broadcast_to(np.asarray(values, dtype=np.float64), shape)
    except ValueError:
        raise HeartError(f"thresholds of shape {np.shape(values)} do not fit tables of {shape}") from None
    if not np.isfinite(tau).all():
        raise HeartError("the candidates' thresholds hold a number that is not finite")
    return tau


def _shares(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    if values is None:
        return np.ones(math.prod(shape))
    try:
        shares = np.broadcast_to(np.asarray(values, dtype=np.float64), shape).ravel()
    except (TypeError, ValueError):
        raise HeartError(f"shares of shape {np.shape(values)} do not fit tables of {shape}") from None
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.sum() > 0):
        raise HeartError("shares of heads must be finite, not negative and not all 0")
    return shares * (len(shares) / math.fsum(shares))


def _by_sparsity(
    tables: _Tables, min_sparsity: float | None, shared: float | None, tolerance: float, method: str
) -> _Solved:
    budget = _sparsity_budget(tables, min_sparsity, shared)
    need, gain = budget["min_sparsity"], tables.shares[:, None] * tables.S
    problem = make_problem(tables.E, gain, len(gain) * (need - tolerance))
    _refuse_infeasible(problem, "sparsity", need, 1.0)
    return *_run(problem, method), budget, method


def _by_time(tables: _Tables, most: float, tolerance: float, method: str) -> _Solved:
    if tables.times is None:
        raise HeartError("a budget of time needs the candidates' times: give times=")
    if not math.isfinite(most):
        raise HeartError(f"the budget max_time={most} is not a finite number")
    gain = -tables.shares[:, None] * tables.times
    problem = make_problem(tables.E, gain, -len(gain) * (most + tolerance))
    _refuse_infeasible(problem, "time", most, -1.0)
    return *_run(problem, method), {"max_time": float(most)}, method


def _sparsity_budget(tables: _Tables, min_sparsity: float | None, shared: float | None) -> dict[str, float]:
    if min_sparsity is not None:
        if not math.isfinite(min_sparsity):
            raise HeartError(f"the budget min_sparsity={min_sparsity} is not a finite number")
        return {"min_sparsity": float(min_sparsity)}
    shared = 0.9 if shared is None else float(shared)
    if tables.tau is None:
        raise HeartError("a budget is missing: give min_sparsity, or the candidates' thresholds to match a shared one")
    matching = np.isclose(tables.tau, shared, rtol=0, atol=1e-9)
    if not matching.any(1).all():
        known = ", ".join(f"{t:g}" for t in np.unique(tables.tau)[:20])
        raise HeartError(f"no candidate has the shared threshold {shared:g} to match: candidates are {known}")
    return {"shared": shared, "min_sparsity": tables.mean(tables.S, matching.argmax(1))}


def _refuse_infeasible(problem: Problem, what: str, asked: float, sign: float) -> None:
    best = problem.gain.argmax(1)
    if problem.feasible(best):
        return
    reach = sign * problem.total_gain(best) * (problem.unit or 1.0) / len(best)
    end, relation = ("greatest", "at least") if sign > 0 else ("least", "at most")
    raise HeartError(
        f"no choice of candidates reaches a mean {what} of {relation} {asked:.9g}: the {end} reachable is {reach:.9g}"
    )


def _run(problem: Problem, method: str) -> tuple[np.ndarray, float, bool]:
    if method == "cbc":
        from .cbc import by_cbc  # PuLP is imported only where it is used

        return by_cbc(problem)
    return exact(problem)


def _by_threshold(E: np.ndarray, tau: np.ndarray | None, most: float, tolerance: float, method: str) -> _Solved:
    """The mean-threshold budget: the same problem with gain -τ, where sums lie on a grid."""
    if tau is None:
        raise HeartError("the mean-threshold budget needs the candidates' thresholds: give thresholds=")
    if not math.isfinite(most):
        raise HeartError(f"the budget max_mean_threshold={most} is not a finite number")
    problem = make_problem(E, -tau, -len(E) * (most + tolerance))
    _refuse_infeasible(problem, "threshold", most, -1.0)
    budget = {"max_mean_threshold": float(most)}
    grid = _Grid.of(tau)
    capacity = grid.capacity(most, tolerance) if grid else 0
    if method == "dp" and not grid:
        raise HeartError("the integer DP needs thresholds with at most six decimals: use method 'exact'")
    if grid and (method == "dp" or (method == "exact" and capacity * E.size <= _CELLS)):
        x = _integer_dp(problem.cost, grid.steps, capacity)
        return x, 4 * float(np.finfo(np.float64).eps) * problem.total_cost(x), True, budget, "dp"
    return *_run(problem, method), budget, method


# ---------------------------------------- the mean-threshold budget on its grid


@dataclass(frozen=True)
class _Grid:
    """Thresholds as integers: τ of head i and candidate k is base_i + unit · steps[i, k]; `base` is Σ base_i."""

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
        left = (Fraction(most) + Fraction(tolerance)) * len(self.steps) - self.base
        return min(math.floor(left / self.unit), int(self.steps.max(1).sum()))


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
