"""What prediction costs, as ratios of dense attention from one run.

python benchmarks/predict.py            # N = 8,192 and 32,760 (some minutes), one thread
python benchmarks/predict.py --quick    # N = 8,192 alone
python benchmarks/predict.py --json     # for machines
python benchmarks/predict.py --store    # keep the ratios for later runs to compare with

Everything that is compared runs in turn, several times, and the best of each counts. With one thread the time
is the process's own CPU time, so that a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heart_attention import kernels
from heart_attention.backbones import SVG, SVG2, ExactMass, Lite, Sparge, XAttention
from heart_attention.kernels.ops import native as native
from heart_attention.online import reuse
from ratios import Ratio, add_arguments, settle

HEADS, WIDTH = 4, 128
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Best:
    """Best time of each named thing, in seconds."""

    def __init__(self, threads: int):
        self.clock = time.process_time if threads == 1 else time.perf_counter
        self.times: dict[str, float] = {}

    def run(self, name: str, what: Callable[[], Any], repeat: int = 1) -> Any:
        """Run `what`, remember the quickest time, return its last result."""
        for _ in range(repeat):
            start = self.clock()
            result = what()
            self.times[name] = min(self.times.get(name, float("inf")), self.clock() - start)
        return result

    def percent(self, name: str, of: str) -> float:
        """Time of `name` as percent of the time of `of`."""
        return 100 * self.times[name] / self.times[of]


def smooth(n: int, seed: int) -> Tensor:
    """Tokens [1, H, N, D] that resemble their neighbours, so that masks are neither full nor arbitrary."""
    g = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, HEADS, -(-n // 64), WIDTH, generator=g).repeat_interleave(64, 2)[:, :, :n]
    return 0.8 * coarse + 0.6 * torch.randn(1, HEADS, n, WIDTH, generator=g)


def xattention(n: int, threads: int, repeat: int) -> list[dict[str, Any]]:
    """Rows of the table for one length: prediction, selection alone and drift against dense SDPA."""
    best, backbone = Best(threads), XAttention()
    full = smooth(n, 0), smooth(n, 1)
    inputs = {name: [x.to(dtype) for x in full] for name, dtype in DTYPES.items()}
    strided = {name: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in pair] for name, pair in inputs.items()}
    scores = backbone.scores(*full)
    masks: dict[str, Any] = {}
    for _ in range(repeat):
        for name, (q, k) in inputs.items():
            best.run(f"dense {name}", lambda q=q, k=k: F.scaled_dot_product_attention(q, k, k))
            for _ in range(5 if n > 16384 else 8):
                masks[name] = best.run(f"predict {name}", lambda q=q, k=k: backbone.predict(q, k, 0.9))
                view = strided[name]
                best.run(f"predict {name} strided", lambda view=view: backbone.predict(*view, 0.9))
                best.run(f"drift {name}", lambda q=q, k=k: decide(q, k), 3)
            best.run("select", lambda: backbone.select(scores, 0.9), 3)
    flips = (masks["fp32"].blocks != masks["bf16"].blocks).double().mean().item()
    return [
        {
            "tokens": n,
            "inputs": name,
            "dense_s": best.times[f"dense {name}"],
            "prediction_percent": best.percent(f"predict {name}", f"dense {name}"),
            "prediction_strided_percent": best.percent(f"predict {name} strided", f"dense {name}"),
            "prediction_over_fp32": best.times[f"predict {name}"] / best.times["predict fp32"],
            "selection_percent": best.percent("select", f"dense {name}"),
            "drift_percent": best.percent(f"drift {name}", f"dense {name}"),
            "density": masks[name].density().mean().item(),
            "flipped_blocks_percent": 100 * flips if name == "bf16" else 0.0,
        }
        for name in DTYPES
    ]


def others(n: int, threads: int, repeat: int) -> list[dict[str, Any]]:
    """Rows of the table: what Sparge, SVG and ExactMass predict in, and what Lite's verdict adds to attention.

    Lite is the difference between two calls that compute all tiles, one with the verdict and the set it leaves.
    """
    best, rows = Best(threads), []
    full = [smooth(n, seed) for seed in range(3)]
    inputs = {name: [x.to(dtype) for x in full] for name, dtype in DTYPES.items()}
    for _ in range(repeat):
        for name, (q, k, v) in inputs.items():
            best.run(f"dense {name}", lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v))
            for label, predict in predictions(q, k, v).items():
                best.run(f"{label} {name}", predict, 1 if label == "exact" else 4)
            for label, attend in lite_calls(q, k, v).items():
                best.run(f"{label} {name}", attend, 2)
    for label, bar in (("sparge", 2.0), ("svg", 3.0), ("lite", 3.0), ("exact", 50.0)):
        for name in DTYPES:
            added = best.times[f"lite with {name}"] - best.times[f"lite without {name}"]
            spent = added if label == "lite" else best.times[f"{label} {name}"]
            percent = 100 * spent / best.times[f"dense {name}"]
            rows.append({"backbone": label, "tokens": n, "inputs": name, "percent": percent, "bar": bar})
    return rows


def predictions(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """What predicts a mask before attention."""
    grid = (q.shape[2] // 256, 16, 16)
    return {
        "sparge": lambda: Sparge().predict(q, k, 0.98),
        "svg": lambda: SVG().predict(q, k, 0.3, v=v, grid=grid),
        "exact": lambda: ExactMass().predict(q, k, 0.9),
    }


def lite_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """Attention over all of Lite's tiles, with and without the verdict."""
    backbone, every = Lite(-10), torch.ones(q.shape[:2], dtype=torch.bool)
    mask = backbone.predict(q, k, 0.9)
    plan = kernels.plan("cpu", mask)

    def judged() -> None:
        state = backbone.new_state()
        visit = backbone.visit(state, mask, every)
        kernels.run(plan, q, k, v, visit=visit)
        backbone.learn(state, mask, visit.gains, every, [0.9] * HEADS)

    return {"lite without": lambda: kernels.run(plan, q, k, v), "lite with": judged}


