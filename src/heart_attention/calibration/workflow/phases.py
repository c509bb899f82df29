"""Phases: intervals of denoising steps in which heads have points of their own, told apart by noise level."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..measure import draws
from .settings import Settings


@dataclass(frozen=True)
class Phases:
    """The phases of a calibration.

    Args:
        intervals: first and last step of each, together all sparse steps.
        sigmas: noise levels between them, descending, one fewer than there are phases.
        weights: what a velocity error in each does to the video, relative to the others; the mean is 1.
    """

    intervals: tuple[tuple[int, int], ...]
    sigmas: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        """The number of phases."""
        return len(self.intervals)

    def of_step(self, step: int) -> int:
        """The phase of a step; steps before the first phase count as its own."""
        return sum(step >= first for first, _ in self.intervals[1:])

    def shares(self) -> np.ndarray:
        """How much each phase counts in a mean over steps, [P, 1, 1]; the mean is 1."""
        lengths = np.array([last - first + 1 for first, last in self.intervals], float)
        return (lengths / lengths.mean())[:, None, None]

    def weighed(self, weights: Any) -> Phases:
        """The same phases with measured weights."""
        values = np.asarray(weights, float)
        return replace(self, weights=tuple((values / values.mean()).tolist()))

    def to_dict(self) -> dict[str, Any]:
        """What a calibration file holds; nothing for one phase."""
        if self.count == 1:
            return {}
        steps = [last - first + 1 for first, last in self.intervals]
        return {"sigmas": list(self.sigmas), "weights": list(self.weights), "steps": steps}


def phases_of(settings: Settings, scheduler: Any, served: tuple[int, int] | None = None) -> Phases:
    """The phases that settings ask for: the sparse steps that the transformer serves, cut as strata are."""
    first, last = served or (0, settings.steps - 1)
    dense = max(0, settings.first_dense_steps - first)
    if settings.phases == 1:
        return Phases(((first + min(dense, last - first), last),), (), (1.0,))
    cut = draws.strata(last - first + 1, "sparse", dense, settings.phases)
    intervals = tuple((first + a, first + b) for a, b in cut)
    levels = noise_levels(scheduler, settings.steps)
    sigmas = tuple((levels[a[1]] + levels[b[0]]) / 2 for a, b in itertools.pairwise(intervals))
    return Phases(intervals, sigmas, (1.0,) * len(intervals))


def noise_levels(scheduler: Any, steps: int) -> list[float]:
    """The noise level of every step, from 1 down: its timestep over the number of training timesteps."""
    copy = type(scheduler).from_config(scheduler.config)  # the pipeline's own stays as it is
    copy.set_timesteps(steps)
    return [float(t) / copy.config.num_train_timesteps for t in copy.timesteps]
