"""Doing the work of a calibration: records on disk are taken, the others made by an executor; progress is reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ...execution.executor import Executor
from .phases import Phases
from .plan import Contexts
from .settings import Settings
from .store import Store
from .tasks import Task

Progress = Callable[[str, int, int, float | None], None]
Choice = tuple[tuple[tuple[int, ...], ...], ...]  # the point of every head, [phases][layers][heads]


class Runner:
    """Has tasks run by an executor and keeps their records."""

    def __init__(self, store: Store, executor: Executor[Task], progress: Progress | None, phases: Phases):
        self.store, self.executor, self.phases = store, executor, phases
        self.progress = progress or (lambda *_: None)

    def _read(self, key: tuple[int, int]) -> bytes:
        return self.store.trajectories.read(*key)

    def trajectories(self, settings: Settings, contexts: Contexts) -> None:
        """Make sure that every context is on disk."""
        texts = (*settings.prompts, *settings.held_out)
        wanted = contexts.steps()
        tasks = [
            Task("trajectory", p, text=texts[p], steps=steps)
            for p, steps in wanted.items()
            if not self.store.trajectories.has(p, steps)
        ]
        report = _Stage(self.progress, "trajectories", len(wanted), len(wanted) - len(tasks))
        for task, (_, files) in self.executor.do(tasks, self._read):
            with self.store.writing():
                self.store.trajectories.write(task.prompt, files)
            report.one()

    def records(self, stage: str, tasks: Sequence[Task]) -> list[list[Any]]:
        """The records of each task, from the folder where they are there, else made now."""
        names = [task.names() for task in tasks]
        known = {n: self.store.get(n) for group in names for n in group}
        have = {n for n, value in known.items() if value is not None}
        left = [task.without(have) for task, group in zip(tasks, names) if not have.issuperset(group)]
        report = _Stage(self.progress, stage, len(known), len(have))
        for _, (name, value) in self.executor.do(left, self._read):
            known[name] = self.store.put(name, value)
            report.one()
        return [[known[n] for n in group] for group in names]

    def verified(self, stage: str, contexts: Iterable[tuple[int, int]], choice: Choice) -> list[dict[str, Any]]:
        """What forwards show of an assignment [phases][layers][heads] in each context."""
        of_step = self.phases.of_step
        tasks = [Task("verify", p, s, choice=choice[of_step(s)]) for p, s in contexts]
        return [records[0] for records in self.records(stage, tasks)]

    def verify(self, stage: str, contexts: Iterable[tuple[int, int]], choice: Choice) -> dict[str, Any]:
        """True joint error and realised sparsity of an assignment, as plain means over contexts."""
        return figures_of(self.verified(stage, contexts, choice))


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Plain means over contexts of what forwards showed."""
    return {
        "error": float(np.mean([r["error"] for r in rows])),
        "sparsity": float(np.mean([r["sparsity"] for r in rows])),
        "cost": float(np.mean([r["cost"] for r in rows])),
        "errors": [r["error"] for r in rows],
        "bands": np.mean([r["bands"] for r in rows], axis=0).tolist(),
    }


class _Stage:
    """Tells progress how far a stage is and how long the rest will take."""

    def __init__(self, progress: Progress, stage: str, total: int, done: int):
        self.progress, self.stage, self.total, self.done = progress, stage, total, done
        self.start, self.first = time.monotonic(), done
        self.progress(stage, done, total, None if done < total else 0.0)

    def one(self) -> None:
        """One more is finished."""
        self.done += 1
        pace = (time.monotonic() - self.start) / max(1, self.done - self.first)
        self.progress(self.stage, self.done, self.total, pace * (self.total - self.done))
