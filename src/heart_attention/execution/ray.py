"""Calibration spread over machines with Ray: actors that each hold the model, work dealt out, losses made good.

Contexts travel through Ray's object store, so workers need no shared folder; the driver alone writes records. A
worker that dies takes at most its present task with it: the task goes to another, and a new worker is started in
its place. Tasks are pure functions, so the result is that of a local run (on CPUs bit for bit, with as many
threads a worker as the local run has).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..calibration.workflow.tasks import Job, Record, Task, Worker
from ..errors import HeartError

logger = logging.getLogger(__name__)
PATIENCE = 3  # times that a task may lose its worker before it is held to be the task's fault


class _Actor:
    """Runs on a Ray worker: makes the pipeline once, then does tasks."""

    def __init__(self, loader: Callable[[], Any], job: Job, threads: int):
        torch.set_num_threads(threads)
        pipe = loader()
        if hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(disable=True)
        self.worker = Worker(pipe, job)

    def process(self) -> int:
        """Its process id; answers once the model is there."""
        return os.getpid()

    def do(self, task: Task, data: bytes | None) -> list[Record]:
        """One whole task."""
        return list(self.worker.run(task, data))


class RayExecutor:
    """Does tasks on a Ray cluster.

    Args:
        address: "auto" (the cluster this machine belongs to, or a new local one) or an address, e.g.
            "ray://head:10001".
        loader: makes the pipeline; called once on every worker.
        workers: how many; None: one for each GPU of the cluster, or on CPUs as many as `threads` allows.
    """

    def __init__(self, address: str, loader: Callable[[], Any], job: Job, workers: int | None = None):
        try:
            import ray
        except ImportError:
            raise HeartError("Ray is not installed: pip install 'heart-attention[ray]'") from None
        self.ray, self.loader, self.job = ray, loader, job
        self.threads = torch.get_num_threads()
        self._began = not ray.is_initialized()
        if self._began:
            self._connect(address)
        self.needs = self._needs()
        self.count = workers or self._room()
        self.actors = [self._start() for _ in range(self.count)]

    def _connect(self, address: str) -> None:
        quiet = {"ignore_reinit_error": True, "log_to_driver": False, "logging_level": logging.ERROR}
        try:
            self.ray.init(address=address, **quiet)
        except ConnectionError as error:
            if address != "auto":
                raise HeartError(f"no Ray cluster answers at {address!r} ({error}): check the address") from None
            self.ray.init(**quiet)

    def _needs(self) -> dict[str, float]:
        """What an actor asks of the cluster."""
        gpus = self.ray.cluster_resources().get("GPU", 0)
        return {"num_gpus": 1} if gpus and torch.cuda.is_available() else {"num_cpus": self.threads}

    def _room(self) -> int:
        have = self.ray.cluster_resources()
        name, each = ("GPU", 1.0) if "num_gpus" in self.needs else ("CPU", float(self.threads))
        return max(1, int(have.get(name, 1) // each))

    def _start(self) -> Any:
        actor = self.ray.remote(**self.needs)(_Actor)
        return actor.remote(self.loader, self.job, self.threads)

    def do(self, tasks: Sequence[Task], read: Callable[[int, int], bytes]) -> Iterator[tuple[Task, Record]]:
        """See `Crew.do`: records come in the order in which tasks end."""
        waiting = list(reversed(tasks))
        busy: dict[Any, tuple[Task, Any]] = {}  # the promise of a result -> its task and worker
        idle = list(self.actors)
        lost: dict[Task, int] = {}
        held: dict[tuple[int, int], Any] = {}  # contexts in the object store
        while waiting or busy:
            while waiting and idle:
                task, actor = waiting.pop(), idle.pop()
                busy[actor.do.remote(task, self._data(task, read, held))] = (task, actor)
            (done,), _ = self.ray.wait(list(busy), num_returns=1)
            task, actor = busy.pop(done)
            try:
                records = self.ray.get(done)
            except self.ray.exceptions.RayActorError as error:
                waiting.append(task)
                idle.append(self._replace(actor, task, lost, error))
                continue
            except self.ray.exceptions.RayTaskError as error:
                cause = error.as_instanceof_cause()
                raise HeartError(f"a Ray worker failed at {task.names()[0]}: {cause}") from error
            idle.append(actor)
            for record in records:
                yield task, record

    def _data(self, task: Task, read: Callable[[int, int], bytes], held: dict[tuple[int, int], Any]) -> Any:
        if task.kind == "trajectory":
            return None
        at = (task.prompt, task.step)
        if at not in held:
            held[at] = self.ray.put(read(*at))
        return held[at]

    def _replace(self, actor: Any, task: Task, lost: dict[Task, int], error: Exception) -> Any:
        lost[task] = lost.get(task, 0) + 1
        if lost[task] > PATIENCE:
            raise HeartError(
                f"{task.names()[0]} lost {lost[task]} Ray workers in a row ({str(error).splitlines()[0]}): give workers "
                "more memory, or calibrate without Ray"
            ) from error
        logger.warning("A Ray worker was lost at %s; another takes over.", task.names()[0])
        new = self._start()
        self.actors = [new if a is actor else a for a in self.actors]
        return new

    def close(self) -> None:
        """End the workers, and the cluster's connection if it was made here."""
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors = []
        if self._began:
            self.ray.shutdown()
