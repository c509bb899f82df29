"""Pipelines with two transformers (Wan2.2): the steps that each serves, and the calibrations of both as one.

The two have the same architecture, so no fingerprint tells their calibrations apart: a calibration of such a
pipeline says in its settings which transformer it was measured on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import HeartError
from ..models.inspect import NAMES, named_transformers
from ..online.thresholds import ThresholdSource
from .file import Calibration

if TYPE_CHECKING:
    from ..online.points import PointTable


def are_two(pipe: Any) -> bool:
    """Whether the pipeline has two transformers."""
    return len(named_transformers(pipe)) > 1


def chosen(pipe: Any, name: str | None) -> Any:
    """The transformer of that name; of a pipeline with two, one must be named."""
    if name is None and are_two(pipe):
        raise HeartError(
            "this pipeline has two transformers, each with steps of its own: calibrate one after the other, "
            "with --transformer transformer and --transformer transformer_2"
        )
    transformer = named_transformers(pipe).get(name or NAMES[0])
    if transformer is None:
        raise HeartError(f"this {type(pipe).__name__} has no {name}: calibrate its transformer")
    return transformer


def served(pipe: Any, name: str | None, steps: int) -> tuple[int, int]:
    """First and last step, of `steps`, at which the pipeline runs this transformer."""
    chosen(pipe, name)
    if not are_two(pipe):
        return 0, steps - 1
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)  # the pipeline's own stays as it is
    scheduler.set_timesteps(steps)
    boundary = (pipe.config.boundary_ratio or 0.0) * scheduler.config.num_train_timesteps
    mine = [i for i, t in enumerate(scheduler.timesteps.tolist()) if (t >= boundary) == (name == NAMES[0])]
    if not mine:
        raise HeartError(f"none of {steps} steps is served by {name}: take more steps")
    return mine[0], mine[-1]


@dataclass(frozen=True)
class Experts(ThresholdSource):
    """One calibration for each transformer of a pipeline; serves as thresholds wherever a `Calibration` does."""

    calibrations: tuple[Calibration, ...]

    def __post_init__(self) -> None:
        made_for = {c.settings.get("transformer"): c for c in self.calibrations}
        if set(made_for) != set(NAMES) or len(self.calibrations) != len(NAMES):
            told = ", ".join(str(c.settings.get("transformer", "a pipeline with one")) for c in self.calibrations)
            raise HeartError(f"these calibrations are of {told}: give one of transformer and one of transformer_2")
        first, second = (made_for[name] for name in NAMES)
        sizes = {(c.layers, c.heads) for c in (first, second)}
        if len(sizes) > 1 or first.backbone != second.backbone:
            raise HeartError(
                "the two calibrations differ in layers, heads or backbone: make both with the same settings"
            )
        object.__setattr__(self, "calibrations", (first, second))

    @property
    def thresholds(self) -> np.ndarray:  # type: ignore[override]
        """Of every head, [transformers, L, H]."""
        return np.stack([c.thresholds for c in self.calibrations])

    @property
    def backbone(self) -> dict[str, Any]:
        """What both were made for."""
        return self.calibrations[0].backbone

    @property
    def simple(self) -> bool:
        """Whether one backbone, token order and rest serve all heads in one phase."""
        first, second = self.calibrations
        return first.simple and second.simple and first.rest == second.rest

    @property
    def rest(self) -> str | None:
        """What becomes of the rest; None where points differ in it."""
        first, second = self.calibrations
        return first.rest if first.rest == second.rest else None

    @property
    def points(self) -> tuple[dict[str, Any], ...]:
        """The operating points of both."""
        return tuple(point for c in self.calibrations for point in c.points)

    def point_table(self) -> PointTable:
        """The choice of both as a config holds it."""
        from .points import point_table

        return point_table(self.calibrations)

    def at_budget(self, text: str) -> Experts:
        """Both for a budget as names tell it after "@"."""
        return Experts(tuple(c.at_budget(text) for c in self.calibrations))

    @property
    def settings(self) -> dict[str, Any]:
        """Order, dense steps and the like, as in the first."""
        return self.calibrations[0].settings

    def of_transformers(self, count: int) -> list[ThresholdSource]:
        """One calibration for each of the two."""
        if count != len(NAMES):
            raise HeartError(
                "these are calibrations of two transformers but the model has one: give the one made for it"
            )
        return list(self.calibrations)

    def warnings_for(self, **used: Any) -> list[str]:
        """What differs from the generations that either was measured on."""
        return list(dict.fromkeys(s for c in self.calibrations for s in c.warnings_for(**used)))


def load(paths: str | os.PathLike | Sequence[str | os.PathLike]) -> Calibration | Experts:
    """One calibration file, or those of both transformers in any order."""
    if isinstance(paths, str | os.PathLike):
        return Calibration.load(paths)
    calibrations = tuple(Calibration.load(p) for p in paths)
    return calibrations[0] if len(calibrations) == 1 else Experts(calibrations)
