"""Dense or sparse: whether masks can pay here, from costs measured once on this device and kept on disk.

Every cost is `fixed + rate · work` seconds. Work: token pairs times head size for attention, the backbone's
own count for prediction. Measuring takes about a second, at the first sparse call; the file lies in the
user's cache folder.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import HeartError
from ..files import cache_dir, locked, read_json, write_json
from .reuse import features

log = logging.getLogger(__name__)

SCHEMA = 3
FILE = "overheads.json"
STEADY = 1.3  # a second repetition that takes so much longer than the best was disturbed


@dataclass(frozen=True)
class Line:
    """Seconds as a straight line in the amount of work."""

    fixed: float
    rate: float

    def __call__(self, work: float) -> float:
        return self.fixed + self.rate * work


@dataclass(frozen=True)
class Overheads:
    """What the parts of a call cost on one device, for one dtype, head size, kernel and backbone."""

    dense: Line
    kernel: Line
    prediction: Line  # planning included
    drift: Line
    start: Line  # a generation's first prediction: SVG2 clusters from random tokens then

    def sparse_seconds(self, shape: tuple[int, ...], density: float, refresh: float, backbone: Any) -> float:
        """Expected time of a sparse call on q of this shape, when `refresh` of its masks are predicted anew."""
        pairs, tokens = _pairs(shape), _tokens(shape)
        predict = self.prediction(prediction_work(backbone, shape))
        return self.drift(tokens) + self.kernel(density * pairs) + refresh * predict

    def dense_seconds(self, shape: tuple[int, ...]) -> float:
        """Expected time of dense attention on q of this shape."""
        return self.dense(_pairs(shape))

    def pays(self, shape: tuple[int, ...], density: float, refresh: float, backbone: Any) -> bool:
        """Whether a sparse call is expected to be quicker than dense."""
        return self.sparse_seconds(shape, density, refresh, backbone) < self.dense_seconds(shape)

    def start_pays(self, shape: tuple[int, ...], density: float, refresh: float, backbone: Any, calls: int) -> bool:
        """Whether what a first prediction costs more than a later one is won back over the `calls` to come.

        Iterations cost alike, so their number bounds the first clustering too: a time taken at a busy moment must
        not keep masks away for good. Less than twice a later prediction is no start worth weighing, but noise.
        """
        work = prediction_work(backbone, shape)
        first, later = self.start(work), self.prediction(work)
        if hasattr(backbone, "init_iters"):
            first = min(first, later * backbone.init_iters / backbone.step_iters)
        extra = first - later
        gain = self.dense_seconds(shape) - self.sparse_seconds(shape, density, refresh, backbone)
        return extra <= later or calls * gain > extra


def prediction_work(backbone: Any, shape: tuple[int, ...]) -> float:
    """How prediction grows with the shape: with pairs/stride for XAttention, tokens times clusters for SVG2."""
    if hasattr(backbone, "q_clusters"):
        return _tokens(shape) * (backbone.q_clusters + backbone.k_clusters) * backbone.step_iters
    return _pairs(shape) / getattr(backbone, "stride", 1)


def least_density(backbone: Any, n: int) -> float:
    """The least that a mask can keep: one block a row, or SVG2's share of clusters."""
    return getattr(backbone, "min_ratio", None) or min(1.0, getattr(backbone, "block", 1) / n)


def overheads(q: Tensor, backbone: Any, kernel: Any) -> Overheads:
    """Measured costs for this kind of call; from the cache file if it was measured before on this device."""
    key = _key(q, backbone, kernel.name)
    if key not in _KNOWN:
        _KNOWN[key] = _from_file(key) or _measure_and_keep(key, q, backbone, kernel)
    return _KNOWN[key]


_KNOWN: dict[str, Overheads] = {}


def _key(q: Tensor, backbone: Any, kernel: str) -> str:
    device = torch.cuda.get_device_name(q.device) if q.is_cuda else f"{platform.machine()} {platform.node()}"
    threads = "" if q.is_cuda else f" {torch.get_num_threads()} threads"
    settings = f"block {backbone.block}, stride {backbone.stride}" if hasattr(backbone, "stride") else ""
    name = f"{backbone.name} {settings}".strip()
    return f"{device}{threads}, torch {torch.__version__}, {q.dtype}, head {q.shape[-1]}, {kernel}, {name}"


def _from_file(key: str) -> Overheads | None:
    try:
        data = read_json(cache_dir() / FILE)
        if data["schema"] != SCHEMA or key not in data["overheads"]:
            return None
        lines = {name: Line(float(x["fixed"]), float(x["rate"])) for name, x in data["overheads"][key].items()}
        return Overheads(**lines)
    except (HeartError, OSError, KeyError, TypeError, ValueError):
        return None  # absent or damaged: measured and written anew


