"""Assignments within the budget: verified by forwards, and the line search on γ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..workflow.runner import Runner, figures_of
from .case import Case, Choice, Contexts, Outcome, Tables, as_choice

SLACK = 1e-4  # realised sparsity or time may miss the budget by this much
LEAST = 0.01  # a context's error counts as at least this share of the largest one's when contexts are weighed


def context_weights(case: Case, runner: Runner, contexts: Contexts) -> np.ndarray:
    """How much each context counts in the mean of its phase.

    Its phase's weight, and with the mean "relative" as much as makes the reference's error equal in all contexts of a
    phase. Errors of early and late steps differ tenfold: in a plain mean a gain where they are large pays for several
    times the error where they are small, and a few contexts decide everything. The reference's mean stays as it is.
    """
    places = np.array([case.phases.of_step(step) for _, step in contexts])
    weights = np.array(case.phases.weights)[places]
    if case.settings.mean == "plain":
        return weights
    rows = runner.verified("verifying, start", contexts, case.shared)
    errors = np.array([row["error"] for row in rows])
    for phase in range(case.phases.count):
        here = places == phase
        if here.any() and errors[here].max() > 0:
            weights[here] *= errors[here].mean() / np.maximum(errors[here], LEAST * errors[here].max())
    return weights


class Trials:
    """The contexts that assignments are tried on, and how much each counts."""

    def __init__(self, case: Case, runner: Runner, contexts: Contexts):
        self.case, self.runner, self.contexts = case, runner, list(contexts)
        self.weights = context_weights(case, runner, self.contexts)

    def verify(self, stage: str, choice: Choice) -> dict[str, Any]:
        """Joint error, weighed, and what the budget counts, of an assignment, by forwards."""
        rows = self.runner.verified(stage, self.contexts, choice)
        figures = figures_of(rows)
        figures["sparsity"] = self.case.mean(self.contexts, [float(np.mean(row["sparsity"])) for row in rows])
        error = float(np.mean(self.case.phase_means(self.contexts, self.weights * figures["errors"])))
        return figures | {"error": error, "gain": self.case.gain(self.contexts, choice, rows)}

    def mean(self, tables: Sequence[np.ndarray]) -> np.ndarray:
        """The weighed mean, in each phase, of a table of errors a context: [P, L, H, K]."""
        weighed = [w * t for w, t in zip(self.weights, tables, strict=True)]
        return self.case.phase_means(self.contexts, weighed)

    def tables(self, sparsity: Sequence[np.ndarray], cost: Sequence[np.ndarray]) -> Tables:
        """Sparsity and computed share by phase from one table a context."""
        return Tables(self.case.phase_means(self.contexts, sparsity), self.case.phase_means(self.contexts, cost))


def brief(figures: dict[str, Any]) -> dict[str, Any]:
    """What the history of a search tells of an assignment."""
    told = {name: figures[name] for name in ("error", "sparsity")}
    return told | ({"time": -figures["gain"]} if figures["gain"] < 0 else {})


def error_table(m: np.ndarray, D: np.ndarray, gamma: float) -> np.ndarray:
    """m + γD with each head's least at 0: a constant a head changes no choice, and errors are not negative."""
    E = m + gamma * D
    return E - E.min(-1, keepdims=True)


class Search:
    """The line search on γ of one round: doubled until accepted, then its neighbours."""

    def __init__(self, case: Case, trials: Trials, m: np.ndarray, D: np.ndarray, tables: Tables, number: int):
        self.case, self.trials, self.number = case, trials, number
        self.m, self.D, self.tables = m, D, tables
        self.log: list[dict[str, Any]] = []
        self.seen: dict[Choice, dict[str, Any]] = {}
        self.moved: Choice = ()

    def run(self, start: Choice, error: float, target: float) -> Outcome | None:
        """The best verified assignment that beats `error` within the budget, or None.

        A rejected γ was too small (too bold a step) and is doubled; one that moves no head was too large and is
        halved; from the first success on the direction that helps is followed.
        """
        first = self.case.settings.gamma
        gamma, best, factor = first, None, 0.0
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
            while 1 / 64 <= step * factor <= 64 * first:
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
            solved = self.case.solve(E, self.tables, need)
            self.moved = choice = as_choice(solved.choice)
            new = choice not in self.seen
            if new:
                self.seen[choice] = self.trials.verify(f"verifying, round {self.number}", choice)
            figures = self.seen[choice]
            short = 0.0 if self.case.kind == "threshold" else target - figures["gain"]
            accepted = short <= SLACK and figures["error"] < bar
            if new:
                self.log.append({"round": self.number, "gamma": gamma, "accepted": bool(accepted), **brief(figures)})
            if accepted:
                report = solved.to_dict() | {"gamma": gamma, "round": self.number, "joint_error": figures["error"]}
                outcome = Outcome(error_table(self.m, self.D, gamma), self.tables, choice, report)
            if short <= SLACK:
                break
            need += short
        return outcome
