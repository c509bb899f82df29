"""The rest dropped or approximated, and operating points chosen by head: videos of the embedded model against dense.

    python benchmarks/rest.py --work DIR [--methods NAME,NAME] [--steps 50] [--prompts 8] [--seeds 2] [--calibration F]
    python benchmarks/rest.py --work DIR --times            # attention and whole time over dense, interleaved
    python benchmarks/rest.py --work DIR --table            # what the folder holds

PSNR against the dense video of the same prompt and seed, on held-out prompts that no shipped calibration has seen. Every
video is one record in DIR, so that a stopped run goes on. PSNR does not depend on a busy machine, times do: they are
measured apart, all methods of a prompt in turn, and only worth reading from an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import heart_attention as heart
from heart_attention import tiny
from heart_attention.evaluation import methods as named
from heart_attention.evaluation.tables import interval
from heart_attention.files import write_json
from ratios import Ratio, add_arguments, settle

SEEN = 6  # held-out prompts that calibrations verify on


def clusters(share: float, q_clusters: int = 128, k_clusters: int = 256, delta: float = 0.2) -> heart.HeartConfig:
    """Clusters ranked by error with means for the rest, a share of keys exact."""
    backbone = heart.SVG2(q_clusters=q_clusters, k_clusters=k_clusters, rank="error")
    return heart.HeartConfig(backbone, share, heart.TMR(relative=delta), rest="mean")


def xattention(tau: float) -> heart.HeartConfig:
    """XAttention with the rest dropped and masks reused."""
    return heart.HeartConfig(heart.XAttention(8, 64), tau, heart.TMR(relative=0.1))


METHODS: dict[str, Callable[[], heart.HeartConfig]] = {
    "dense": lambda: xattention(1.0),
    "xattention 0.9, dropped": lambda: xattention(0.9),
    "svg2 38x125 0.9, dropped": lambda: heart.HeartConfig(
        heart.SVG2(38, 125, min_ratio=0.1), 0.9, heart.TMR(relative=0.2)
    ),
    "clusters, 5 % exact": lambda: clusters(0.05),
    "clusters, 10 % exact": lambda: clusters(0.1),
    "clusters, 12 % exact": lambda: clusters(0.12),
    "clusters, 15 % exact": lambda: clusters(0.15),
    "clusters, 20 % exact": lambda: clusters(0.2),
}
DEFAULT = ("dense", "xattention 0.9, dropped", "clusters, 10 % exact", "clusters, 20 % exact")


class Bench:
    """One pipeline, its methods and the folder of records."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.work = args, Path(args.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.pipe = tiny.load()
        self.pipe.set_progress_bar_config(disable=True)
        self.call = {**tiny.NATIVE, "num_inference_steps": args.steps}
        self.prompts = tiny.prompts("heldout")[SEEN : SEEN + args.prompts]

    def config(self, method: str) -> Any:
        """The config of a method of this file, or of one that `heart compare` knows."""
        if method in METHODS:
            return METHODS[method]()
        given = named.sort_calibrations(self.args.calibration)
        return named.build(method, self.pipe, "tiny", given).config

    def video(self, method: str, prompt: str, seed: int) -> tuple[Any, dict]:
        """A video [T, H, W, 3] in 0..1, and what HEART did."""
        generator = torch.Generator().manual_seed(seed)
        with heart.enabled(self.pipe, self.config(method)):
            frames = self.pipe(prompt, generator=generator, output_type="np", **self.call).frames[0]
            return frames, heart.stats(self.pipe).to_dict()

    def record(self, method: str, place: int, seed: int) -> dict[str, Any]:
        """PSNR and shares of one video, from the folder if it is there."""
        path = self.work / f"{method} {self.args.steps} {place} {seed}.json".replace("/", "_")
        if path.is_file():
            return json.loads(path.read_text())
        reference = self.dense(place, seed)
        frames, stats = self.video(method, self.prompts[place], seed)
        found = {"method": method, "prompt": self.prompts[place], "seed": seed, "psnr": psnr(frames, reference)}
        found |= {name: stats[name] for name in ("density", "cost", "refresh_rate", "dense_calls") if name in stats}
        write_json(path, found)
        print(json.dumps(found), flush=True)
        return found

    def dense(self, place: int, seed: int) -> np.ndarray:
        """The dense video of a prompt and seed, made once."""
        path = self.work / f"dense {self.args.steps} {place} {seed}.npy"
        if not path.is_file():
            frames, _ = self.video("dense", self.prompts[place], seed)
            np.save(path.with_suffix(".part.npy"), frames)
            path.with_suffix(".part.npy").rename(path)
        return np.load(path)

    def timed(self, method: str, place: int, seed: int) -> dict[str, float]:
        """Attention and whole seconds of one video."""
        start = time.perf_counter()
        _, stats = self.video(method, self.prompts[place], seed)
        whole = time.perf_counter() - start
        return {
            **stats["time"],
            "whole": whole,
            "attention": stats["time"]["total"],
        }  # all of attention, not the kernel


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """In dB, for values in 0..1."""
    return -10 * math.log10(max(float(np.square(a - b).mean()), 1e-12))


