"""Attention kernels against dense SDPA, as ratios from one run: best of interleaved repetitions.

    python benchmarks/attention.py [--quick] [--json FILE] [--only blocks,small,...] [--threads 1,2] [--store]

Speed is given as a share of the ideal: dense time / sparse time x density; 1 means that leaving out a share of the
work saves exactly that share of dense SDPA's time. One thread is timed in processor time, which other programs on the
machine disturb less; several threads in wall time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from heart_attention import kernels
from heart_attention.masks import BlockMask, ClusterMask
from ratios import Ratio, add_arguments, settle

DENSITIES = (0.1, 0.25, 0.5)
HIGHER = ("of ideal", "x")  # units of which more is better
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Row:
    """One line of a table."""

    table: str
    case: str
    threads: int
    density: float
    value: float
    unit: str


def best(functions: dict[str, Callable[[], object]], repeat: int, threads: int) -> dict[str, float]:
    """Seconds of each, best of `repeat` rounds in which all take turns.

    Every round has another order: what runs after dense attention finds the caches full of other things, and that
    should not always be the same one.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    found = dict.fromkeys(functions, math.inf)
    names, shuffle = list(functions), random.Random(0).shuffle
    for _ in range(repeat if threads == 1 else 3 * repeat):  # wall time meets a quiet moment less often
        shuffle(names)
        for name in names:
            start = clock()
            functions[name]()
            found[name] = min(found[name], clock() - start)
    return found


