"""Student's t and rank correlation, exactly, in a few lines: all that evaluation needs of a statistics library."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np


def _within(t: float, freedom: int) -> float:
    """Probability that Student's t with whole degrees of freedom lies in [-t, t] (Abramowitz and Stegun, 26.7.3-4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = total = cosine if odd and freedom > 1 else 0.0 if odd else 1.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inner = math.sin(angle) * total
    return 2 / math.pi * (angle + inner) if odd else inner


@functools.lru_cache(maxsize=1024)
def student_t(freedom: int, share: float = 0.95) -> float:
    """The t with `share` of the distribution within ±t, by bisection; `freedom` is whole and at least 1."""
    low, high = 0.0, 1e3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < share else (low, middle)
    return high


def _ranks(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


def spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Rank correlation; 0 when one side does not vary."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])
