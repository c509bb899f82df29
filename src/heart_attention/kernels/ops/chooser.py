"""Who computes an operation: Triton, C or PyTorch. Each says why it cannot; the first of the list that can is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

log = logging.getLogger(__name__)

OPS: dict[str, Op] = {}
_told: set[str] = set()


def _no_reasons(*arguments: Any, **options: Any) -> list[str]:
    return []


@dataclass(frozen=True)
class Way:
    """One way to compute an operation.

    Args:
        name: "triton", "c" or "torch".
        run: computes it.
        reasons_not: takes what `run` takes, or nothing at all (then it is about this machine): why it cannot serve.
    """

    name: str
    run: Callable[..., Any]
    reasons_not: Callable[..., list[str]] = _no_reasons


class Op:
    """An operation and its ways, quickest first; the last is the definition and always serves."""

    def __init__(self, name: str, *ways: Way):
        self.name, self.ways = name, ways
        OPS[name] = self

    def choose(self, *arguments: Any, **options: Any) -> Way:
        """The first way that serves for these arguments."""
        refusals = []
        for way in self.ways[:-1]:
            reasons = way.reasons_not(*arguments, **options)
            if not reasons:
                return way
            refusals.append(f"{way.name} ({'; '.join(reasons)})")
        self._tell(refusals, arguments)
        return self.ways[-1]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Compute it by the first way that serves."""
        return self.choose(*arguments, **options).run(*arguments, **options)

    def available(self) -> dict[str, list[str]]:
        """Every way with the reasons why it cannot serve on this machine; no reasons: it can."""
        return {way.name: way.reasons_not() for way in self.ways}

    def _tell(self, refusals: list[str], arguments: tuple[Any, ...]) -> None:
        """Say once that a GPU's tensors are left to PyTorch, and why."""
        first = next((x[0] if isinstance(x, list) and x else x for x in arguments), None)
        if not isinstance(first, Tensor) or not first.is_cuda:
            return
        message = f"{self.name} runs in PyTorch on {first.device}: {', '.join(refusals)}"
        if message not in _told:
            _told.add(message)
            log.warning(message)
