"""One (prompt, seed) with all its methods as a task for an executor: in this process, or on a Ray cluster.

A task's methods run on one worker, dense first, so that a ratio of times never crosses devices. The worker answers with
whole records, videos included; the caller alone writes its folder. So a run on a cluster leaves what a local one leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..execution.executor import Executor, LocalExecutor, Record, Worker
from . import generation, metrics, results, timing, video
from .generation import Setting
from .methods import DENSE, Method

Progress = Callable[[str, int], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """The methods of one (prompt, seed) that are to be generated, dense first.

    Args:
        methods: each with the name of its record.
        wanted: the records to make; dense may run along for its times only.
        warm: whether a worker tries each method on a few steps before the first generation with it.
    """

    prompt: str
    seed: int
    methods: tuple[tuple[Method, str], ...]
    wanted: frozenset[str]
    setting: Setting
    warm: bool = True

    data_key = None

    def names(self) -> list[str]:
        """The records that this task makes, in order."""
        return [name for _, name in self.methods if name in self.wanted]


class CaseWorker(Worker[Case]):
    """Generates the methods of a case, in turns where that makes times comparable.

    A record's value is `{"row": …, "stats": …, "files": {path in the results folder: bytes}}`.
    """

    def __init__(self, pipe: Any, progress: Progress | None = None) -> None:
        self.pipe, self.progress = pipe, progress
        self.warmed: set[tuple[str, str]] = set()

    @classmethod
    def on(cls, loader: Callable[[], Any]) -> CaseWorker:
        """What a Ray worker calls."""
        return cls(loader())

    def run(self, task: Case, data: bytes | None = None) -> Iterator[Record]:
        """All methods of a case; records come when the last one is done."""
        from ..models import regional_compile

        if not task.setting.timed:
            with regional_compile.compiled(self.pipe, task.setting.compile_blocks):
                yield from self._untimed(task)
            return
        with regional_compile.compiled(self.pipe, task.setting.compile_blocks):  # once for all, since turns interleave
            self._warm_up(task)
            before = timing.cpu_wait()
            jobs = [self._job(method, task) for method, _ in task.methods]
            turns = generation.takes_turns(self.pipe, task.setting) and len(jobs) > 1
            made = timing.in_turns(jobs) if turns else [job(None) for job in jobs]
        waited = timing.waited_share(before, timing.cpu_wait())
        reference, dense = made[0]
        for (method, name), (frames, row) in zip(task.methods, made):
            if name not in task.wanted:
                continue
            row |= self._beside(dense, waited)
            if method.name != DENSE and task.methods[0][1] in task.wanted:  # else against the stored dense video, later
                row |= metrics.compare(frames, reference, task.setting.metrics)
            yield name, pack(row, frames, task.setting, name)

    def _untimed(self, task: Case) -> Iterator[Record]:
        """The methods one after the other, for their videos alone."""
        reference, (device, place) = None, device_of(self.pipe)
        for method, name in task.methods:
            frames, row = self._job(method, task)(None)
            row |= {"timed": False, "device": device, "place": place}
            if method.name == DENSE:
                reference = frames
            elif reference is not None:
                row |= metrics.compare(frames, reference, task.setting.metrics)
            yield name, pack(row, frames, task.setting, name)

    def _warm_up(self, task: Case) -> None:
        new = {(str(m.config.to_dict()), str(task.setting.call)): m for m, _ in task.methods}
        left = [m for key, m in new.items() if task.warm and key not in self.warmed]
        generation.warm_up(self.pipe, left, task.prompt, task.setting)
        self.warmed |= new.keys()

    def _job(self, method: Method, task: Case) -> Callable[[Callable[[], None] | None], tuple[np.ndarray, dict]]:
        progress = self.progress
        on_step = (lambda: progress(method.name, 1)) if progress else None
        return lambda pause: generation.generate(
            self.pipe, method, task.prompt, task.seed, task.setting, on_step, pause
        )

    def _beside(self, dense: dict, waited: float | None) -> dict[str, Any]:
        """What a row knows of the dense generation beside it, and of the machine."""
        device, place = device_of(self.pipe)
        return {
            "reference_s": {key: dense[key] for key in ("attention_s", "total_s")},
            "reference_steps_s": dense["steps_s"],
            "spread": timing.spread(dense["steps_s"]),
            "waited": waited,
            "device": device,
            "place": place,
        }


def device_of(pipe: Any) -> tuple[str, str]:
    """The kind of device that a pipeline runs on, and a short name that tells one such device from another."""
    import torch

    device = generation.device_of(pipe)
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        kind, which = facts.name, str(getattr(facts, "uuid", device.index))
    else:
        kind, which = results.cpu_name() or platform.machine(), ""
    return kind, hashlib.sha256(f"{platform.node()} {which}".encode()).hexdigest()[:8]


def pack(row: dict, frames: np.ndarray, setting: Setting, name: str) -> dict[str, Any]:
    """A generation as it goes into a results folder: its row and the bytes of its files."""
    row = dict(row)
    stats = row.pop("stats")
    row["stats"], row["video"], row["lossless"] = f"stats/{name}.json", f"videos/{name}.mp4", f"videos/{name}.mkv"
    with tempfile.TemporaryDirectory(prefix="heart-") as folder:
        shown = video.write_mp4(Path(folder) / "a.mp4", frames, setting.fps).read_bytes()
        exact = video.write_lossless(Path(folder) / "a.mkv", frames, setting.fps).read_bytes()
    row["bytes"] = {row["video"]: len(shown), row["lossless"]: len(exact)}
    return {"row": row, "stats": stats, "files": {row["video"]: shown, row["lossless"]: exact}}


# ---------------------------------------- executors


def local(pipe: Any, progress: Progress | None = None) -> Executor[Case]:
    """Cases one after the other in this process."""
    return LocalExecutor(CaseWorker(pipe, progress))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A Ray cluster: its address ("auto" or one), what makes the pipeline on each worker, how many workers (None: all)."""

    ray: str
    loader: Callable[[], Any]
    workers: int | None = None


@contextlib.contextmanager
def opened(
    cluster: Cluster | None, set_up: Callable[[Callable[[], Any]], Worker[Case]] | None = None
) -> Iterator[Executor[Case] | None]:
    """An executor of cases on a cluster, closed at the end; None for none. `set_up` makes a worker from the loader."""
    if cluster is None:
        yield None
        return
    from ..execution.ray import RayExecutor

    with RayExecutor(
        cluster.ray, functools.partial(set_up or CaseWorker.on, cluster.loader), cluster.workers
    ) as executor:
        yield executor
