"""Pieces of calibration work and the worker that runs them: pure functions of (model, settings, task)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import HeartError
from ...execution.executor import Record, Worker
from ...models.caches import Cache
from .. import experts
from ..measure import gradient, probes, trajectory
from ..measure import velocity_error as errors
from ..measure.candidates import Spec
from ..measure.replay import Replay
from ..measure.sensitivity import phase_effects
from .store import digest


@dataclass(frozen=True)
class Task:
    """One piece of work: `kind` is "trajectory", "effects", "probe", "gradient" or "verify"."""

    kind: str
    prompt: int
    step: int = -1
    text: str = ""  # trajectory, effects: the prompt
    edges: tuple[float, ...] = ()  # effects: noise levels that bound the phases
    steps: tuple[int, ...] = ()  # trajectory: which are kept
    wanted: tuple[tuple[int, tuple[int, ...]], ...] = ()  # probe: heads of each layer
    null: bool = False  # probe: the floor is measured with the first layer of the context
    choice: tuple[tuple[int, ...], ...] = ()  # effects, gradient, verify: the assignment

    def names(self) -> list[str]:
        """The records that this task makes, in order."""
        name = f"{self.kind}_p{self.prompt:03d}"
        if self.data_key is None:
            return [name]
        name += f"_s{self.step:03d}"
        if self.kind == "probe":
            return [f"{name}_l{layer:03d}" for layer, _ in self.wanted]
        return [f"{name}_{digest(self.choice)[:16]}"]

    @property
    def data_key(self) -> tuple[int, int] | None:
        """The context that the task works on; whole generations are made from nothing."""
        return None if self.kind in ("trajectory", "effects") else (self.prompt, self.step)

    def without(self, done: set[str]) -> Task:
        """What is left of the task when some records are there."""
        left = tuple(w for w, name in zip(self.wanted, self.names()) if name not in done)
        first = bool(self.wanted) and self.names()[0] in done
        return replace(self, wanted=left, null=self.null and not first)


@dataclass(frozen=True)
class Job:
    """What a worker must know besides the model."""

    spec: Spec
    call: dict[str, Any]
    seed: int
    velocity: str
    error: str
    error_settings: dict[str, Any]
    transformer: str | None = None  # of a pipeline with two


class CalibrationWorker(Worker[Task]):
    """Runs calibration tasks on a pipeline's transformer.

    A cache that is on (see `models.caches`) stays on in whole generations, so that contexts are those that come up with it;
    single forwards are measured without.
    """

    def __init__(self, pipe: Any, job: Job):
        self.pipe, self.job = pipe, job
        self.measure = errors.by_name(job.error, **job.error_settings)
        self.transformer = experts.chosen(pipe, job.transformer)
        self.cache = Cache(self.transformer)
        self.cache.off()  # before the replay's own forwards of blocks are put in place: it wraps them when it is on
        self.replay = Replay(self.transformer, scheduler=pipe.scheduler)

    def close(self) -> None:
        """Give the model back as it was."""
        self.replay.close()
        self.cache.on()

    def run(self, task: Task, data: bytes | None) -> Iterator[Record]:
        """Do a task; `data` is its context. Records come as they are finished."""
        if task.kind == "trajectory":
            yield task.names()[0], self._trajectory(task)
            return
        if task.kind == "effects":
            job = self.job
            with self.cache.running():
                at = (task.prompt, task.text, job.call, job.seed, task.edges)
                effects = phase_effects(self.pipe, self.replay, job.spec, task.choice, *at)
            yield task.names()[0], effects
            return
        assert data is not None
        context = trajectory.from_bytes(data).to(next(self.transformer.parameters()).device)
        if self.job.velocity == "cond":
            context = context.conditional()
        if task.kind == "probe":
            wanted = {layer: list(heads) for layer, heads in task.wanted}
            layers = probes.probe(self.replay, context, wanted, self.job.spec, self.measure, task.null)
            yield from ((name, record) for name, (_, record) in zip(task.names(), layers))
        elif task.kind == "gradient":
            result = gradient.differentiate(
                self.replay, context, self.job.spec, task.choice, self.measure, self.job.seed
            )
            yield task.names()[0], result.to_dict()
        elif task.kind == "verify":
            yield (
                task.names()[0],
                gradient.verify(self.replay, context, self.job.spec, task.choice, self.measure),
            )
        else:
            raise HeartError(f"there is no calibration task of kind {task.kind!r}")

    def _trajectory(self, task: Task) -> dict[int, bytes]:
        found: list[trajectory.Context] = []
        with torch.no_grad(), self.cache.running():
            trajectory.record(
                self.pipe, self.replay, task.prompt, task.text, task.steps, self.job.call, self.job.seed, found.append,
                bool(self.cache),
            )  # fmt: skip
        contexts = {c.step: trajectory.to_bytes(self._whole(c) if self.cache else c) for c in found}
        missing = sorted(set(task.steps) - set(contexts))
        if missing:
            raise HeartError(
                f"the transformer did not run at steps {missing}: another model served them (Wan2.2 has two), give the "
                "number of steps that this one serves"
            )
        return contexts

    def _whole(self, context: trajectory.Context) -> trajectory.Context:
        """The context with what the transformer answers when nothing is taken from a cache."""
        device = next(self.transformer.parameters()).device
        with torch.no_grad(), self.replay.handler.serving(None):
            outputs = [self.replay.forward(b.inputs).cpu() for b in context.to(device).branches]
        return replace(context, branches=tuple(replace(b, output=o) for b, o in zip(context.branches, outputs)))


def set_up(load: Callable[[], Any], job: Job) -> CalibrationWorker:
    """A worker with a pipeline made by `load`; what a Ray worker calls."""
    pipe = load()
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)
    return CalibrationWorker(pipe, job)
