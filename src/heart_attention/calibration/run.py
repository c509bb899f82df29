"""A whole calibration: plan, dense trajectories, measurements, assignment, verification; resumable at any point.

Every piece of work is a pure function of the plan and the model and leaves one record in the work folder, so a
calibration that was killed goes on where it was and ends in the same bytes. Three methods share everything else:

- `probes`: the paper's isolated probes, each head on its own prompt and steps;
- `isolated`: the same objective by one backward pass a context;
- `joint`: the true joint error with its gradient, in rounds, verified by forwards.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import HeartError
from ..models import family_of
from . import draws, file, solver, trajectory
from .gradient import Pass
from .heads import DENSE, Spec
from .store import Store
from .work import Crew, Job, Local, Task, Worker

logger = logging.getLogger(__name__)

METHODS = ("joint", "isolated", "probes")
PAPER_CANDIDATES = (0.85, 0.9, 0.95)
SLACK = 1e-4  # realised sparsity may miss the budget by this much
CANDIDATES = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
Progress = Callable[[str, int, int, float | None], None]
Choice = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Settings:
    """What is calibrated and how.

    Args:
        backbone: `XAttention(...)` or `SVG2(...)` with the settings that inference will use.
        prompts: texts of the calibration prompts; `held_out`: of prompts used for nothing but verification.
        call: what the pipeline is called with: height, width, num_frames, num_inference_steps, guidance_scale ...
        method: "joint", "isolated" or "probes".
        candidates: thresholds to choose from; None: the paper's three for probes, seven for the others.
        shared: the shared threshold that is the start, the comparison and, without another budget, the budget.
        strata: "paper" or "sparse" step intervals; None: paper for probes, sparse for the others.
        velocity: "guided" (what the sampler uses) or "cond" (the conditional branch alone).
        error: a name that `error.by_name` knows, with `error_settings`.
        contexts, held_out_contexts: how many (prompt, step) pairs for gradients and for verification.
        rounds, gamma, start: of the joint method; gamma is where the line search starts, `start` is "shared" or
            "isolated" (one backward pass a context more, a better place to begin).
        min_sparsity, max_mean_threshold: a budget other than the shared threshold's sparsity.
        realised: match the sparsity that the shared threshold really has with all heads sparse, checked by forwards,
            rather than the mean of the table. None: so for joint and isolated, the table (the paper's way) for probes.
        dense_steps: steps that stay dense at inference.
        order, kernel, scale_clusters: as in `HeartConfig`.
    """

    backbone: Any
    prompts: tuple[str, ...]
    call: dict[str, Any]
    method: str = "joint"
    candidates: tuple[float, ...] | None = None
    shared: float = 0.9
    strata: str | None = None
    velocity: str = "guided"
    error: str = "spectral"
    error_settings: dict[str, Any] = field(default_factory=dict)
    held_out: tuple[str, ...] = ()
    seed: int = 0
    dense_steps: int = 5
    order: str = "raster"
    contexts: int = 6
    held_out_contexts: int = 6
    rounds: int = 1
    gamma: float = 2.0
    start: str = "isolated"
    min_sparsity: float | None = None
    max_mean_threshold: float | None = None
    realised: bool | None = None
    kernel: str = "auto"
    scale_clusters: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise HeartError(f"the method is one of {', '.join(METHODS)}, not {self.method!r}")
        if self.velocity not in ("guided", "cond"):
            raise HeartError(f"the velocity is 'guided' or 'cond', not {self.velocity!r}")
        if self.start not in ("shared", "isolated"):
            raise HeartError(f"the joint method starts from 'shared' or 'isolated', not {self.start!r}")
        if not self.prompts:
            raise HeartError("there are no prompts to calibrate on: give at least one")
        if self.min_sparsity is not None and self.max_mean_threshold is not None:
            raise HeartError("give one budget only: min_sparsity or max_mean_threshold")
        given = self.candidates or (PAPER_CANDIDATES if self.method == "probes" else CANDIDATES)
        taus = tuple(sorted({float(t) for t in given}))
        if not all(0 < t <= 1 for t in taus):
            raise HeartError(f"candidate thresholds lie in 0 … 1, not {taus}")
        if not 0 < self.shared <= 1:
            raise HeartError(f"the shared threshold lies in 0 … 1, not {self.shared}")
        object.__setattr__(self, "candidates", tuple(sorted({*taus, float(self.shared)})))
        object.__setattr__(self, "strata", self.strata or ("paper" if self.method == "probes" else "sparse"))
        if self.realised is None:
            object.__setattr__(self, "realised", self.method != "probes")
        object.__setattr__(self, "prompts", tuple(self.prompts))
        object.__setattr__(self, "held_out", tuple(self.held_out))

    @property
    def steps(self) -> int:
        """Denoising steps of a generation."""
        return int(self.call.get("num_inference_steps", 50))

    @property
    def taus(self) -> tuple[float, ...]:
        """The candidates, ascending, the shared threshold among them."""
        assert self.candidates is not None
        return self.candidates

    def spec(self) -> Spec:
        """What heads are run with."""
        return Spec(self.backbone, self.taus, self.order, self.kernel, self.scale_clusters)

    def job(self) -> Job:
        """What workers must know."""
        return Job(self.spec(), dict(self.call), self.seed, self.velocity, self.error, dict(self.error_settings))


# --- the plan ---


@dataclass(frozen=True)
class Contexts:
    """The (prompt, step) pairs of a calibration; held-out prompts are numbered after the calibration prompts."""

    probes: dict[tuple[int, int], dict[int, tuple[int, ...]]]  # (prompt, step) -> layer -> heads
    calibration: list[tuple[int, int]]
    held_out: list[tuple[int, int]]

    def steps(self) -> dict[int, tuple[int, ...]]:
        """The steps of each prompt that must be recorded."""
        found: dict[int, set[int]] = {}
        for p, s in [*self.probes, *self.calibration, *self.held_out]:
            found.setdefault(p, set()).add(s)
        return {p: tuple(sorted(steps)) for p, steps in sorted(found.items())}


def draw_contexts(settings: Settings, layers: int, heads: int) -> Contexts:
    """All draws of a calibration: pure functions of the seed."""
    count, seed = len(settings.prompts), settings.seed
    intervals = draws.strata(settings.steps, settings.strata or "sparse", settings.dense_steps)
    probes: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
    if settings.method == "probes":
        prompt = draws.prompt_of_heads(seed, layers, heads, count)
        for layer in range(layers):
            for head in range(heads):
                for step in draws.steps_of_head(seed, layer, head, intervals):
                    at = probes.setdefault((int(prompt[layer, head]), step), {})
                    at[layer] = (*at.get(layer, ()), head)
    used = draws.strata(settings.steps, "sparse", settings.dense_steps)
    common = intervals if settings.method != "probes" else used
    calibration = draws.contexts(seed, "calibration", count, common, settings.contexts)
    held_out: list[tuple[int, int]] = []
    if settings.held_out and settings.held_out_contexts:
        drawn = draws.contexts(seed, "held-out", len(settings.held_out), used, settings.held_out_contexts)
        held_out = [(count + p, s) for p, s in drawn]
    return Contexts(probes, calibration, held_out)


def weights_sample(transformer: Any) -> str:
    """SHA-256 over some numbers of every weight: tells other values of the same shapes without reading them all."""
    found = hashlib.sha256()
    for name, weight in sorted(transformer.named_parameters()):
        flat = weight.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", copy=True).float()
        found.update(name.encode() + some.numpy().tobytes())
    return found.hexdigest()


def plan(pipe: Any, settings: Settings) -> dict[str, Any]:
    """Everything that decides the result, as plain JSON; its hash names the work."""
    return {
        "model": file.fingerprint(pipe.transformer),
        "weights": weights_sample(pipe.transformer),
        "scheduler": type(pipe.scheduler).__name__,
        "backbone": settings.backbone.to_dict(),
        **{n: getattr(settings, n) for n in _PLAIN},
        "call": dict(settings.call),
        "error_settings": dict(settings.error_settings),
        "generator": draws.GENERATOR,
        "versions": file.versions(),
    }


_PLAIN = (
    "method", "candidates", "shared", "strata", "velocity", "error", "prompts", "held_out", "seed", "dense_steps",
    "order", "contexts", "held_out_contexts", "rounds", "gamma", "start", "min_sparsity", "max_mean_threshold",
    "realised", "kernel", "scale_clusters",
)  # fmt: skip


# --- running ---


class Runner:
    """Does tasks through a crew, with records as memory."""

    def __init__(self, store: Store, crew: Crew, progress: Progress | None):
        self.store, self.crew = store, crew
        self.progress = progress or (lambda *_: None)

    def trajectories(self, settings: Settings, contexts: Contexts) -> None:
        """Make sure that every context is on disk."""
        texts = (*settings.prompts, *settings.held_out)
        wanted = contexts.steps()
        tasks = [
            Task("trajectory", p, text=texts[p], steps=steps)
            for p, steps in wanted.items()
            if not self.store.trajectories.has(p, steps)
        ]
        report = _Clock(self.progress, "trajectories", len(wanted), len(wanted) - len(tasks))
        for task, (_, files) in self.crew.do(tasks, self.store.trajectories.read):
            with self.store.writing():
                self.store.trajectories.write(task.prompt, files)
            report.one()

    def records(self, stage: str, tasks: Sequence[Task]) -> list[list[Any]]:
        """The records of each task, from the folder where they are there, else made now."""
        names = [task.names() for task in tasks]
        known = {n: self.store.get(n) for group in names for n in group}
        have = {n for n, value in known.items() if value is not None}
        left = [task.without(have) for task, group in zip(tasks, names) if not have.issuperset(group)]
        report = _Clock(self.progress, stage, len(known), len(have))
        for _, (name, value) in self.crew.do(left, self.store.trajectories.read):
            known[name] = self.store.put(name, value)
            report.one()
        return [[known[n] for n in group] for group in names]

    def verify(self, stage: str, contexts: Iterable[tuple[int, int]], choice: Choice) -> dict[str, Any]:
        """True joint error and realised sparsity of an assignment over contexts."""
        tasks = [Task("verify", p, s, choice=choice) for p, s in contexts]
        found = [records[0] for records in self.records(stage, tasks)]
        return {
            "error": float(np.mean([r["error"] for r in found])),
            "sparsity": float(np.mean([r["sparsity"] for r in found])),
            "errors": [r["error"] for r in found],
            "bands": np.mean([r["bands"] for r in found], axis=0).tolist(),
        }


class _Clock:
    """Tells progress how far a stage is and how long the rest will take."""

    def __init__(self, progress: Progress, stage: str, total: int, done: int):
        self.progress, self.stage, self.total, self.done = progress, stage, total, done
        self.start, self.first = time.monotonic(), done
        self.progress(stage, done, total, None if done < total else 0.0)

    def one(self) -> None:
        """One more is finished."""
        self.done += 1
        each = (time.monotonic() - self.start) / max(1, self.done - self.first)
        self.progress(self.stage, self.done, self.total, each * (self.total - self.done))


def shared_choice(settings: Settings, layers: int, heads: int) -> Choice:
    """The assignment of the shared threshold to every head."""
    return ((settings.taus.index(settings.shared),) * heads,) * layers


def _tuples(choice: np.ndarray) -> Choice:
    return tuple(tuple(int(c) for c in row) for row in choice)


@dataclass
class Outcome:
    """What a method found: tables [L, H, K], the solver's report, the chosen candidates."""

    error: np.ndarray
    sparsity: np.ndarray
    choice: Choice
    report: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


def _solve(settings: Settings, E: np.ndarray, S: np.ndarray, min_sparsity: float | None = None) -> solver.Result:
    """The assignment within the budget; `min_sparsity` overrides the sparsity of the shared threshold."""
    if settings.max_mean_threshold is not None:
        return solver.solve(E, S, max_mean_threshold=settings.max_mean_threshold, thresholds=settings.taus)
    least = settings.min_sparsity if min_sparsity is None else min_sparsity
    if least is None:
        return solver.solve(E, S, shared=settings.shared, thresholds=settings.taus)
    return solver.solve(E, S, min_sparsity=least, thresholds=settings.taus)


# --- the three methods ---


def by_probes(settings: Settings, contexts: Contexts, runner: Runner, layers: int, heads: int) -> Outcome:
    """The paper's protocol: E and S are means over each head's contexts."""
    tasks = []
    for (p, s), wanted in sorted(contexts.probes.items()):
        tasks.append(Task("probe", p, s, wanted=tuple(sorted(wanted.items())), null=True))
    found = runner.records("probes", tasks)
    sums: dict[tuple[int, int], list[dict[str, Any]]] = {}
    nulls = []
    for task, records in zip(tasks, found):
        for (layer, _), record in zip(task.wanted, records):
            nulls += [{"prompt": task.prompt, "step": task.step, **record["null"]}] if "null" in record else []
            for head, values in record["heads"].items():
                sums.setdefault((layer, int(head)), []).append(values)

    def table(name: str) -> np.ndarray:
        rows = [[np.mean([r[name] for r in sums[la, h]], axis=0) for h in range(heads)] for la in range(layers)]
        return np.asarray(rows)

    E, S = table("error"), table("sparsity")
    extra = {
        "bands": table("bands").tolist(),
        "attention_error": table("attention").tolist(),
        "null": {"worst": max((n["error"] for n in nulls), default=0.0), "probes": nulls},
        "probes": {
            "planned": int(E.size * len(next(iter(sums.values())))),
            "run": int(sum(r["runs"] for rows in sums.values() for r in rows)),
        },
    }
    outcome = _assign(settings, contexts, runner, E, S)
    outcome.extra |= extra
    return outcome


def _assign(settings: Settings, contexts: Contexts, runner: Runner, E: np.ndarray, S: np.ndarray) -> Outcome:
    """The assignment of least ΣE, within the table's budget or, if `realised`, within what forwards show."""
    if settings.realised and settings.min_sparsity is None and settings.max_mean_threshold is None:
        shared = shared_choice(settings, *E.shape[:2])
        target = runner.verify("verifying, start", contexts.calibration, shared)["sparsity"]
        search = _Search(settings, runner, contexts.calibration, 0 * E, E, S, 0)
        found = search.attempt(1.0, target, np.inf)
        if found is not None:
            found.error, found.extra = E, {"search": search.log}
            return found
    solved = _solve(settings, E, S)
    return Outcome(E, S, _tuples(solved.choice), solved.to_dict())


def _passes(runner: Runner, stage: str, contexts: Sequence[tuple[int, int]], choice: Choice) -> list[Pass]:
    tasks = [Task("gradient", p, s, choice=choice) for p, s in contexts]
    return [Pass.from_dict(records[0]) for records in runner.records(stage, tasks)]


def by_isolated(settings: Settings, contexts: Contexts, runner: Runner, layers: int, heads: int) -> Outcome:
    """The paper's objective by the cell-diagonal estimate: one backward pass a context at the dense model."""
    dense = ((DENSE,) * heads,) * layers
    passes = _passes(runner, "gradients", contexts.calibration, dense)
    E = np.mean([p.second for p in passes], axis=0)
    S = np.mean([p.sparsity for p in passes], axis=0)
    return _assign(settings, contexts, runner, E, S)


def by_joint(settings: Settings, contexts: Contexts, runner: Runner, layers: int, heads: int) -> Outcome:
    """Rounds of gradient, knapsack on m + γD, verification; from the better of the shared threshold and `isolated`."""
    choice = shared_choice(settings, layers, heads)
    got = runner.verify("verifying, start", contexts.calibration, choice)
    error, target = got["error"], settings.min_sparsity
    if target is None:
        target = got["sparsity"]  # what the shared threshold really leaves out with all heads sparse
    history: list[dict[str, Any]] = [{"round": 0, "start": "shared", **_figures(got)}]
    outcome, within = None, settings.min_sparsity is None and settings.max_mean_threshold is None
    if settings.start == "isolated":
        start = by_isolated(settings, contexts, runner, layers, heads)
        got = runner.verify("verifying, start", contexts.calibration, start.choice)
        history.append({"round": 0, "start": "isolated", **_figures(got)})
        fits = got["sparsity"] >= target - SLACK or settings.max_mean_threshold is not None
        if fits and (got["error"] < error or not within):
            outcome, choice, error, within = start, start.choice, got["error"], True
            outcome.report["joint_error"] = error
    for number in range(1, settings.rounds + 1):
        passes = _passes(runner, f"gradients, round {number}", contexts.calibration, choice)
        m, D, S = (np.mean([getattr(p, n) for p in passes], axis=0) for n in ("first", "second", "sparsity"))
        search = _Search(settings, runner, contexts.calibration, m, D, S, number)
        search.seen[choice] = runner.verify("verifying, start", contexts.calibration, choice)  # on record already
        found = search.run(choice, error if within else np.inf, target)
        history += search.log
        if found is None:
            break
        outcome, choice, error, within = found, found.choice, found.report["joint_error"], True
    if outcome is None:
        if not within:
            raise HeartError(f"no assignment within the budget was found from the shared threshold {settings.shared}")
        solved = _solve(settings, _table(m, D, settings.gamma), S, _reachable(S, target))  # nothing beats the start
        outcome = Outcome(_table(m, D, settings.gamma), S, choice, solved.to_dict())
    outcome.extra = {"search": history}
    return outcome


def _figures(got: dict[str, Any]) -> dict[str, Any]:
    return {k: got[k] for k in ("error", "sparsity")}


def _table(m: np.ndarray, D: np.ndarray, gamma: float) -> np.ndarray:
    """m + γD with each head's least at 0: a constant a head changes no choice, and errors are not negative."""
    E = m + gamma * D
    return E - E.min(-1, keepdims=True)


class _Search:
    """The line search on γ of one round: doubled until accepted, then its neighbours."""

    def __init__(
        self, settings: Settings, runner: Runner, contexts: Sequence[tuple[int, int]], m: np.ndarray, D: np.ndarray,
        S: np.ndarray, number: int,
    ):  # fmt: skip
        self.settings, self.runner, self.contexts, self.number = settings, runner, contexts, number
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
            solved = _solve(self.settings, E, self.S, _reachable(self.S, need))
            self.moved = choice = _tuples(solved.choice)
            new = choice not in self.seen
            if new:
                self.seen[choice] = self.runner.verify(f"verifying, round {self.number}", self.contexts, choice)
            got = self.seen[choice]
            short = target - got["sparsity"] if self.settings.max_mean_threshold is None else 0.0
            accepted = short <= SLACK and got["error"] < bar
            if new:
                self.log.append({"round": self.number, "gamma": gamma, "accepted": bool(accepted), **_figures(got)})
            if accepted:
                report = solved.to_dict() | {"gamma": gamma, "round": self.number, "joint_error": got["error"]}
                outcome = Outcome(_table(self.m, self.D, gamma), self.S, choice, report)
            if short <= SLACK:
                break
            need += short
        return outcome


def _reachable(S: np.ndarray, need: float) -> float:
    """`need`, or the most that any assignment reaches if that is less."""
    return min(need, float(S.max(-1).mean()))


_BY = {"probes": by_probes, "isolated": by_isolated, "joint": by_joint}


# --- the whole ---


def calibrate(
    pipe: Any,
    settings: Settings,
    work: Any,
    *,
    resume: bool = True,
    progress: Progress | None = None,
    ray: str | None = None,
    loader: Callable[[], Any] | None = None,
    workers: int | None = None,
) -> Any:
    """Calibrate a pipeline's transformer; returns a `file.Calibration` for the caller to save.

    Args:
        work: the work folder; with `resume` a calibration that was stopped goes on there.
        progress: called with (stage, done, total, seconds left or None).
        ray: "auto" or the address of a Ray cluster to spread the work over; `loader` then makes the pipeline there.
        workers: how many Ray workers; None: as many as the cluster has room for.
    """
    outcome, verification, document = measure(
        pipe, settings, work, resume=resume, progress=progress, ray=ray, loader=loader, workers=workers
    )
    return _to_file(settings, outcome, verification, document)


def measure(
    pipe: Any, settings: Settings, work: Any, *, resume: bool = True, progress: Progress | None = None,
    ray: str | None = None, loader: Callable[[], Any] | None = None, workers: int | None = None,
) -> tuple[Outcome, dict[str, Any], dict[str, Any]]:  # fmt: skip
    """All of a calibration but the file: outcome, verification figures, plan."""
    if getattr(pipe, "transformer_2", None) is not None:
        raise HeartError(
            "this pipeline has two transformers: calibrate each as a pipeline of its own (transformer_2=None)"
        )
    document = plan(pipe, settings)
    store = Store(work, document, resume)
    layers, heads = document["model"]["layers"], document["model"]["heads"]
    with store.held():
        crew = _crew(pipe, settings, ray, loader, workers)
        try:
            runner = Runner(store, crew, progress)
            contexts = draw_contexts(settings, layers, heads)
            runner.trajectories(settings, contexts)
            outcome = _BY[settings.method](settings, contexts, runner, layers, heads)
            verification = _verification(settings, contexts, runner, outcome, layers, heads)
        finally:
            crew.close()
    return outcome, verification, {**document, "grid": _grid(pipe.transformer, store, contexts)}


def _grid(transformer: Any, store: Store, contexts: Contexts) -> list[int] | None:
    """Video tokens (frames, rows, columns) of the generations that were measured, from any recorded context."""
    prompt, steps = next(iter(contexts.steps().items()))
    inputs = trajectory.from_bytes(store.trajectories.read(prompt, steps[0])).branches[0].inputs
    grid = family_of(transformer).grid(transformer.config, inputs)
    return None if grid is None else [int(n) for n in grid]


def _crew(
    pipe: Any, settings: Settings, ray: str | None, loader: Callable[[], Any] | None, workers: int | None = None
) -> Crew:
    if ray is None:
        return Local(Worker(pipe, settings.job()))
    from .ray import RayCrew

    if loader is None:
        raise HeartError("calibrating on Ray needs a loader, which makes the pipeline on each worker")
    return RayCrew(ray, loader, settings.job(), workers)


def _verification(
    settings: Settings, contexts: Contexts, runner: Runner, outcome: Outcome, layers: int, heads: int
) -> dict[str, Any]:
    """Joint error and realised sparsity of the shared threshold and of the choice, where calibrated and held out."""
    shared = shared_choice(settings, layers, heads)
    out: dict[str, Any] = {}
    for name, where in (("calibration", contexts.calibration), ("held_out", contexts.held_out)):
        if where:
            out[name] = {
                "contexts": [list(c) for c in where],
                "shared": runner.verify(f"verifying, {name.replace('_', ' ')}", where, shared),
                "chosen": runner.verify(f"verifying, {name.replace('_', ' ')}", where, outcome.choice),
            }
    return out


def _to_file(settings: Settings, outcome: Outcome, verification: dict[str, Any], document: dict[str, Any]) -> Any:
    taus = np.asarray(settings.taus)
    extra = dict(outcome.extra)
    bands = extra.pop("bands", None)
    call = settings.call
    kept = (
        "shared", "strata", "velocity", "dense_steps", "order", "scale_clusters", "contexts", "rounds", "gamma",
        "start", "realised", "weights", "grid",
    )  # fmt: skip
    return file.Calibration(
        thresholds=taus[np.asarray(outcome.choice)],
        backbone=settings.backbone.to_dict(),
        method=settings.method,
        model=document["model"],
        candidates=taus,
        E=outcome.error,
        S=outcome.sparsity,
        bands=bands,
        error={"name": settings.error, **settings.error_settings},
        solver=outcome.report,
        verification=verification,
        height=call.get("height"),
        width=call.get("width"),
        frames=call.get("num_frames"),
        steps=settings.steps,
        scheduler=document["scheduler"],
        prompts={"count": len(settings.prompts), "hash": file.prompts_hash(settings.prompts)},
        seed=settings.seed,
        versions=file.versions(),
        settings={name: document[name] for name in kept}
        | {"generator": draws.GENERATOR, "guidance_scale": call.get("guidance_scale")},
        extra=extra,
    )
