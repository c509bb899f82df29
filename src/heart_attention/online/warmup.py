"""Which steps of a generation stay dense: the first ones, where everything is still open, and, if wanted, the last.

Published methods keep five of fifty. With four or eight steps five are most or all of them, so "auto" goes by how much is
done in a step: a fifth of the steps and a quarter of the noise are dense at most, at least one step, never more than five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import HeartError, shown

AUTO: Literal["auto"] = "auto"
MOST = 5  # the paper's, of fifty
OF_STEPS = 5  # one of so many
LEAST_NOISE = 0.75  # of the noise is left when the last dense step is over
STEP_LIMIT = 1_000_000
FIRST, LAST = "warm-up step", "dense last step"  # reasons


def check(value: Any, name: str = "dense_steps") -> None:
    """Raise unless this is a whole number, 0 or more, or "auto"."""
    if value == AUTO and isinstance(value, str):
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= STEP_LIMIT:
        raise HeartError(f"{name} is {shown(value)}: it must be a whole number, 0 or more, or 'auto'")


def read(text: str) -> int | str:
    """What the command line says: a number, or "auto"."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def first_steps(asked: int | str, steps: int | None = None, levels: Sequence[float] | None = None) -> int:
    """How many steps at the start are dense.

    Args:
        asked: a number means itself; "auto": see above.
        steps: of the generation, None where nothing tells.
        levels: noise level of every step, from 1 down, where a scheduler tells.
    """
    if not isinstance(asked, str):
        return asked
    count = len(levels) if levels else steps
    if not count:
        return MOST
    ends = [*levels[1:], 0.0] if levels else [1 - (i + 1) / count for i in range(count)]  # noise left after each step
    early = sum(1 for end in ends if end >= LEAST_NOISE)
    return max(1, min(MOST, count // OF_STEPS, early))


@dataclass(frozen=True)
class DenseSteps:
    """The dense steps of one generation.

    Args:
        asked: what the config says of the first ones.
        first, last: how many at the start and at the end are dense.
        steps: of the generation, None where nothing tells.
    """

    asked: int | str
    first: int
    last: int = 0
    steps: int | None = None

    def reason(self, step: int) -> str:
        """Why this step is dense; empty if it is not."""
        if step < self.first:
            return FIRST
        return LAST if self.last and self.steps is not None and step >= self.steps - self.last else ""

    @property
    def all(self) -> bool:
        """Whether no step is left for sparse attention."""
        return self.steps is not None and self.first + self.last >= self.steps

    def __str__(self) -> str:
        of = "" if self.steps is None else f" of {self.steps}"
        text = f"the first {self.first}{of} steps are dense (dense_steps={self.asked})"
        if self.last:
            text += f", and the last {self.last}" if self.steps is not None else "; which the last are is not known"
        return text

    def warning(self) -> str:
        """A sentence for a generation that is wholly dense, or whose end is not known; empty for others."""
        if self.all:
            return (
                f"all {self.steps} steps run dense: dense_steps is {self.asked} and dense_last_steps {self.last}; "
                "give fewer, or dense_steps='auto'"
            )
        if self.last and self.steps is None:
            return "dense_last_steps has no effect: nothing tells how many steps there are"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """For `stats`."""
        return {"asked": self.asked, "first": self.first, "last": self.last, "steps": self.steps}


def choose(asked: int | str, last: int, steps: int | None = None, levels: Sequence[float] | None = None) -> DenseSteps:
    """The dense steps of a generation, from what the config asks and what the pipeline tells."""
    count = len(levels) if levels else steps
    return DenseSteps(asked, first_steps(asked, steps, levels), last, count)
