"""Copies from a GPU to the computer's own memory that nobody waits for until their values are wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_host(x: Tensor) -> Tensor:
    """x in page-locked memory of the computer, without waiting for the GPU; a CPU's tensor as it is.

    Later copies back follow on the same stream; whoever reads the values on the host must wait first (`Reading`).
    """
    if not x.is_cuda:
        return x
    kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return kept.copy_(x, non_blocking=True)


class Reading:
    """Values of a GPU's tensor on their way to the host; ready at once on a CPU."""

    def __init__(self, x: Tensor) -> None:
        self._host = to_host(x)
        self._event: Any = torch.cuda.Event() if x.is_cuda else None
        if self._event is not None:
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether the values have arrived."""
        return self._event is None or self._event.query()

    def values(self) -> Tensor:
        """The values, after waiting for them if need be."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