def decide(q: Tensor, k: Tensor) -> Tensor:
    """Pooled drift against an anchor, and the decision which heads refresh."""
    anchor = torch.zeros(2, 1, HEADS, WIDTH, dtype=torch.float32 if q.dtype == torch.float32 else torch.float16)
    cached = torch.ones(1, HEADS, dtype=torch.bool)
    moved = reuse.drift(anchor, reuse.features(q, k, "mean"))
    return reuse.gate(~(moved <= 30.0), 0.4, 0.8, cached)


def plain_kmeans(x: Tensor, centroids: Tensor, iters: int) -> tuple[Tensor, Tensor]:
    """k-means as one writes it in PyTorch: the whole distance matrix, argmin, scatter; all heads at once."""
    for _ in range(iters):
        distances = x.square().sum(-1, keepdim=True) + centroids.square().sum(-1).unsqueeze(-2)
        distances = distances - 2 * x @ centroids.transpose(-1, -2)  # [B, H, N, C]
        labels = distances.argmin(-1)
        sums = torch.zeros_like(centroids).scatter_add_(2, labels.unsqueeze(-1).expand_as(x), x)
        sizes = torch.zeros(centroids.shape[:-1]).scatter_add_(2, labels, torch.ones(labels.shape)).unsqueeze(-1)
        centroids = torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)
    return labels, centroids


def kmeans(n: int, threads: int, repeat: int) -> list[dict[str, Any]]:
    """Rows of the table: two iterations of k-means against plain PyTorch, and the map from its centroids."""
    best, backbone, rows = Best(threads), SVG2(), []
    g = torch.Generator().manual_seed(2)
    for name, count in (("q", backbone.q_clusters), ("k", backbone.k_clusters)):
        x = smooth(n, 3)
        start = x[:, :, torch.randint(n, (count,), generator=g)]
        for _ in range(repeat):
            plain = best.run(f"plain {name}", lambda x=x, start=start: plain_kmeans(x, start, 2))
            found = best.run(f"ours {name}", lambda x=x, start=start: backbone.cluster(x, start, 2), 2)
        unequal = (plain[0] != found[0]).double().mean().item()
        rows.append(
            {"clusters": f"{name} {count}", **_kmeans_row(best, [name]), "unequal_labels_percent": 100 * unequal}
        )
    rows.append({"clusters": "both", **_kmeans_row(best, ["q", "k"]), "unequal_labels_percent": None})
    return rows


def _kmeans_row(best: Best, names: list[str]) -> dict[str, float]:
    plain, ours = (sum(best.times[f"{what} {name}"] for name in names) for what in ("plain", "ours"))
    return {"plain_s": plain, "ours_s": ours, "speedup": plain / ours}


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """Rows as a text table."""
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in [names, *cells]]
    return "\n".join([title, *lines, ""])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def ratios(results: dict[str, Any]) -> list[Ratio]:
    """What is stored of it."""
    found, threads = [], results["threads"]
    for row in results["xattention"]:
        for part in ("prediction", "prediction_strided", "selection", "drift"):
            name = f"{part.replace('_', ' ')}, N={row['tokens']} {row['inputs']}, threads {threads}"
            found.append(Ratio(name, row[f"{part}_percent"], "% of dense", higher=False))
    for row in results["kmeans"]:
        found.append(Ratio(f"k-means, {row['clusters']}, threads {threads}", row["speedup"], "x of plain PyTorch"))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="N = 8,192 alone")
    parser.add_argument("--tokens", type=int, nargs="+", help="other lengths for XAttention")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-others", action="store_true", help="Sparge, SVG, Lite and ExactMass alone")
    parser.add_argument("--no-kmeans", action="store_true", help="leave the k-means table out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only_others:
        rows = others(8192, args.threads, args.repeat)
        print(json.dumps(rows, indent=1) if args.json else table("Percent of dense SDPA", rows))
        return
    lengths = args.tokens or ([8192] if args.quick else [8192, 32760])
    results: dict[str, Any] = {
        "heads": HEADS, "width": WIDTH, "threads": args.threads, "native": native.serves(torch.zeros(1, 1)),
        "xattention": [row for n in lengths for row in xattention(n, args.threads, args.repeat)],
        "others": others(8192, args.threads, args.repeat),
        "kmeans": [] if args.no_kmeans else kmeans(8192, args.threads, args.repeat),
    }  # fmt: skip
    if args.json:
        print(json.dumps(results, indent=1))
        return
    how = "C" if results["native"] else "PyTorch (no compiler)"
    print(f"H={HEADS}, D={WIDTH}, {args.threads} thread(s), prediction in {how}\n")
    print(table("XAttention prediction, selection and drift, percent of dense SDPA", results["xattention"]))
    print(table("Sparge, SVG, ExactMass; what Lite's verdict adds: percent of dense SDPA", results["others"]))
    if results["kmeans"]:
        print(table("k-means, 2 iterations at N=8,192, against plain PyTorch", results["kmeans"]))
    settle("predict", ratios(results), args.store)


if __name__ == "__main__":
    main()