def _measure_and_keep(key: str, q: Tensor, backbone: Any, kernel: Any) -> Overheads:
    found, steady = measure(q.device, q.dtype, q.shape[-1], backbone, kernel)
    log.info("measured on this device (%s): %s", key, found)
    if not steady:
        log.info("repetitions differed too much to be kept for other runs: the machine is busy")
        return found
    try:
        path = cache_dir() / FILE
        with locked(path.with_suffix(".lock")):
            try:
                data = read_json(path)
                known = data["overheads"] if data["schema"] == SCHEMA else {}
            except (HeartError, KeyError, TypeError):
                known = {}
            write_json(path, {"schema": SCHEMA, "overheads": {**known, key: asdict(found)}})
    except OSError as error:  # a read-only home is no reason to stop
        log.warning("could not keep measured overheads: %s", error)
    return found


@torch.no_grad()
def measure(device: Any, dtype: torch.dtype, dim: int, backbone: Any, kernel: Any) -> tuple[Overheads, bool]:
    """Time dense attention, the kernel, prediction and drift at two sizes each, and draw lines through them.

    Also whether repetitions agreed: times of a busy moment must not be kept for good.
    """
    sizes = (1024, 8192) if torch.device(device).type == "cuda" else (512, 2048)
    points = [_time_at(n, device, dtype, dim, backbone, kernel) for n in sizes]
    (small, steady), (large, also) = points
    return Overheads(**{name: _line(small[name], large[name]) for name in small}), steady and also


def _time_at(
    n: int, device: Any, dtype: torch.dtype, dim: int, backbone: Any, kernel: Any
) -> tuple[dict[str, tuple], bool]:
    """(work, seconds) of each part on random tokens of two heads, and whether repetitions agreed."""
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, 2, n, dim, generator=generator).to(device, dtype) for _ in range(3))
    if hasattr(backbone, "q_clusters"):  # it may be fitted to its own sequence already: so few would tell nothing
        usual = type(backbone)()
        backbone = replace(backbone, q_clusters=usual.q_clusters, k_clusters=usual.k_clusters)
    backbone = backbone.scaled_to(n)
    state, key, shape = backbone.new_state(), (0, "worth", 0), tuple(q.shape)
    mask = backbone.predict(q, k, 0.5, state, key=key)  # a first clustering; later ones start from it
    plan, predicting = kernel.plan(mask), prediction_work(backbone, shape)
    parts = {
        "dense": (_pairs(shape), lambda: F.scaled_dot_product_attention(q, k, v)),
        "kernel": (float(mask.density().mean()) * _pairs(shape), lambda: kernel.run(plan, q, k, v)),
        "prediction": (predicting, lambda: kernel.plan(backbone.predict(q, k, 0.5, state, key=key))),
        "drift": (_tokens(shape), lambda: features(q, k, "mean")),
        "start": (predicting, lambda: kernel.plan(backbone.predict(q, k, 0.5, backbone.new_state(), key=key))),
    }
    times, steady = _best([function for _, function in parts.values()], q.is_cuda)
    return {name: (work, seconds) for (name, (work, _)), seconds in zip(parts.items(), times)}, steady


def _line(a: tuple[float, float], b: tuple[float, float]) -> Line:
    """Through two points, never sloping down nor starting below zero."""
    rate = max((b[1] - a[1]) / (b[0] - a[0]), 0.0)
    return Line(max(a[1] - rate * a[0], 0.0), rate)


def _best(functions: list[Callable[[], Any]], cuda: bool, repeats: int = 3) -> tuple[list[float], bool]:
    """Best time of each, interleaved so that a busy moment hits all alike; the first round only warms up.

    Steady: of all functions that weigh, the second best time is near the best.
    """
    seen: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, times in zip(functions, seen):
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            if cuda:
                torch.cuda.synchronize()
            if repeat:
                times.append(time.perf_counter() - start)
    ordered = [sorted(times) for times in seen]
    longest = max(times[0] for times in ordered)
    steady = all(times[1] <= STEADY * times[0] for times in ordered if times[0] > longest / 10)
    return [times[0] for times in ordered], steady


def _pairs(shape: tuple[int, ...]) -> float:
    batch, heads, n, dim = shape
    return float(batch * heads * dim) * n * n


def _tokens(shape: tuple[int, ...]) -> float:
    batch, heads, n, dim = shape
    return float(batch * heads * dim * n)