def inputs(heads: int, n: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v as diffusers hands them over: [B, N, H, D] seen as [B, H, N, D]."""
    return [torch.randn(1, n, heads, dim).transpose(1, 2).to(dtype) for _ in range(3)]


def random_rows(heads: int, m: int, density: float) -> torch.Tensor:
    """Kept blocks anywhere, the first always; some rows have one more than others, so that the density is met."""
    keep, more = divmod(round(density * m * m), m)
    scores = torch.rand(1, heads, m, m)
    scores[..., 0] = 2
    rank = scores.argsort(dim=-1, descending=True).argsort(dim=-1)
    return rank < (keep + (torch.arange(m) * more % m < more).long())[:, None]


def banded_rows(heads: int, m: int, density: float) -> torch.Tensor:
    """A band around the diagonal and the first column as sink; edge rows are shorter."""
    width = max(0, round((density * m - 1) / 2))
    i = torch.arange(m)
    band = (i[:, None] - i[None, :]).abs() <= width
    band[:, 0] = True
    return band.expand(1, heads, m, m).clone()


ROWS = {"random": random_rows, "banded": banded_rows}


def uneven_labels(heads: int, n: int, clusters: int) -> torch.Tensor:
    """Cluster sizes that differ several times, as k-means makes them."""
    weights = torch.rand(heads, clusters).pow(1.5) + 0.15
    return torch.multinomial(weights, n, replacement=True).view(1, heads, n).to(torch.int16)


def cluster_mask(heads: int, n: int, density: float, counts: tuple[int, int] = (300, 1000)) -> ClusterMask:
    """Clusters of queries and of keys, a random map of that density."""
    kept = torch.rand(1, heads, *counts) < density
    return ClusterMask(kept, *(uneven_labels(heads, n, count) for count in counts))


def against_dense(table: str, case: str, masks: dict[str, object], q, k, v, names, repeat, threads) -> list[Row]:
    """One row for each mask and kernel: share of the ideal."""
    functions: dict[str, Callable[[], object]] = {"dense": lambda: F.scaled_dot_product_attention(q, k, v)}
    for label, mask in masks.items():
        for name in names:
            plan = kernels.plan(name, mask)
            functions[f"{label}, {name}"] = lambda plan=plan: kernels.run(plan, q, k, v)
    seconds = best(functions, repeat, threads)
    rows = []
    for label, mask in masks.items():
        density = float(mask.density().mean())
        for name in names:
            share = seconds["dense"] / seconds[f"{label}, {name}"] * density
            rows.append(Row(table, f"{case}, {label}, {name}", threads, density, share, "of ideal"))
    return rows


def blocks(args, threads: int) -> list[Row]:
    """Equal blocks of 128 at video sizes."""
    rows = []
    for n, repeat in ((8192, 10), (32760, 3)) if not args.quick else ((8192, 5),):
        m = math.ceil(n / 128)
        for type_name, dtype in TYPES.items():
            q, k, v = inputs(1, n, 128, dtype)
            masks = {
                f"{kind} {density}": BlockMask(make(1, m, density), 128, n, n)
                for kind, make in ROWS.items()
                for density in DENSITIES
            }
            case = f"N={n} D=128 block 128 {type_name}"
            rows += against_dense("equal blocks", case, masks, q, k, v, ["cpu"], repeat, threads)
    return rows


def small(args, threads: int) -> list[Row]:
    """Small heads and blocks, as the embedded model has."""
    rows = []
    for dim, heads in ((32, 4), (64, 2)):
        for type_name, dtype in TYPES.items():
            q, k, v = inputs(heads, 4096, dim, dtype)
            masks = {
                f"{kind} {density}": BlockMask(make(heads, 64, density), 64, 4096, 4096)
                for kind, make in ROWS.items()
                for density in DENSITIES
            }
            case = f"N=4096 D={dim} block 64 {type_name}"
            rows += against_dense("small blocks", case, masks, q, k, v, ["cpu"], 5 if args.quick else 40, threads)
    return rows


def clusters(args, threads: int) -> list[Row]:
    """Variable blocks; permuting and putting back are inside the kernel."""
    rows = []
    for n, repeat in ((8192, 8), (32760, 2)) if not args.quick else ((8192, 4),):
        q, k, v = inputs(1, n, 128, torch.float32)
        masks = {"300 x 1000 clusters": cluster_mask(1, n, 0.25)}
        rows += against_dense("variable blocks", f"N={n} D=128", masks, q, k, v, ["cpu"], repeat, threads)
    return rows


def rest(args, threads: int) -> list[Row]:
    """Left-out groups as means: time against what dropping them takes, grown as the computed keys are; and memory."""
    rows = []
    cases = (((64, 256), 4096, 4, 32, 40), ((64, 256), 4096, 2, 64, 40), ((300, 1000), 32760, 1, 128, 3))
    for counts, n, heads, dim, repeat in cases[: 2 if args.quick else None]:
        q, k, v = inputs(heads, n, dim, torch.float32)
        for density in (0.1, 0.25):
            label = f"{counts[0]} x {counts[1]} clusters"
            rows.append(_rest_row(label, cluster_mask(heads, n, density, counts), q, k, v, repeat, threads))
    q, k, v = inputs(4, 4096, 32, torch.float32)
    for density in (0.1, 0.25):
        mask = BlockMask(random_rows(4, 64, density), 64, 4096, 4096)
        rows.append(_rest_row("blocks of 64", mask, q, k, v, 40, threads))
    if not args.quick:
        rows.append(Row("rest", "N=32760 H=12 D=128 300 x 1000 clusters, memory", threads, 0.1, _rest_memory(), "MB"))
    return rows


def _rest_row(label: str, mask, q, k, v, repeat: int, threads: int) -> Row:
    plans = {name: kernels.plan("cpu", mask, name) for name in ("drop", "mean")}
    functions = {name: partial(kernels.run, plan, q, k, v) for name, plan in plans.items()}
    seconds = best(functions, repeat, threads)
    density, cost = float(mask.density().mean()), float(mask.cost("mean").mean())
    value = seconds["mean"] / seconds["drop"] / (cost / density)
    case = f"N={q.shape[2]} D={q.shape[3]} {label}, cost {cost:.3f}"
    return Row("rest", case, threads, density, value, "of time by computed keys")


MEMORY = """
import resource, torch
from heart_attention import kernels
from attention import cluster_mask
q, k, v, out = (torch.ones(1, 32760, 12, 128).transpose(1, 2) for _ in range(4))
mask = cluster_mask(12, 32760, 0.1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = torch.ones(1, 12, 64, 128)
kernels.run(kernels.plan("cpu", cluster_mask(12, 64, 0.5, (4, 8)), "mean"), small, small, small)  # libraries are in
before = peak()
kernels.run(kernels.plan("cpu", mask, "mean"), q, k, v, out=out)
print((peak() - before) / 1024)
"""


def _rest_memory() -> float:
    """Megabytes beyond inputs, outputs and mask, planning included, in a process of its own."""
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", MEMORY], cwd=folder, capture_output=True, text=True, check=True)
    return float(done.stdout)


def gather(args, threads: int) -> list[Row]:
    """The portable kernel."""
    rows = []
    for type_name, dtype in TYPES.items():
        q, k, v = inputs(1, 8192, 128, dtype)
        masks = {
            f"{kind} {density}": BlockMask(make(1, 64, density), 128, 8192, 8192)
            for kind, make in ROWS.items()
            for density in DENSITIES
        }
        case = f"N=8192 D=128 block 128 {type_name}"
        rows += against_dense("portable", case, masks, q, k, v, ["gather"], 3 if args.quick else 10, threads)
    return rows


def planning(args, threads: int) -> list[Row]:
    """Planning a mask, as a percentage of running it once."""
    rows = []
    q, k, v = inputs(4, 8192, 128, torch.float32)
    for label, mask in {
        "equal blocks 0.1": BlockMask(random_rows(4, 64, 0.1), 128, 8192, 8192),
        "300 x 1000 clusters 0.25": cluster_mask(4, 8192, 0.25),
    }.items():
        plan = kernels.plan("cpu", mask)
        functions = {
            "run": lambda plan=plan: kernels.run(plan, q, k, v),
            "plan": lambda mask=mask: kernels.plan("cpu", mask),
        }
        seconds = best(functions, 4, threads)
        share = 100 * seconds["plan"] / seconds["run"]
        density = float(mask.density().mean())
        rows.append(Row("planning", f"H=4 N=8192 D=128 {label}", threads, density, share, "% of running"))
    return rows


def whole_path(args, threads: int) -> list[Row]:
    """XAttention prediction, planning and attention, against dense; then with the mask reused."""
    from heart_attention import XAttention

    backbone, rows = XAttention(stride=16, block=128), []
    q, k, v = inputs(2, 8192, 128, torch.float32)
    for density in (0.25, 0.1):
        mask = BlockMask(random_rows(2, 64, density), 128, 8192, 8192)
        plan = kernels.plan("cpu", mask)

        def every_call(mask=mask):
            """Predict for real; run a mask of the wanted density, since random inputs have no sparse structure."""
            backbone.predict(q, k, 0.9)
            return kernels.run(kernels.plan("cpu", mask), q, k, v)

        functions = {
            "dense": lambda: F.scaled_dot_product_attention(q, k, v),
            "predicted": every_call,
            "reused": lambda plan=plan: kernels.run(plan, q, k, v),
        }
        seconds = best(functions, 5 if args.quick else 10, threads)
        for name, case in (("predicted", "prediction every call"), ("reused", "mask reused")):
            value = seconds["dense"] / seconds[name]
            rows.append(Row("whole path", f"N=8192 D=128, {case}", threads, float(mask.density().mean()), value, "x"))
    return rows


def growth(args, threads: int) -> list[Row]:
    """Time from N=8,192 to 32,760 against quadratic (constant density) and linear (constant kept blocks)."""
    small_n, large_n = 8192, 32760
    tensors = {n: inputs(1, n, 128, torch.float32) for n in (small_n, large_n)}
    functions = {}
    masks = {}
    for n in tensors:
        m = math.ceil(n / 128)
        for label, density in (("constant density", 0.1), ("constant kept blocks", 8 / m)):
            masks[label, n] = BlockMask(random_rows(1, m, density), 128, n, n)
            plan = kernels.plan("cpu", masks[label, n])
            functions[f"{label} {n}"] = lambda plan=plan, x=tensors[n]: kernels.run(plan, *x)
    seconds = best(functions, 4, threads)
    rows = []
    for label in ("constant density", "constant kept blocks"):
        work = [float(masks[label, n].density().mean()) * n * n for n in (small_n, large_n)]
        ratio = seconds[f"{label} {large_n}"] / seconds[f"{label} {small_n}"] / (work[1] / work[0])
        rows.append(Row("growth", f"N=8192 to 32760, {label}", threads, 0.0, ratio, "of time by kept pairs"))
    return rows


TABLES = {
    "blocks": blocks,
    "small": small,
    "clusters": clusters,
    "rest": rest,
    "gather": gather,
    "planning": planning,
    "path": whole_path,
    "growth": growth,
}


def show(rows: list[Row]) -> None:
    """Print one table with its worst, median and best."""
    print(f"\n{rows[0].table}, {rows[0].threads} thread{'s' if rows[0].threads > 1 else ''}")
    for row in rows:
        density = f"density {row.density:.3f}" if row.density else ""
        print(f"  {row.case:<62}{density:<16}{row.value:>7.3f} {row.unit}")
    values = [row.value for row in rows if row.unit == rows[0].unit]
    if len(values) > 2:
        print(f"  worst {min(values):.3f}, median {statistics.median(values):.3f}, best {max(values):.3f}", flush=True)


def ratio(row: Row) -> Ratio:
    """A line as it is stored."""
    name = f"{row.table}, {row.case}, density {row.density:.2f}, threads {row.threads}"
    return Ratio(name, row.value, row.unit, row.unit in HIGHER)


def main() -> None:
    """Run the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    parser.add_argument("--only", default=",".join(TABLES), help=f"of {','.join(TABLES)}")
    parser.add_argument("--threads", default="1,2", help="thread counts; tables but blocks use the first only")
    add_arguments(parser)
    args = parser.parse_args()
    counts = [int(count) for count in args.threads.split(",")]
    rows: list[Row] = []
    for name in args.only.split(","):
        for threads in counts if name == "blocks" else counts[:1]:
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            with torch.no_grad():
                found = TABLES[name](args, threads)
            show(found)
            rows += found
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    settle("attention", [ratio(row) for row in rows], args.store)


if __name__ == "__main__":
    main()
