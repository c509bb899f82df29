"""What an assignment must keep to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import HeartError

KINDS = {
    "shared": "τ, as sparse as one shared threshold",
    "sparsity": "S, mean sparsity of at least S",
    "threshold": "τ, mean threshold of at most τ",
    "time": "T, at most T of a dense generation's attention time",
}
_WORDS = "shared=τ, sparsity=S, threshold=τ or time=T"


@dataclass(frozen=True)
class Budget:
    """A budget: `kind` is "shared" (as sparse as one shared τ), "sparsity", "threshold" or "time"."""

    kind: str = "shared"
    value: float = 0.9

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise HeartError(f"a budget is {_WORDS}, not {str(self.kind)[:40]!r}")
        if not (isinstance(self.value, int | float) and math.isfinite(self.value) and 0 <= self.value <= 1):
            raise HeartError(f"the budget {self.kind}={self.value} is outside 0 … 1")

    @classmethod
    def parse(cls, text: str | float | Budget) -> Budget:
        """A budget from "shared=0.9", "time=0.25" and the like, or from a bare number, which is a sparsity."""
        if isinstance(text, Budget):
            return text
        kind, _, value = str(text).replace(":", "=").rpartition("=")
        try:
            number = float(value)
        except ValueError:
            raise HeartError(f"the budget {str(text)[:60]!r} is not {_WORDS} with a number from 0 to 1") from None
        return cls(kind or "sparsity", number)

    @classmethod
    def named(cls, text: str, kind: str) -> Budget:
        """A budget as the name of a method or file tells it after "@": a number of this kind, or one with its kind."""
        return cls.parse(text if "=" in text else f"{kind}={text}")

    def __str__(self) -> str:
        return f"{self.kind}={self.value:g}"
