"""Runs the studies that are wanted, sharing what they can, in one folder."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import pipelines
from . import adjacent, drift, frequency, interactions, iou, response, timesteps

TOGETHER = {"iou": iou.run, "drift": drift.run, "timesteps": timesteps.run}  # one pass over the generations serves them
Control = Callable[[], contextlib.AbstractContextManager[Any]]


def run(
    wanted: Sequence[str], pipe: Any, control: bool, call: dict, prompts: list[str], out: Path, seed: int = 0
) -> dict[str, dict]:
    """Name → finding; with `control`, each study is also made with random weights."""
    other: Control | None = (lambda: random_weights(pipe)) if control else None
    steps = call["num_inference_steps"]
    runs: dict[str, Callable[[], dict]] = {
        "response": lambda: response.run(pipe, other, call, prompts[:1], out, [steps // 3, 4 * steps // 5], seed),
        "frequency": lambda: frequency.run(pipe, other, call, prompts, out, seed=seed),
        "interactions": lambda: interactions.run(pipe, other, out, call=call, prompts=prompts, seed=seed),
    }
    if any(name in TOGETHER for name in wanted):
        tables = _adjacent(pipe, other, call, prompts, out, seed)
        runs |= {name: lambda study=study: study(*tables, out, seed) for name, study in TOGETHER.items()}
    return {name: runs[name]() for name in wanted}


def _adjacent(pipe: Any, control: Control | None, call: dict, prompts: list[str], out: Path, seed: int) -> tuple:
    trained = adjacent.cached(pipe, call, prompts, out, "trained", seed)
    if control is None:
        return trained, None
    with control() as other:
        return trained, adjacent.cached(other, call, prompts[:1], out, "random", seed)


@contextlib.contextmanager
def random_weights(pipe: Any, seed: int = 0) -> Iterator[Any]:
    """The same pipeline with random weights in its transformer; the trained one waits in main memory meanwhile."""
    import torch

    if pipelines.name_of(pipe) in pipelines.TINY:
        yield pipelines.load("tiny-random", device="cpu")
        return
    trained, device = pipe.transformer, pipe.transformer.device
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = type(trained).from_config(trained.config).to(trained.dtype).eval()
    trained.to("cpu")
    try:
        control = copy.copy(pipe)
        control.register_modules(transformer=fresh.to(device))
        yield control
    finally:
        fresh.to("cpu")
        trained.to(device)
