"""Where joint text lies in a sequence, and all index arithmetic about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError


@dataclass(frozen=True)
class Text:
    """Where joint text lies in a sequence: `prompt` valid tokens from `start`, then `unused` empty slots.

    All other tokens are video.
    """

    start: int
    prompt: int
    unused: int = 0

    def __post_init__(self) -> None:
        if min(self.start, self.prompt, self.unused) < 0:
            raise HeartError(f"{self} has a negative part: start, prompt and unused count tokens from 0 up")

    @property
    def end(self) -> int:
        """The first token after the text."""
        return self.start + self.prompt + self.unused

    def check(self, n: int) -> None:
        """Raise unless the text lies inside a sequence of `n` tokens that also holds video."""
        if self.end > n or self.video_count(n) < 1:
            raise HeartError(f"{self} does not leave any video in {n} tokens: give the sequence that holds both")

    def video_count(self, n: int) -> int:
        """How many of `n` tokens are video."""
        return n - self.prompt - self.unused

    def video_index(self, n: int, device: Any = None) -> Tensor:
        """Indices of the video tokens among `n`, ascending."""
        before = torch.arange(self.start, device=device)
        return torch.cat([before, torch.arange(self.end, n, device=device)])  # [video]

    def index(self, part: str, n: int, device: Any = None) -> Tensor:
        """Indices below `n` of the "prompt", of the "unused" slots, or of both ("exact": never approximated)."""
        middle = self.start + self.prompt
        start, end = {"prompt": (self.start, middle), "unused": (middle, self.end), "exact": (self.start, self.end)}[
            part
        ]
        return torch.arange(min(start, n), min(end, n), device=device)

    def video(self, n: int, device: Any = None) -> slice | Tensor:
        """The video tokens among `n`: a slice where they are one stretch, else their indices."""
        return slice(0, self.start) if self.end == n else self.video_index(n, device)

    def without_unused(self, n: int) -> slice | None:
        """All tokens but unused slots at the end; None where no slots lie there."""
        return slice(0, n - self.unused) if self.end == n else None

    def place(self, index: Tensor) -> Tensor:
        """From a count among video tokens to the place in the sequence."""
        return torch.where(index < self.start, index, index + self.prompt + self.unused)
