"""The executor's contract, by a worker that has nothing to do with calibration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from heart_attention.errors import HeartError
from heart_attention.execution.executor import LocalExecutor, Record, Worker


@dataclass(frozen=True)
class Count:
    """Counts the letters of some data, one record a letter."""

    letters: str
    key: str | None = "text"

    def names(self) -> list[str]:
        return [f"count-{letter}" for letter in self.letters]

    @property
    def data_key(self) -> str | None:
        return self.key


class Counter(Worker[Count]):
    def __init__(self) -> None:
        self.closed, self.runs = False, 0

    def run(self, task: Count, data: bytes | None) -> Iterator[Record]:
        self.runs += 1
        for name, letter in zip(task.names(), task.letters):
            yield name, (data or b"").decode().count(letter)

    def close(self) -> None:
        self.closed = True


DATA = {"text": b"banana", "other": b"apple"}


def test_records_come_in_order_with_their_task():
    tasks, worker = [Count("an"), Count("p", "other"), Count("a", None)], Counter()
    with LocalExecutor(worker) as executor:
        found = list(executor.do(tasks, DATA.__getitem__))
    assert found == [
        (tasks[0], ("count-a", 3)), (tasks[0], ("count-n", 2)), (tasks[1], ("count-p", 2)), (tasks[2], ("count-a", 0)),
    ]  # fmt: skip
    assert worker.closed and worker.runs == 3


def test_records_are_given_as_they_are_finished():
    worker = Counter()
    stream = LocalExecutor(worker).do([Count("a"), Count("b")], DATA.__getitem__)
    assert next(stream)[1] == ("count-a", 3) and worker.runs == 1


def test_data_is_read_only_where_a_task_has_a_key():
    def refuse(key: str) -> bytes:
        raise AssertionError(f"{key} was read")

    assert list(LocalExecutor(Counter()).do([Count("a", None)], refuse))


def test_a_failure_closes_the_worker_and_is_passed_on():
    class Fails(Counter):
        def run(self, task: Count, data: bytes | None) -> Iterator[Record]:
            raise HeartError("no")

    worker = Fails()
    with pytest.raises(HeartError, match="no"), LocalExecutor(worker) as executor:
        list(executor.do([Count("a")], DATA.__getitem__))
    assert worker.closed


def test_a_worker_must_say_how_it_runs():
    with pytest.raises(NotImplementedError):
        list(LocalExecutor(Worker()).do([Count("a")], DATA.__getitem__))
