"""Measuring a table of costs on this machine: what `heart tune-costs` does.

Every part of a call is timed at two sizes, interleaved, best of several rounds, and a line drawn through both. The
tables that ship for CPUs were made by this; those for GPUs are reasoned and say so.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backbones, kernels
from ..backbones.base import Backbone, pairs, tokens
from ..backbones.svg2 import SVG2
from ..config import HeartConfig
from ..online import cost_model, reuse
from ..online.call import CallContext
from ..online.cost_model import PARTS, Costs, CostTable, Line
from ..online.engine import Engine

SIZES = {"cpu": (512, 4096), "cuda": (1024, 8192)}  # tokens at which parts are timed
HEAD_SIZES = (32, 64, 128)
HEADS = 2
THRESHOLD = 0.5
MEASURED = {"block": "xattention", "cluster": "svg2"}  # what stands for backbones that are not named
RANKED_ANEW = SVG2(rank="error")  # ranks its clusters at every call, so a reused mask costs more around it


def measure(
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    names: Sequence[str] = tuple(MEASURED.values()),
    head_sizes: Sequence[int] = HEAD_SIZES,
    kernel: str = "auto",
    margin: float = 0.0,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda line: None,
) -> CostTable:
    """Costs of this device for these backbones and head sizes."""
    device = torch.device(device)
    chosen = kernels.choose(None, torch.empty(1, HEADS, 64, head_sizes[0], device=device, dtype=dtype), kernel)
    entries: dict[str, dict[int, Costs]] = {}
    named = [backbones.by_name(name) for name in dict.fromkeys((*MEASURED.values(), *names))]
    for backbone in (*named, RANKED_ANEW):
        entries[backbone.cost_name] = {}
        for dim in head_sizes:
            progress(f"{backbone.cost_name}, heads of {dim}")
            entries[backbone.cost_name][dim] = measure_costs(device, dtype, dim, backbone, chosen, rounds)
    for kind, name in MEASURED.items():
        entries[kind] = entries[name]
    kind = cost_model.kind_of(device, chosen.name)
    return CostTable(kind, _origin(device, dtype, chosen.name), margin, entries)


def _origin(device: torch.device, dtype: torch.dtype, kernel: str) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"measured: {name}{threads}, torch {torch.__version__}, {str(dtype)[6:]}, kernel {kernel}"


@torch.no_grad()
def measure_costs(
    device: torch.device, dtype: torch.dtype, dim: int, backbone: Backbone, kernel: Any, rounds: int = 5
) -> Costs:
    """Lines through the times of each part at two sizes."""
    small, large = (_time_at(n, device, dtype, dim, backbone, kernel, rounds) for n in SIZES[device.type])
    return Costs(**{name: _line(small[name], large[name]) for name in PARTS})


def _time_at(
    n: int, device: torch.device, dtype: torch.dtype, dim: int, backbone: Backbone, kernel: Any, rounds: int
) -> dict[str, tuple[float, float]]:
    """(work, seconds) of each part on random tokens of a few heads."""
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, HEADS, n, dim, generator=generator).to(device, dtype) for _ in range(3))
    backbone = backbone.usual().scaled_to(n)
    state, key, shape = backbone.new_state(), (0, "costs", 0), tuple(q.shape)
    more = {"v": v} if backbone.reads_values else {}
    mask = backbone.predict(q, k, THRESHOLD, state, key=key, **more)  # a first clustering; later ones start from it
    plan, predicting = kernel.plan(mask), backbone.prediction_work(shape)
    parts: dict[str, tuple[float, Callable[[], Any]]] = {
        "dense": (pairs(shape), lambda: F.scaled_dot_product_attention(q, k, v)),
        "kernel": (float(mask.density().mean()) * pairs(shape), lambda: kernel.run(plan, q, k, v)),
        "prediction": (predicting, lambda: kernel.plan(backbone.predict(q, k, THRESHOLD, state, key=key, **more))),
        "drift": (tokens(shape), lambda: reuse.features(q, k, "mean")),
        "first": (
            predicting,
            lambda: kernel.plan(backbone.predict(q, k, THRESHOLD, backbone.new_state(), key=key, **more)),
        ),
        "means": (tokens(shape), lambda: reuse.features(k, v, "mean")),
    }
    times = _best([function for _, function in parts.values()], device.type == "cuda", rounds)
    timed = {name: (work, seconds) for (name, (work, _)), seconds in zip(parts.items(), times)}
    return _with_bookkeeping(timed, backbone, kernel.name, q, rounds)


def _with_bookkeeping(
    timed: dict[str, tuple[float, float]], backbone: Backbone, kernel: str, q: Tensor, rounds: int
) -> dict[str, tuple[float, float]]:
    """Drift with everything that the engine does around a reused mask: a call of it, less its attention."""
    config = HeartConfig(
        backbone, THRESHOLD, reuse.TMR(delta=math.inf), dense_steps=0, kernel=kernel, force_sparse=True
    )
    engine = Engine(config, 1, q.shape[1])
    step = iter(range(1_000_000))

    def call() -> None:
        engine.attend(CallContext(layer=0, layers=1, step=next(step)), q, q, q, F.scaled_dot_product_attention)

    call()
    seconds = _best([call], q.is_cuda, rounds)[0] - timed["kernel"][1]
    work, alone = timed["drift"]
    return {**timed, "drift": (work, max(seconds, alone))}


def _line(a: tuple[float, float], b: tuple[float, float]) -> Line:
    """Through two points, never sloping down nor starting below zero."""
    rate = max((b[1] - a[1]) / (b[0] - a[0]), 0.0)
    return Line(float(f"{max(a[1] - rate * a[0], 0.0):.4g}"), float(f"{rate:.4g}"))


def _best(functions: Sequence[Callable[[], Any]], cuda: bool, rounds: int) -> list[float]:
    """Best time of each, interleaved so that a busy moment hits all alike; the first round only warms up."""
    best = [math.inf] * len(functions)
    for round_ in range(rounds + 1):
        for i, function in enumerate(functions):
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            if cuda:
                torch.cuda.synchronize()
            if round_:
                best[i] = min(best[i], time.perf_counter() - start)
    return best
