"""Which denoising step, which guidance branch, which generation: what the engine must know about each forward.

Diffusion pipelines tell a transformer little about where they are. The clock takes the best source there is:
the step that `cache_context(...)` carries, else the scheduler's own counter if it agrees with the timestep
the model got, else the changes of that timestep. One clock serves all transformers of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

MOST_BRANCHES = 8  # more unnamed calls at one timestep than this are a new generation, so state cannot pile up


@dataclass(slots=True, frozen=True)
class Moment:
    """What the clock says of one forward."""

    step: int
    branch: str
    generation: int
    timestep: float | None


class Clock:
    """Tells step, branch and generation of every forward; calls `on_reset` listeners when a generation ends.

    Args:
        scheduler: a scheduler or a function that returns the pipeline's present one (or None).
        rising: True for models whose timestep grows while they denoise (Mochi).
    """

    def __init__(self, scheduler: Any = None, rising: bool = False) -> None:
        self._scheduler = scheduler if callable(scheduler) or scheduler is None else lambda: scheduler
        self.rising = rising
        self.listeners: list[Callable[[], None]] = []
        self.generation = 0
        self._name: str | None = None  # the open cache_context
        self._given: int | None = None  # its step_index
        self._fixed: tuple[int, str] | None = None
        self._table: Any = None  # the scheduler's timesteps, a new tensor for every generation
        self._levels: tuple[Any, int, list[float]] = (
            None,
            0,
            [],
        )  # a table of timesteps, where it begins, its noise levels
        self._forget()

    def _forget(self) -> None:
        self._last: dict[str, int] = {}  # branch -> its last step
        self._time: torch.Tensor | None = None  # last timestep seen, all its values
        self._count = 0  # changes of the timestep in this generation
        self._calls = 0  # unnamed calls at this step
        self._here: set[str] = set()  # named branches called at this step
        self._fresh = True

    # -- what the pipeline tells ------------------------------------------------------------------------
    def set_context(self, context: Any) -> None:
        """Take what `cache_context` gives: a name (older diffusers), an object with name and step, or None."""
        self._name = getattr(context, "name", context)
        self._given = getattr(context, "step_index", None)

    def reset(self) -> None:
        """The generation is over: what follows is a new one."""
        if self._fresh:
            return
        self._forget()
        self.generation += 1
        for listener in dict.fromkeys(self.listeners):  # two experts may share one handler
            listener()

    @contextmanager
    def at(self, step: int, branch: str = "0") -> Iterator[None]:
        """Say explicitly where the forwards inside stand (for callers without a pipeline)."""
        before, self._fixed = self._fixed, (step, branch)
        try:
            yield
        finally:
            self._fixed = before

    # -- what the engine asks ---------------------------------------------------------------------------
    def tick(self, timestep: torch.Tensor | float | None) -> Moment:
        """One forward begins with this timestep: say where it stands."""
        if self._fixed is not None:
            step, branch = self._fixed
            return self._settle(step, branch, _value(timestep, wait=False, rising=self.rising))
        if self._given is not None:
            return self._settle(self._given, self._name or "0", _value(timestep, wait=False, rising=self.rising))
        return self._tick_by_time(timestep)

    def noise_level(self, step: int) -> float | None:
        """σ at a step, from 1 at the start of denoising down; None where no scheduler tells."""
        levels = self.noise_levels()
        return levels[step] if levels is not None and 0 <= step < len(levels) else None

    def noise_levels(self) -> list[float] | None:
        """σ at every step of this generation: its timestep over the number of training timesteps.

        None where no scheduler tells. The table is read once a generation, so that a GPU does not wait at every forward.
        """
        scheduler = self._find_scheduler()
        times = getattr(scheduler, "timesteps", None)
        total = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None)
        if times is None or not total:
            return None
        begin = getattr(scheduler, "begin_index", None) or 0
        if self._levels[0] is not times or self._levels[1] != begin:
            levels = (torch.as_tensor(times).double().cpu() / total).tolist()[begin:]
            self._levels = (times, begin, [1 - x for x in levels] if self.rising else levels)
        return self._levels[2]

    def _tick_by_time(self, timestep: torch.Tensor | float | None) -> Moment:
        time = torch.as_tensor(float("nan") if timestep is None else timestep).detach().cpu()
        value = _value(time, wait=True, rising=self.rising)
        step = self._scheduler_step(time, value)
        changed = self._time is None or time.shape != self._time.shape or not torch.equal(time, self._time)
        if self._starts_over(value, step, changed):
            self.reset()
        if self._time is not None and (changed or self._name in self._here):
            self._next_step(self._count + 1)
        self._time = time.clone()
        if step is not None and step != self._count:  # it tells equal timesteps apart (Heun, rounding)
            self._next_step(step)
        if self._name is not None:
            self._here.add(self._name)
        return self._settle(self._count, self._unnamed() if self._name is None else self._name, value)

    def _next_step(self, step: int) -> None:
        self._count, self._calls, self._here = step, 0, set()

    def _unnamed(self) -> str:
        """Without a context, the n-th call of a step is branch n."""
        if self._calls >= MOST_BRANCHES:
            time, count = self._time, self._count
            self.reset()
            self._time, self._count = time, count
        self._calls += 1
        return str(self._calls - 1)

    def _starts_over(self, value: float | None, step: int | None, changed: bool) -> bool:
        """New generation: noisier than before, a new table of timesteps, or the first step once more."""
        table, self._table = self._table, getattr(self._find_scheduler(), "timesteps", None)
        if self._time is None:
            return False
        if step == 0 and table is not None and table is not self._table:
            return True
        last = _value(self._time, wait=True, rising=self.rising)
        if value is None or last is None:
            return False
        if value != last:
            return value < last if self.rising else value > last
        return not changed and self._name in self._here and self._count == 0 and step in (None, 0)

    def _find_scheduler(self) -> Any:
        return self._scheduler() if self._scheduler is not None else None

    def _scheduler_step(self, time: torch.Tensor, value: float | None) -> int | None:
        """The scheduler's own step counter, if it stands at the timestep the model got."""
        scheduler = self._find_scheduler()
        times = getattr(scheduler, "timesteps", None)
        if times is None or not hasattr(scheduler, "step_index"):
            return None
        begin = getattr(scheduler, "begin_index", None) or 0
        index = begin if scheduler.step_index is None else scheduler.step_index
        if value is None or not 0 <= index < len(times):
            return None
        # through the model's dtype: pipelines round timesteps to bf16
        theirs = float(torch.as_tensor(times[index]).to("cpu", time.dtype))
        return int(index) - int(begin) if abs(theirs - value) <= 1e-5 * max(1.0, abs(value)) else None

    def _settle(self, step: int, branch: str, value: float | None) -> Moment:
        last = self._last.get(branch)
        if last is not None and step <= last and self._fixed is None:
            time, calls, here = self._time, self._calls, self._here
            self.reset()
            self._time, self._calls, self._here, self._count = time, calls, here, step
        self._fresh = False
        self._last[branch] = step
        return Moment(step, branch, self.generation, value)


def _value(timestep: torch.Tensor | float | None, wait: bool, rising: bool = False) -> float | None:
    """The timestep as a number: the noisiest one where tokens or frames have their own."""
    if timestep is None or isinstance(timestep, (int, float)):
        return timestep
    if timestep.device.type != "cpu" and not wait:
        return None
    noisiest = timestep.min if rising else timestep.max
    number = float(noisiest()) if timestep.numel() else float("nan")
    return None if number != number else number
