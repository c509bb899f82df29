"""One calibration as the strategies see it: the model's size, the points, the phases, and what counts as budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import HeartError
from ...online.cost_model import CostTable
from ..workflow.phases import Phases
from ..workflow.settings import Settings
from . import solver
from .times import TimeModel

Choice = tuple[tuple[tuple[int, ...], ...], ...]  # the point of every head, [phases][layers][heads]
Contexts = Sequence[tuple[int, int]]  # (prompt, step) pairs


@dataclass
class Tables:
    """Sparsity and computed share of every head and point, [P, L, H, K]."""

    sparsity: np.ndarray
    cost: np.ndarray


@dataclass
class Outcome:
    """What a method found: errors [P, L, H, K], tables, the solver's report, the chosen points."""

    error: np.ndarray
    tables: Tables
    choice: Choice
    report: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """What is calibrated.

    Args:
        settings: what the user wants.
        layers, heads: of the transformer.
        phases: intervals of steps with points of their own.
        times, table: for a budget of time: the model of times and the table of costs.
    """

    settings: Settings
    layers: int
    heads: int
    phases: Phases
    times: TimeModel | None = None
    table: CostTable | None = None

    @property
    def shared(self) -> Choice:
        """The assignment of the reference point to every head."""
        return (((self.settings.reference,) * self.heads,) * self.layers,) * self.phases.count

    @property
    def kind(self) -> str:
        """The kind of budget."""
        return self.settings.budget.kind

    def phase_means(self, contexts: Contexts, values: Sequence[Any]) -> np.ndarray:
        """The mean of values, one for each context, in each phase: [P, ...]."""
        places = [self.phases.of_step(step) for _, step in contexts]
        by_phase = [[v for v, place in zip(values, places) if place == p] for p in range(self.phases.count)]
        if empty := [p for p, group in enumerate(by_phase) if not group]:
            raise HeartError(f"no context lies in phase {empty[0]}: take more contexts, or fewer phases")
        return np.array([np.mean(group, axis=0) for group in by_phase])

    def mean(self, contexts: Contexts, values: Sequence[float]) -> float:
        """The mean over a generation's sparse steps of a number that each context has."""
        return float(np.mean(self.phases.shares().ravel() * self.phase_means(contexts, values)))

    # ---------------------------------------- the budget, as a gain that must be reached

    def lines(self) -> np.ndarray:
        """Times of the points as lines in the computed share, [K, 2]."""
        assert self.times is not None and self.table is not None
        return self.times.lines([point.to_dict() for point in self.settings.candidate_points], self.table)

    def gains(self, tables: Tables) -> np.ndarray:
        """What the budget counts, [P, L, H, K]: sparsity, or time with a minus sign."""
        if self.kind != "time":
            return tables.sparsity
        fixed, rate = self.lines().T
        return -(fixed + rate * tables.cost)

    def gain(self, contexts: Contexts, choice: Choice, rows: Sequence[dict[str, Any]]) -> float:
        """The same of an assignment as its forwards show it."""
        if self.kind != "time":
            return self.mean(contexts, [float(np.mean(row["sparsity"])) for row in rows])
        lines, means = self.lines(), []
        for (_, step), row in zip(contexts, rows):
            fixed, rate = lines[np.array(choice[self.phases.of_step(step)])].transpose(2, 0, 1)
            means.append(-float(np.mean(fixed + rate * np.array(row["cost"]))))
        return self.mean(contexts, means)

    def target(self) -> float | None:
        """The gain that is asked for; None where the reference's own decides."""
        value = self.settings.budget.value
        if self.kind == "time":
            assert self.times is not None
            return -self.times.limit(value)
        return value if self.kind == "sparsity" else None

    def refuse_unreachable(self, tables: Tables) -> None:
        """Raise if no assignment keeps the budget by the table, with what can be reached."""
        target = self.target()
        if target is None:
            return
        most = float((self.phases.shares() * self.gains(tables).max(-1)).mean())
        if self.kind == "time":
            assert self.times is not None
            self.times.refuse_too_quick(self.settings.budget.value, -most)
        elif most < target:
            raise HeartError(
                f"no assignment has a mean sparsity of {target:g}: the most that these points reach is "
                f"{math.floor(most * 1e4) / 1e4:g}"
            )

    def solve(self, E: np.ndarray, tables: Tables, need: float | None = None) -> solver.Result:
        """The assignment of least ΣE that gains at least `need`; None: what the budget says of the table."""
        taus, shares = self.settings.taus, self.phases.shares()
        S, budget = tables.sparsity, self.settings.budget
        if self.kind == "threshold" or (need is None and self.kind != "time"):
            return solver.solve_budget(E, S, taus, budget, shares=shares)
        if need is None:
            need = self.target()
        assert need is not None
        gains = self.gains(tables)
        least = min(need, float((shares * gains.max(-1)).mean()))  # or the most that any assignment reaches
        if self.kind == "time":
            return solver.solve(E, S, thresholds=taus, times=-gains, max_time=-least, shares=shares)
        return solver.solve(E, S, min_sparsity=least, thresholds=taus, shares=shares)


def as_choice(choice: np.ndarray) -> Choice:
    """An array [P, L, H] as nested tuples, which name records."""
    return tuple(tuple(tuple(int(c) for c in row) for row in phase) for phase in choice)
