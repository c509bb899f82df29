"""What calibration draws at random, as pure functions of (seed, purpose, layer, head, j) through a hash.

Nothing here has a state: the order of the work, how it is spread over machines and where it was resumed
cannot change a draw. `GENERATOR` names the rule and is recorded in calibration files.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ...errors import HeartError

GENERATOR = "sha256-v1"
STRATA = ("paper", "sparse")
COUNT = 4  # strata, as in the paper


def number(seed: int, purpose: str, *key: int) -> int:
    """A uniform 128-bit integer that belongs to (seed, purpose, key) and to nothing else."""
    text = "|".join([GENERATOR, str(int(seed)), purpose, *(str(int(k)) for k in key)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


def below(n: int, seed: int, purpose: str, *key: int) -> int:
    """A uniform integer in [0, n); the bias of the modulus is under n/2^128."""
    if n < 1:
        raise HeartError(f"cannot draw one of {n} things ({purpose}): give at least one")
    return number(seed, purpose, *key) % n


def torch_seed(seed: int, purpose: str, *key: int) -> int:
    """A seed for `torch.Generator.manual_seed`: for start noise, random cotangents and the like."""
    return number(seed, purpose, *key) % (1 << 63)


def permutation(n: int, seed: int, purpose: str, *key: int) -> list[int]:
    """0 … n-1 in an order that belongs to (seed, purpose, key)."""
    return sorted(range(n), key=lambda i: number(seed, purpose, *key, i))


def prompt_of_heads(seed: int, layers: int, heads: int, prompts: int) -> np.ndarray:
    """The prompt of every head, int [L, H]: random, and exactly balanced (counts differ by at most one)."""
    if layers < 1 or heads < 1 or prompts < 1:
        raise HeartError(f"cannot give {prompts} prompts to {layers} layers of {heads} heads: all must be positive")
    ranked = permutation(layers * heads, seed, "prompt")
    order = permutation(prompts, seed, "prompt order")  # which prompts get one head more
    out = np.empty(layers * heads, dtype=np.int64)
    out[ranked] = [order[rank % prompts] for rank in range(layers * heads)]
    return out.reshape(layers, heads)


def _quarters(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """[first, last] cut into `count` intervals at floor(j·n/count): 50 steps give the paper's four."""
    n = last - first + 1
    edges = [first + j * n // count for j in range(count + 1)]
    return [(a, b - 1) for a, b in itertools.pairwise(edges)]


def strata(steps: int, kind: str = "sparse", dense_steps: int = 5, count: int = COUNT) -> list[tuple[int, int]]:
    """The inclusive step intervals that draws are taken from, one draw each.

    `paper`: all steps, [0,11] [12,24] [25,36] [37,49] for 50 and the same proportions for others. `sparse`:
    the same without the first `dense_steps`, which are never sparse at inference; where that would leave the
    first interval with less than half its share of them (with five dense steps: below 36) the sparse steps alone are divided,
    because one step would get a quarter of all draws. With fewer steps than intervals there is an interval a
    step.
    """
    if kind not in STRATA:
        raise HeartError(f"strata are {' or '.join(map(repr, STRATA))}, not {kind!r}")
    first = dense_steps if kind == "sparse" else 0
    if steps < 1 or count < 1 or first < 0 or first >= steps:
        raise HeartError(
            f"{steps} steps of which the first {first} are dense leave none to calibrate on: take more steps"
        )
    left = steps // count - first
    if left > 0 and 2 * count * left >= steps - first:
        (_, last), *rest = _quarters(0, steps - 1, count)
        return [(first, last), *rest]
    return _quarters(first, steps - 1, min(count, steps - first))


def steps_of_head(seed: int, layer: int, head: int, intervals: Sequence[tuple[int, int]]) -> list[int]:
    """One uniform step from each interval for head (layer, head)."""
    return [a + below(b - a + 1, seed, "step", layer, head, j) for j, (a, b) in enumerate(intervals)]


def contexts(
    seed: int,
    purpose: str,
    prompts: int,
    intervals: Sequence[tuple[int, int]],
    count: int,
    avoid: Iterable[tuple[int, int]] = (),
) -> list[tuple[int, int]]:
    """`count` distinct (prompt, step) pairs for all heads in common, balanced over prompts and intervals.

    `avoid` holds pairs that must not come again (those calibrated on, when held-out ones are drawn). The
    first n of a longer list are the shorter list.
    """
    order = permutation(prompts, seed, f"{purpose} prompts")
    taken = {(int(p), int(s)) for p, s in avoid}
    wheel = math.lcm(len(intervals), prompts)
    out: list[tuple[int, int]] = []
    rounds = max(b - a + 1 for a, b in intervals)
    for i in range(rounds * len(intervals) * prompts):
        if len(out) == count:
            break
        # All interval-prompt pairs come once before any comes again: both wheels turn, one slips when they
        # meet.
        j, prompt = i % len(intervals), order[(i + i // wheel) % prompts]
        a, b = intervals[j]
        free = (a + s for s in permutation(b - a + 1, seed, purpose, prompt, j) if (prompt, a + s) not in taken)
        step = next(free, None)
        if step is not None:
            taken.add((prompt, step))
            out.append((prompt, step))
    if len(out) < count:
        raise HeartError(
            f"{count} contexts were asked for, but {prompts} prompts at these steps have only {len(out)}: "
            "take fewer contexts, more prompts or more steps"
        )
    return out
