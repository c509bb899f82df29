"""Tasks spread over machines with Ray: actors that each have a worker; a lost worker's task goes to another.

Data travels through Ray's object store, so workers need no shared folder; the caller alone writes records. A worker
that dies takes at most its present task with it: the task goes to another, and a new worker is started in its place.
Tasks are pure functions, so the result is that of a local run (on CPUs bit for bit, with as many threads a worker as
the local run has). Modules that this process was given with `--plugin` are imported by workers too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from .. import plugins
from ..errors import HeartError
from .executor import Executor, Read, Record, T, Task, Worker

log = logging.getLogger(__name__)

PATIENCE = 3  # times that a task may lose its worker before it is held to be the task's fault


class _Actor:
    """Runs on a Ray worker: sets up a worker once, then runs tasks."""

    def __init__(self, loader: Callable[[], Worker], threads: int, modules: Sequence[str]):
        torch.set_num_threads(threads)
        plugins.load(modules)
        self.worker = loader()

    def process(self) -> int:
        """Its process id; answers once the worker is set up."""
        return os.getpid()

    def do(self, task: Task, data: bytes | None) -> list[Record]:
        """One whole task."""
        return list(self.worker.run(task, data))


class RayExecutor(Executor[T]):
    """Runs tasks on a Ray cluster.

    Args:
        address: "auto" (the cluster this machine belongs to, or a new local one) or an address, e.g.
            "ray://head:10001".
        loader: sets up a `Worker`; called once on every Ray worker, so it must be picklable.
        workers: how many; None: one for each GPU of the cluster, or on CPUs as many as the threads of this process allow.
    """

    def __init__(self, address: str, loader: Callable[[], Worker[T]], workers: int | None = None):
        try:
            import ray
        except ImportError:
            raise HeartError("Ray is not installed: pip install 'heart-attention[ray]'") from None
        self.ray: Any = ray
        self.loader = loader
        self.threads = torch.get_num_threads()
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            self._connect(address)
        self.resources = self._resources()
        self.count = workers or self._capacity()
        self.actors = [self._start() for _ in range(self.count)]

    def _connect(self, address: str) -> None:
        quiet = {"ignore_reinit_error": True, "log_to_driver": False, "logging_level": logging.ERROR}
        try:
            self.ray.init(address=address, **quiet)
        except ConnectionError as error:
            if address != "auto":
                raise HeartError(f"no Ray cluster answers at {address!r} ({error}): check the address") from None
            self.ray.init(**quiet)

    def _resources(self) -> dict[str, float]:
        """What an actor requires of the cluster."""
        gpus = self.ray.cluster_resources().get("GPU", 0)
        return {"num_gpus": 1} if gpus and torch.cuda.is_available() else {"num_cpus": self.threads}

    def _capacity(self) -> int:
        """How many actors the cluster can hold."""
        total = self.ray.cluster_resources()
        name, share = ("GPU", 1.0) if "num_gpus" in self.resources else ("CPU", float(self.threads))
        return max(1, int(total.get(name, 1) // share))

    def _start(self) -> Any:
        actor = self.ray.remote(**self.resources)(_Actor)
        return actor.remote(self.loader, self.threads, plugins.loaded())

    def do(self, tasks: Sequence[T], read: Read) -> Iterator[tuple[T, Record]]:
        """See `Executor.do`: records come in the order in which tasks end."""
        waiting = list(reversed(tasks))
        running: dict[Any, tuple[T, Any]] = {}  # the promise of a result -> its task and actor
        idle = list(self.actors)
        losses: dict[T, int] = {}
        stored: dict[Hashable, Any] = {}  # data in the object store
        while waiting or running:
            while waiting and idle:
                task, actor = waiting.pop(), idle.pop()
                running[actor.do.remote(task, self._data(task, read, stored))] = (task, actor)
            (finished,), _ = self.ray.wait(list(running), num_returns=1)
            task, actor = running.pop(finished)
            try:
                records = self.ray.get(finished)
            except self.ray.exceptions.RayActorError as error:
                waiting.append(task)
                idle.append(self._replace(actor, task, losses, error))
                continue
            except self.ray.exceptions.RayTaskError as error:
                cause = error.as_instanceof_cause()
                raise HeartError(f"a Ray worker failed at {task.names()[0]}: {cause}") from error
            idle.append(actor)
            for record in records:
                yield task, record

    def _data(self, task: T, read: Read, stored: dict[Hashable, Any]) -> Any:
        key = task.data_key
        if key is None:
            return None
        if key not in stored:
            stored[key] = self.ray.put(read(key))
        return stored[key]

    def _replace(self, actor: Any, task: T, losses: dict[T, int], error: Exception) -> Any:
        losses[task] = losses.get(task, 0) + 1
        if losses[task] > PATIENCE:
            raise HeartError(
                f"{task.names()[0]} lost {losses[task]} Ray workers in a row ({str(error).splitlines()[0]}): give workers "
                "more memory, or work without Ray"
            ) from error
        log.warning("A Ray worker was lost at %s; another takes over.", task.names()[0])
        new = self._start()
        self.actors = [new if a is actor else a for a in self.actors]
        return new

    def close(self) -> None:
        """End the workers, and the cluster's connection if it was made here."""
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors = []
        if self._connected_here:
            self.ray.shutdown()
