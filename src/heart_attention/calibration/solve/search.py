"""Assignments within the budget: solved from tables, verified by forwards, and the line search on γ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..workflow.runner import Choice, Runner
from ..workflow.settings import Settings
from . import solver

SLACK = 1e-4  # realised sparsity may miss the budget by this much
LEAST = 0.01  # a context's error counts as at least this share of the largest one's when contexts are weighed


def shared_choice(settings: Settings, layers: int, heads: int) -> Choice:
    """The assignment of the shared threshold to every head."""
    return ((settings.taus.index(settings.shared),) * heads,) * layers


def as_choice(choice: np.ndarray) -> Choice:
    return tuple(tuple(int(c) for c in row) for row in choice)


@dataclass
class Outcome:
    """What a method found: tables [L, H, K], the solver's report, the chosen candidates."""

    error: np.ndarray
    sparsity: np.ndarray
    choice: Choice
    report: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


def context_weights(
    settings: Settings, runner: Runner, contexts: Sequence[tuple[int, int]], layers: int, heads: int
) -> np.ndarray:
    """How much each context counts: 1, or with `relative` as much as makes the shared threshold's error equal in all.

    Errors of early and late steps differ tenfold: in a plain mean a gain where they are large pays for several times
    the error where they are small, and a few contexts decide everything. The shared threshold's mean stays as it is.
    """
    if settings.mean == "plain":
        return np.ones(len(contexts))
    got = runner.verify("verifying, start", contexts, shared_choice(settings, layers, heads))
    errors = np.asarray(got["errors"])
    if not errors.max() > 0:
        return np.ones(len(contexts))
    return errors.mean() / np.maximum(errors, LEAST * errors.max())


class Trials:
    """The contexts that assignments are tried on, and how much each counts."""

    def __init__(
        self, settings: Settings, runner: Runner, contexts: Sequence[tuple[int, int]], layers: int, heads: int
    ):  # fmt: skip
        self.runner, self.contexts = runner, list(contexts)
        self.weights = context_weights(settings, runner, self.contexts, layers, heads)

    def verify(self, stage: str, choice: Choice) -> dict[str, Any]:
        """Joint error, weighed, and realised sparsity of an assignment, by forwards."""
        got = self.runner.verify(stage, self.contexts, choice)
        return got | {"error": float(np.mean(self.weights * got["errors"]))}

    def mean(self, tables: Sequence[np.ndarray]) -> np.ndarray:
        """The weighed mean of a table of errors a context."""
        return np.mean([w * t for w, t in zip(self.weights, tables, strict=True)], axis=0)


def solve(settings: Settings, E: np.ndarray, S: np.ndarray, min_sparsity: float | None = None) -> solver.Result:
    """The assignment within the budget; `min_sparsity` overrides the sparsity of the shared threshold."""
    budget = settings.budget
    if budget.kind != "threshold" and min_sparsity is not None:
        return solver.solve(E, S, min_sparsity=min_sparsity, thresholds=settings.taus)
    return solver.solve_budget(E, S, settings.taus, budget)


def figures(got: dict[str, Any]) -> dict[str, Any]:
    return {k: got[k] for k in ("error", "sparsity")}


def error_table(m: np.ndarray, D: np.ndarray, gamma: float) -> np.ndarray:
    """m + γD with each head's least at 0: a constant a head changes no choice, and errors are not negative."""
    E = m + gamma * D
    return E - E.min(-1, keepdims=True)


class Search:
    """The line search on γ of one round: doubled until accepted, then its neighbours."""

    def __init__(
        self, settings: Settings, trials: Trials, m: np.ndarray, D: np.ndarray, S: np.ndarray, number: int
    ):  # fmt: skip
        self.settings, self.trials, self.number = settings, trials, number
        self.m, self.D, self.S = m, D, S
        self.log: list[dict[str, Any]] = []
        self.seen: dict[Choice, dict[str, Any]] = {}
        self.moved: Choice = ()

    def run(self, start: Choice, error: float, target: float) -> Outcome | None:
        """The best verified assignment that beats `error` within the budget, or None.

        A rejected γ was too small (too bold a step) and is doubled; one that moves no head was too large and is
        halved; from the first success on the direction that helps is followed.
        """
        gamma, best, factor = self.settings.gamma, None, 0.0
        for _ in range(7):
            best = self.attempt(gamma, target, error)
            if best is not None:
                break
            wanted = 0.5 if self.moved == start else 2.0
            if factor and wanted != factor:
                break
            factor, gamma = wanted, gamma * wanted
        if best is None:
            return None
        for factor in (0.5, 2.0):
            step = gamma
            while 1 / 64 <= step * factor <= 64 * self.settings.gamma:
                step *= factor
                better = self.attempt(step, target, best.report["joint_error"])
                if better is None:
                    break
                best = better
        return best

    def attempt(self, gamma: float, target: float, bar: float) -> Outcome | None:
        """Solve for γ and verify; an outcome if it is within the budget and its error below `bar`."""
        E = self.m + gamma * self.D
        need, outcome = target, None
        for _ in range(3):  # the table's sparsity and the realised one differ by a little: ask for that much more
            solved = solve(self.settings, E, self.S, reachable(self.S, need))
            self.moved = choice = as_choice(solved.choice)
            new = choice not in self.seen
            if new:
                self.seen[choice] = self.trials.verify(f"verifying, round {self.number}", choice)
            got = self.seen[choice]
            short = target - got["sparsity"] if self.settings.budget.kind != "threshold" else 0.0
            accepted = short <= SLACK and got["error"] < bar
            if new:
                self.log.append({"round": self.number, "gamma": gamma, "accepted": bool(accepted), **figures(got)})
            if accepted:
                report = solved.to_dict() | {"gamma": gamma, "round": self.number, "joint_error": got["error"]}
                outcome = Outcome(error_table(self.m, self.D, gamma), self.S, choice, report)
            if short <= SLACK:
                break
            need += short
        return outcome


def reachable(S: np.ndarray, need: float) -> float:
    """`need`, or the most that any assignment reaches if that is less."""
    return min(need, float(S.max(-1).mean()))
