"""Times that can be believed: seconds inside the model, methods run in turns, and what the machine did meanwhile.

A moment in which something else runs on the machine must not decide between methods. So the methods of one
(prompt, seed) run in turns, a denoising step each (`in_turns`), and every speed-up is over the dense generation that
took turns with it. All steps of that dense generation do equal work: their spread, and how long our threads waited for a
core, tell whether the times mean anything (`verdict`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from .statistics import student_t

SPREAD = 0.25  # of equal dense steps, (90th − 10th percentile) / median: above it times are not to be trusted
WAITED = 0.10  # share of the time that our threads wanted a core and had none: likewise

Result = TypeVar("Result")


class ForwardTimer:
    """Wall time spent inside the denoising model's forwards (the paper's end-to-end latency), in all and by step."""

    def __init__(self, transformers: Iterable, device: Any = None) -> None:
        """`device`: where they compute; None: where their weights are, which offload moves during a forward."""
        self._device = None if device is None else str(device)
        self._forwards: list[tuple[int, Any, Any]] = []  # step, begin, end
        self._handles = []
        self.step = 0  # whoever knows the steps counts them here
        for module in transformers:
            self._handles.append(module.register_forward_pre_hook(self._start))
            self._handles.append(module.register_forward_hook(self._stop, always_call=True))
        self.paused = False  # while somebody else has the model

    def _start(self, module: Any, args: Any) -> None:
        if not self.paused:
            self._forwards.append((self.step, self._now(module), None))

    def _stop(self, module: Any, args: Any, output: Any) -> None:
        if not self.paused:
            step, begin, _ = self._forwards[-1]
            self._forwards[-1] = (step, begin, self._now(module))

    def _now(self, module: Any) -> Any:
        return _moment(self._device or str(next(module.parameters()).device))

    def close(self) -> list[float]:
        """Remove the hooks; seconds of each step."""
        for handle in self._handles:
            handle.remove()
        steps: dict[int, float] = {}
        for step, begin, end in self._forwards:
            if end is not None:
                steps[step] = steps.get(step, 0.0) + _seconds(begin, end)
        return [steps[i] for i in sorted(steps)]


def _moment(device: str) -> Any:
    """The present moment on a device: an event on CUDA, so that timing adds no synchronisation."""
    import torch

    if not device.startswith("cuda"):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000


# ---------------------------------------- in turns


class Cancelled(BaseException):
    """Raised inside a job that shall not go on because another one failed."""


class _Job(Generic[Result]):
    """A job in a thread of its own that runs only while it is its turn."""

    def __init__(self, work: Callable[[Callable[[], None]], Result], back: threading.Semaphore) -> None:
        self.go, self.back, self.stop = threading.Semaphore(0), back, False
        self.result: Result | None = None
        self.error: BaseException | None = None
        self.done = self.running = False
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)

    def _run(self, work: Callable[[Callable[[], None]], Result]) -> None:
        self.go.acquire()
        try:
            if not self.stop:
                self.result = work(self.pause)
        except Cancelled:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self.back.release()

    def pause(self) -> None:
        """Called by the job: the others' turn."""
        self.back.release()
        self.go.acquire()
        if self.stop:
            raise Cancelled

    def turn(self) -> None:
        """Called from outside: let it go on until it pauses or ends."""
        if not self.running:  # else an interrupt came while it ran: only wait for it
            self.running = True
            self.go.release()
        self.back.acquire()
        self.running = False

    def cancel(self) -> None:
        """Called from outside: let it end at its next pause."""
        self.stop = True
        while not self.done:
            self.turn()
        self.thread.join()


def in_turns(works: Sequence[Callable[[Callable[[], None]], Result]]) -> list[Result]:
    """Run jobs in turns, one at a time: each gets `pause`, and when it calls it the next one goes on.

    The first error ends all of them and is raised.
    """
    jobs = [_Job(work, threading.Semaphore(0)) for work in works]
    for job in jobs:
        job.thread.start()
    try:
        while any(not job.done for job in jobs):
            for job in jobs:
                if not job.done:
                    job.turn()
                if job.error is not None:
                    raise job.error
    finally:
        for job in jobs:  # one after the other: they share the model
            job.cancel()
    return [job.result for job in jobs]  # type: ignore[misc]


# ---------------------------------------- what the machine did meanwhile


def cpu_wait() -> tuple[float, float] | None:
    """Seconds that all threads of this process ran, and that they waited for a core; None where Linux does not tell."""
    try:
        lines = [p.read_text().split() for p in Path("/proc/self/task").glob("*/schedstat")]
        return sum(int(x[0]) for x in lines) / 1e9, sum(int(x[1]) for x in lines) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def waited_share(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """Of the time between two looks at `cpu_wait`: the share that was spent waiting for a core."""
    if before is None or after is None:
        return None
    ran, waited = max(after[0] - before[0], 0.0), max(after[1] - before[1], 0.0)
    return round(waited / (ran + waited), 4) if ran + waited > 0 else None


def spread(steps: Sequence[float]) -> float | None:
    """How much the seconds of equal steps differ: (90th − 10th percentile) / median; the first step is not counted."""
    if len(steps) < 4:
        return None
    low, middle, high = np.quantile(np.asarray(steps[1:], float), (0.1, 0.5, 0.9))
    return round(float((high - low) / middle), 4) if middle > 0 else None


def step_interval(reference: Sequence[float], steps: Sequence[float]) -> float:
    """Half-width of a 95 % interval of log(Σ reference / Σ steps) for steps taken in turns: a jackknife over steps."""
    n = len(steps)
    if n < 4 or len(reference) != n or min(*steps, *reference) <= 0:
        return 0.0
    top, bottom = np.asarray(reference, float), np.asarray(steps, float)
    without = np.log((top.sum() - top) / (bottom.sum() - bottom))
    deviation = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    return student_t(n - 1) * deviation


def untimed(rows: Sequence[dict]) -> str:
    """That times of some rows were not measured, in one sentence; empty if all were."""
    count = sum(not r.get("timed", True) for r in rows)
    return f"times of {count} of {len(rows)} videos were not measured" if count else ""


def verdict(rows: Sequence[dict]) -> str:
    """Why the times of these rows are not to be trusted, in one sentence; empty if nothing speaks against them."""
    spreads = [r["spread"] for r in rows if r.get("spread") is not None]
    waits = [r["waited"] for r in rows if r.get("waited") is not None]
    reasons = []
    if spreads and max(spreads) > SPREAD:
        reasons.append(f"dense steps of equal work differed by {max(spreads):.0%}")
    if waits and max(waits) > WAITED:
        reasons.append(f"{max(waits):.0%} of the time was spent waiting for a core")
    return f"times cannot be trusted: the machine was busy ({' and '.join(reasons)})" if reasons else ""