def places(args: argparse.Namespace) -> list[tuple[int, int]]:
    """(prompt, seed) pairs, one seed of every prompt before the next."""
    return [(place, seed) for seed in range(args.seeds) for place in range(args.prompts)]


def quality(bench: Bench, wanted: Sequence[str]) -> None:
    """Fill the folder."""
    for place, seed in places(bench.args):
        for method in wanted:
            if method != "dense":
                bench.record(method, place, seed)


def times(bench: Bench, wanted: Sequence[str], rounds: int) -> None:
    """Add one round or more of times to the folder: all methods of a prompt in turn."""
    path = bench.work / f"times {bench.args.steps}.json"
    kept = json.loads(path.read_text()) if path.is_file() else []
    for _ in range(rounds):
        place = len(kept) % bench.args.prompts
        kept.append({method: bench.timed(method, place, 0) for method in ("dense", *wanted)})
        write_json(path, kept)
        print(json.dumps(kept[-1]), flush=True)


def table(bench_folder: Path, steps: int, against: str) -> list[Ratio]:
    """Print means, and paired differences from one method with 95 % intervals; give the ratios of times."""
    rows = [json.loads(p.read_text()) for p in sorted(bench_folder.glob(f"* {steps} * *.json"))]
    path = bench_folder / f"times {steps}.json"
    rounds = json.loads(path.read_text()) if path.is_file() else []
    told: list[Ratio] = []
    by_method: dict[str, dict] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["prompt"], row["seed"]] = row
    print(f"{'method':<30}{'videos':>7}{'PSNR dB':>9}{f'over {against}':>32}{'density':>9}{'cost':>7}{'refreshed':>10}"
          f"{'attention':>11}{'whole':>8}")  # fmt: skip
    for method, found in by_method.items():
        common = [at for at in found if at in by_method.get(against, {})]
        apart = [found[at]["psnr"] - by_method[against][at]["psnr"] for at in common]
        mean, half = interval(apart) if len(apart) > 1 else (math.nan, math.nan)
        mine = [np.mean([row[key] for row in found.values()]) for key in ("psnr", "density", "cost", "refresh_rate")]
        quick = [
            np.median([r["dense"][part] / r[method][part] for r in rounds if method in r] or [math.nan])
            for part in ("attention", "whole")
        ]
        print(f"{method:<30}{len(found):>7}{mine[0]:>9.2f}{f'{mean:+.2f} ± {half:.2f}':>32}{mine[1]:>9.3f}{mine[2]:>7.3f}"
              f"{mine[3]:>10.0%}{quick[0]:>10.2f}×{quick[1]:>7.2f}×")  # fmt: skip
        parts = zip(("attention", "whole"), quick)
        told += [Ratio(f"{method}, {steps} steps, {part}", float(x), "of dense") for part, x in parts if x == x]
    return told


def main() -> None:
    """Run what the arguments ask for, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", default="runs/rest", help="folder of records")
    parser.add_argument(
        "--methods", default=";".join(DEFAULT), help="separated by semicolons; also names of heart compare"
    )
    parser.add_argument("--calibration", action="append", default=[], help="for methods that want one; may be repeated")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--times", type=int, nargs="?", const=1, help="rounds of times to add")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--against", default="xattention 0.9, dropped", help="paired differences from this method")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    wanted = args.methods.split(";")
    if not args.table:
        bench = Bench(args)
        if args.times:
            times(bench, [m for m in wanted if m != "dense"], args.times)
        else:
            quality(bench, wanted)
    settle("rest", table(Path(args.work), args.steps, args.against), args.store)


if __name__ == "__main__":
    main()
