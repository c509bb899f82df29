"""Velocity error of a method along the dense trajectory: what it does to each step, without the drift of earlier ones.

Every step starts from the latents of the dense generation, and the guided velocity that reaches the scheduler is compared
with the dense one (the paper's spectral error, where latents are videos [B, C, T, H, W]). Mask reuse goes on from step to
step as in a generation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...calibration.measure import velocity_error
from ...execution.executor import LocalExecutor, Record, Worker
from ...files import write_json
from .. import results
from ..cases import Case, Cluster, Progress, opened
from ..generation import generate, view
from ..methods import DENSE
from ..run import Folder, dict_or_none

NAME = "velocity_error"
CONVENTION = "spectral error of the velocity at steps of the dense trajectory, mean over sparse steps; lower is nearer"


class _Trajectory:
    """The velocities that a dense generation gave its scheduler, and the latents that came back."""

    def __init__(self) -> None:
        self.velocities: list[torch.Tensor] = []
        self.answers: list[Any] = []

    def record(self, velocity: torch.Tensor, answer: Any) -> Any:
        """Keep a step."""
        self.velocities.append(velocity.detach().cpu())
        self.answers.append(answer)
        return answer


class _Errors:
    """Compares each velocity with the dense one and goes on from the dense latents."""

    def __init__(self, dense: _Trajectory) -> None:
        self.dense, self.errors = dense, []  # type: _Trajectory, list[float]

    def record(self, velocity: torch.Tensor, answer: Any) -> Any:
        """Note the step's error; the dense generation's latents are the answer."""
        step = len(self.errors)
        self.errors.append(_error(velocity.detach().cpu(), self.dense.velocities[step]))
        return self.dense.answers[step]


def _error(velocity: torch.Tensor, reference: torch.Tensor) -> float:
    if velocity.ndim == 5:
        return velocity_error.spectral(velocity, reference)
    flat = (x.reshape(len(x), 1, 1, 1, -1) for x in (velocity, reference))  # packed latents have no frequencies
    return velocity_error.velocity_mse(*flat)


@contextlib.contextmanager
def _scheduler_watched(pipe: Any, record: Callable[[torch.Tensor, Any], Any]) -> Iterator[Any]:
    """A view of the pipeline whose scheduler hands every velocity and answer to `record`."""
    mine = view(pipe)
    step = mine.scheduler.step

    @functools.wraps(step)  # pipelines look at its signature
    def watched(model_output: Any, timestep: Any, sample: Any, *args: Any, **more: Any) -> Any:
        return record(model_output, step(model_output, timestep, sample, *args, **more))

    mine.scheduler.step = watched
    yield mine


class VelocityWorker(Worker[Case]):
    """The velocity errors of a case's methods, by step."""

    def __init__(self, pipe: Any, progress: Progress | None = None) -> None:
        self.pipe, self.progress = pipe, progress

    @classmethod
    def on(cls, loader: Callable[[], Any]) -> VelocityWorker:
        """What a Ray worker calls."""
        return cls(loader())

    def run(self, task: Case, data: bytes | None = None) -> Iterator[Record]:
        """The dense generation once, then each method along it."""
        dense = _Trajectory()
        for method, name in task.methods:
            follower = None if method.name == DENSE else _Errors(dense)
            on_step = functools.partial(self.progress, method.name, 1) if self.progress else None
            with _scheduler_watched(self.pipe, (follower or dense).record) as pipe:
                generate(pipe, method, task.prompt, task.seed, task.setting, on_step)
            if follower is not None:
                yield name, follower.errors


def measure(
    pipe: Any,
    whole: Sequence[Case],
    folder: Folder,
    progress: Progress | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Have velocity errors on record for all methods of these cases."""
    left = [case for case in (_missing(case, folder) for case in whole) if case.wanted]
    with opened(cluster, VelocityWorker.on) as executor:
        for _, (name, errors) in (executor or LocalExecutor(VelocityWorker(pipe, progress))).do(left, lambda key: b""):
            write_json(_path(folder, name), {"errors": errors})


def _missing(case: Case, folder: Folder) -> Case:
    """The methods without a velocity error, and dense, which they follow."""
    wanted = {name for m, name in case.methods if m.name != DENSE and errors_of(folder, name) is None}
    left = tuple((m, name) for m, name in case.methods if m.name == DENSE or name in wanted)
    return dataclasses.replace(case, methods=left, wanted=frozenset(wanted))


def _path(folder: Folder, name: str) -> Any:
    return folder.out / "velocity" / f"{name}.json"


def errors_of(folder: Folder, name: str) -> list[float] | None:
    """The velocity errors of a generation by step, if they were measured; a damaged file counts as absent."""
    errors = (dict_or_none(_path(folder, name)) or {}).get("errors")
    known = isinstance(errors, list) and all(results.is_number(error) for error in errors)
    return errors if known else None


def attached(made: dict, whole: Sequence[Case], folder: Folder) -> dict:
    """Results with the velocity error of every row that has one."""
    names = {(case.prompt, case.seed, m.name): name for case in whole for m, name in case.methods}
    rows = []
    for row in made["rows"]:
        errors = errors_of(folder, names[row["prompt"], row["seed"], row["method"]])
        rows.append({**row, NAME: _mean(errors)})
    if all(row[NAME] is None for row in rows):
        return made
    return {**made, "rows": rows, "conventions": {**made["conventions"], NAME: CONVENTION}}


def _mean(errors: list[float] | None) -> float | None:
    """Over the sparse steps: dense ones have no error at all."""
    if errors is None:
        return None
    sparse = [e for e in errors if e > 0]
    return float(np.mean(sparse)) if sparse else 0.0
