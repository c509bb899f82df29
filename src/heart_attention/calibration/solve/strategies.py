"""The three methods of a calibration, each from measurements to an assignment.

- `probes`: the paper's isolated probes, each head on its own prompt and steps;
- `isolated`: the same objective by one backward pass a context;
- `joint`: the true joint error with its gradient, in rounds, verified by forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import HeartError
from ..measure.candidates import DENSE
from ..measure.gradient import Pass
from ..workflow.plan import Contexts
from ..workflow.runner import Runner
from ..workflow.tasks import Task
from .case import Case, Choice, Outcome, Tables, as_choice
from .search import SLACK, Search, Trials, brief, context_weights, error_table


def by_probes(case: Case, contexts: Contexts, runner: Runner) -> Outcome:
    """The paper's protocol: E and S are means over each head's contexts (of each phase)."""
    tasks = [
        Task("probe", p, s, wanted=tuple(sorted(wanted.items())), null=True)
        for (p, s), wanted in sorted(contexts.probes.items())
    ]
    records = runner.records("probes", tasks)
    weights = context_weights(case, runner, [(task.prompt, task.step) for task in tasks])
    rows: dict[tuple[int, int, int], list[dict[str, Any]]] = {}  # (phase, layer, head) -> its measurements
    nulls = []
    for task, of_task, weight in zip(tasks, records, weights):
        phase = case.phases.of_step(task.step)
        for (layer, _), record in zip(task.wanted, of_task):
            nulls += [{"prompt": task.prompt, "step": task.step, **record["null"]}] if "null" in record else []
            for head, values in record["heads"].items():
                rows.setdefault((phase, layer, int(head)), []).append(values | {"weight": float(weight)})
    tables = Tables(_means(case, rows, "sparsity"), _means(case, rows, "cost"))
    outcome = assign(case, contexts, runner, _means(case, rows, "error", weighed=True), tables)
    outcome.extra |= {
        "bands": _means(case, rows, "bands", weighed=True),
        "attention_error": _means(case, rows, "attention").tolist(),
        "null": {"worst": max((n["error"] for n in nulls), default=0.0), "probes": nulls},
        "probes": {
            "planned": len(case.settings.candidate_points) * sum(len(group) for group in rows.values()),
            "run": int(sum(row["runs"] for group in rows.values() for row in group)),
        },
    }
    return outcome


def _means(case: Case, rows: dict[tuple[int, int, int], list[dict[str, Any]]], name: str, weighed: bool = False) -> Any:
    """The mean of what each head's probes measured, [P, L, H, K, ...]."""

    def mean(phase: int, layer: int, head: int) -> np.ndarray:
        measured = rows.get((phase, layer, head))
        if measured is None:
            raise HeartError(
                f"no probe of layer {layer}, head {head} lies in phase {phase}: take as many strata as phases"
            )
        return np.mean([np.multiply(r["weight"] if weighed else 1.0, r[name]) for r in measured], axis=0)

    places = np.ndindex(case.phases.count, case.layers, case.heads)
    flat = [mean(*place) for place in places]
    return np.array(flat).reshape(case.phases.count, case.layers, case.heads, *flat[0].shape)


def assign(case: Case, contexts: Contexts, runner: Runner, E: np.ndarray, tables: Tables) -> Outcome:
    """The assignment of least ΣE, within the table's budget or, if `realised`, within what forwards show."""
    case.refuse_unreachable(tables)
    if case.settings.realised and case.kind in ("shared", "time"):
        trials = Trials(case, runner, contexts.calibration)
        target = case.target()
        if target is None:
            target = trials.verify("verifying, start", case.shared)["gain"]
        search = Search(case, trials, 0 * E, E, tables, 0)
        outcome = search.attempt(1.0, target, np.inf)
        if outcome is not None:
            outcome.error, outcome.extra = E, {"search": search.log}
            return outcome
    solved = case.solve(E, tables)
    return Outcome(E, tables, as_choice(solved.choice), solved.to_dict())


def _passes(trials: Trials, stage: str, choice: Choice) -> list[Pass]:
    of_step = trials.case.phases.of_step
    tasks = [Task("gradient", p, s, choice=choice[of_step(s)]) for p, s in trials.contexts]
    return [Pass.from_dict(records[0]) for records in trials.runner.records(stage, tasks)]


def _tables(trials: Trials, passes: list[Pass]) -> Tables:
    return trials.tables([p.sparsity for p in passes], [p.cost for p in passes])


def by_isolated(case: Case, contexts: Contexts, runner: Runner) -> Outcome:
    """The paper's objective by the token-diagonal estimate: one backward pass a context at the dense model."""
    dense = (((DENSE,) * case.heads,) * case.layers,) * case.phases.count
    trials = Trials(case, runner, contexts.calibration)
    passes = _passes(trials, "gradients", dense)
    return assign(case, contexts, runner, trials.mean([p.second for p in passes]), _tables(trials, passes))


def by_joint(case: Case, contexts: Contexts, runner: Runner) -> Outcome:
    """Rounds of gradient, knapsack on m + γD, verification; from the better of the reference and `isolated`."""
    choice, trials, settings = case.shared, Trials(case, runner, contexts.calibration), case.settings
    figures = trials.verify("verifying, start", choice)
    error, target = figures["error"], case.target()
    if target is None:  # what the reference really gains with all heads sparse
        target = figures["gain"]
    history: list[dict[str, Any]] = [{"round": 0, "start": "shared", **brief(figures)}]
    outcome, within = None, case.kind == "shared"
    if settings.start == "isolated":
        start = by_isolated(case, contexts, runner)
        figures = trials.verify("verifying, start", start.choice)
        history.append({"round": 0, "start": "isolated", **brief(figures)})
        fits = figures["gain"] >= target - SLACK or case.kind == "threshold"
        if fits and (figures["error"] < error or not within):
            outcome, choice, error, within = start, start.choice, figures["error"], True
            outcome.report["joint_error"] = error
    for number in range(1, settings.rounds + 1):
        passes = _passes(trials, f"gradients, round {number}", choice)
        m, D = (trials.mean([getattr(p, name) for p in passes]) for name in ("first", "second"))
        tables = _tables(trials, passes)
        case.refuse_unreachable(tables)
        search = Search(case, trials, m, D, tables, number)
        search.seen[choice] = trials.verify("verifying, start", choice)  # on record already
        better = search.run(choice, error if within else np.inf, target)
        history += search.log
        if better is None:
            break
        outcome, choice, error, within = better, better.choice, better.report["joint_error"], True
    if outcome is None:
        if not within:
            raise HeartError(f"no assignment within the budget {settings.budget} was found: give a larger one")
        solved = case.solve(error_table(m, D, settings.gamma), tables, target)  # nothing beats the start
        outcome = Outcome(error_table(m, D, settings.gamma), tables, choice, solved.to_dict())
    outcome.extra = {"search": history}
    return outcome


Method = Callable[[Case, Contexts, Runner], Outcome]
BY_NAME: dict[str, Method] = {"probes": by_probes, "isolated": by_isolated, "joint": by_joint}
