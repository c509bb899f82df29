"""The three methods of a calibration, each from measurements to an assignment.

- `probes`: the paper's isolated probes, each head on its own prompt and steps;
- `isolated`: the same objective by one backward pass a context;
- `joint`: the true joint error with its gradient, in rounds, verified by forwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import HeartError
from ..measure.candidates import DENSE
from ..measure.gradient import Pass
from ..workflow.plan import Contexts
from ..workflow.runner import Choice, Runner
from ..workflow.settings import Settings
from ..workflow.tasks import Task
from .search import (
    SLACK,
    Outcome,
    Search,
    Trials,
    as_choice,
    context_weights,
    error_table,
    figures,
    reachable,
    shared_choice,
    solve,
)


def by_probes(settings: Settings, contexts: Contexts, runner: Runner, layers: int, heads: int) -> Outcome:
    """The paper's protocol: E and S are means over each head's contexts."""
    tasks = []
    for (p, s), wanted in sorted(contexts.probes.items()):
        tasks.append(Task("probe", p, s, wanted=tuple(sorted(wanted.items())), null=True))
    found = runner.records("probes", tasks)
    weights = context_weights(settings, runner, [(t.prompt, t.step) for t in tasks], layers, heads)
    sums: dict[tuple[int, int], list[dict[str, Any]]] = {}
    nulls = []
    for task, records, weight in zip(tasks, found, weights):
        for (layer, _), record in zip(task.wanted, records):
            nulls += [{"prompt": task.prompt, "step": task.step, **record["null"]}] if "null" in record else []
            for head, values in record["heads"].items():
                sums.setdefault((layer, int(head)), []).append(values | {"weight": weight})

    def table(name: str, weighed: bool = False) -> np.ndarray:
        def mean(rows: list[dict[str, Any]]) -> np.ndarray:
            return np.mean([np.multiply(r["weight"] if weighed else 1.0, r[name]) for r in rows], axis=0)

        return np.asarray([[mean(sums[la, h]) for h in range(heads)] for la in range(layers)])

    E, S = table("error", weighed=True), table("sparsity")
    extra = {
        "bands": table("bands", weighed=True).tolist(),
        "attention_error": table("attention").tolist(),
        "null": {"worst": max((n["error"] for n in nulls), default=0.0), "probes": nulls},
        "probes": {
            "planned": int(E.size * len(next(iter(sums.values())))),
            "run": int(sum(r["runs"] for rows in sums.values() for r in rows)),
        },
    }
    outcome = assign(settings, contexts, runner, E, S)
    outcome.extra |= extra
    return outcome


def assign(settings: Settings, contexts: Contexts, runner: Runner, E: np.ndarray, S: np.ndarray) -> Outcome:
    """The assignment of least ΣE, within the table's budget or, if `realised`, within what forwards show."""
    if settings.realised and settings.budget.kind == "shared":
        trials = Trials(settings, runner, contexts.calibration, *E.shape[:2])
        target = trials.verify("verifying, start", shared_choice(settings, *E.shape[:2]))["sparsity"]
        search = Search(settings, trials, 0 * E, E, S, 0)
        found = search.attempt(1.0, target, np.inf)
        if found is not None:
            found.error, found.extra = E, {"search": search.log}
            return found
    solved = solve(settings, E, S)
    return Outcome(E, S, as_choice(solved.choice), solved.to_dict())


def _passes(trials: Trials, stage: str, choice: Choice) -> list[Pass]:
    tasks = [Task("gradient", p, s, choice=choice) for p, s in trials.contexts]
    return [Pass.from_dict(records[0]) for records in trials.runner.records(stage, tasks)]


def by_isolated(settings: Settings, contexts: Contexts, runner: Runner, layers: int, heads: int) -> Outcome:
    """The paper's objective by the token-diagonal estimate: one way back a context at the dense model."""
    dense = ((DENSE,) * heads,) * layers
    trials = Trials(settings, runner, contexts.calibration, layers, heads)
    passes = _passes(trials, "gradients", dense)
    E = trials.mean([p.second for p in passes])
    S = np.mean([p.sparsity for p in passes], axis=0)
    return assign(settings, contexts, runner, E, S)


def by_joint(settings: Settings, contexts: Contexts, runner: Runner, layers: int, heads: int) -> Outcome:
    """Rounds of gradient, knapsack on m + γD, verification; from the better of the shared threshold and `isolated`."""
    choice = shared_choice(settings, layers, heads)
    trials = Trials(settings, runner, contexts.calibration, layers, heads)
    got = trials.verify("verifying, start", choice)
    budget, error = settings.budget, got["error"]
    # Without a budget of its own: what the shared threshold really leaves out with all heads sparse.
    target = budget.value if budget.kind == "sparsity" else got["sparsity"]
    history: list[dict[str, Any]] = [{"round": 0, "start": "shared", **figures(got)}]
    outcome, within = None, budget.kind == "shared"
    if settings.start == "isolated":
        start = by_isolated(settings, contexts, runner, layers, heads)
        got = trials.verify("verifying, start", start.choice)
        history.append({"round": 0, "start": "isolated", **figures(got)})
        fits = got["sparsity"] >= target - SLACK or budget.kind == "threshold"
        if fits and (got["error"] < error or not within):
            outcome, choice, error, within = start, start.choice, got["error"], True
            outcome.report["joint_error"] = error
    for number in range(1, settings.rounds + 1):
        passes = _passes(trials, f"gradients, round {number}", choice)
        m, D = (trials.mean([getattr(p, n) for p in passes]) for n in ("first", "second"))
        S = np.mean([p.sparsity for p in passes], axis=0)
        search = Search(settings, trials, m, D, S, number)
        search.seen[choice] = trials.verify("verifying, start", choice)  # on record already
        found = search.run(choice, error if within else np.inf, target)
        history += search.log
        if found is None:
            break
        outcome, choice, error, within = found, found.choice, found.report["joint_error"], True
    if outcome is None:
        if not within:
            raise HeartError(f"no assignment within the budget was found from the shared threshold {settings.shared}")
        solved = solve(settings, error_table(m, D, settings.gamma), S, reachable(S, target))  # nothing beats the start
        outcome = Outcome(error_table(m, D, settings.gamma), S, choice, solved.to_dict())
    outcome.extra = {"search": history}
    return outcome


BY_NAME = {"probes": by_probes, "isolated": by_isolated, "joint": by_joint}
