"""Tasks and who runs them: a worker that is set up once, an executor that gives it one task after the other.

A task is a small picklable object that names the records it makes. A worker holds what is dear to set up (a model, say)
and answers tasks; it is a pure function of the task, so it does not matter which worker runs it or in what order.
`LocalExecutor` has one worker in this process, `ray.RayExecutor` has many on a cluster. The caller gets named records
and keeps them, so both give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

Record = tuple[str, Any]  # name and value
Read = Callable[[Any], bytes]  # a data key -> the bytes it stands for


class Task(Protocol):
    """What an executor asks of a task; it must be hashable and picklable."""

    def names(self) -> list[str]:
        """The records that this task makes, in order."""
        ...

    @property
    def data_key(self) -> Hashable | None:
        """What stands for the data that the worker needs besides the task; None if there is none."""
        ...


T = TypeVar("T", bound=Task)


class Worker(Generic[T]):
    """Runs tasks with whatever it was set up with."""

    def run(self, task: T, data: bytes | None) -> Iterator[Record]:
        """Run one task on its data; records come as they are finished."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what was set up."""


class Executor(Generic[T]):
    """Has tasks run; use it as a context manager, or call `close` at the end."""

    def do(self, tasks: Sequence[T], read: Read) -> Iterator[tuple[T, Record]]:
        """Run the tasks in any order and give each record as it is finished; `read` gives a data key's bytes."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the workers."""

    def __enter__(self) -> Executor[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LocalExecutor(Executor[T]):
    """Runs tasks in this process, in order."""

    def __init__(self, worker: Worker[T]):
        self.worker = worker

    def do(self, tasks: Sequence[T], read: Read) -> Iterator[tuple[T, Record]]:
        """See `Executor.do`."""
        for task in tasks:
            for record in self.worker.run(task, data_of(task, read)):
                yield task, record

    def close(self) -> None:
        """See `Executor.close`."""
        self.worker.close()


def data_of(task: Task, read: Read) -> bytes | None:
    """The bytes that a task needs, or None."""
    return None if task.data_key is None else read(task.data_key)
