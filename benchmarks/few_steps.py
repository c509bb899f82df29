"""Few steps without guidance: the embedded student at 4 and 8 steps, sparse against its own dense videos.

    python benchmarks/few_steps.py --work DIR [--steps 4,8] [--prompts 4] [--seeds 2] [--methods NAME;NAME]
    python benchmarks/few_steps.py --work DIR --times [--rounds 4] [--threads 2]
    python benchmarks/few_steps.py --work OTHER --control --methods NAME;NAME

PSNR against the student's dense video of the same prompt and seed, on held-out prompts that no calibration has seen. "model"
is the attention time of dense over a method's by the table of costs that ships for this machine's kind, from what ran:
shares of keys, masks predicted anew, dense calls. Every video is one record in DIR, so that a stopped run goes on. `--times`
measures the attention itself, all methods of a prompt in turn after a round that is not counted; it wants an idle machine.
A method is one of this file or anything that `heart.enable` takes: heart@0.5, mine.heart.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import heart_attention as heart
from heart_attention import api, kernels, tiny
from heart_attention.evaluation.metrics.similarity import psnr
from heart_attention.evaluation.video import to_uint8
from heart_attention.files import write_json
from heart_attention.online import cost_model
from heart_attention.online.cost_model import Share
from ratios import Ratio, add_arguments, settle

SEEN = 6  # held-out prompts that calibrations verify on


def clusters(share: float, **more: Any) -> heart.HeartConfig:
    """Clusters ranked by error with means for the rest; a share of keys is exact."""
    backbone = heart.SVG2(q_clusters=128, k_clusters=256, rank="error", **more)
    return heart.HeartConfig(backbone, share, heart.TMR(relative=0.2), rest="mean")


METHODS: dict[str, Callable[[], heart.HeartConfig]] = {
    "dense": lambda: heart.HeartConfig(thresholds=1.0),
    "xattention 0.9, dropped": lambda: heart.HeartConfig(heart.XAttention(8, 64), 0.9, heart.TMR(relative=0.1)),
    "clusters, 10 % exact": lambda: clusters(0.1),
    "clusters, 20 % exact": lambda: clusters(0.2),
    "clusters, 30 % exact": lambda: clusters(0.3),
    "clusters, 20 % exact, seeded": lambda: clusters(0.2, warm_up=True),
    "clusters, 20 % exact, last dense": lambda: clusters(0.2).replace(dense_last_steps=1),
}
DEFAULT = "xattention 0.9, dropped;clusters, 10 % exact;clusters, 20 % exact;heart"


def modelled(engine: heart.Engine, shape: tuple[int, int]) -> float:
    """Attention of dense over that of the last generation, by the table of costs; `shape` is tokens and head size."""
    (tokens, dim), seen = shape, set()
    kernel = kernels.choose(None, torch.empty(1, 1, 1, dim)).name
    table = cost_model.shipped(cost_model.kind_of(torch.device("cpu"), kernel))
    dense = sparse = 0.0
    for row in engine.recorder.rows:
        groups = engine.points.groups(row.transformer, 0, row.layer)
        shares = [Share((1, len(g.heads), tokens, dim), g.backbone, g.rest, 1.0) for g in groups]
        _, whole = table.seconds(shares, 0.0)
        dense += whole
        if row.reason or row.refreshed is None:
            sparse += whole
            continue
        for group, share in zip(groups, shares):
            backbone = engine.payoff.fitted(group.backbone, tokens).for_rest(group.rest)
            costs = table.costs(backbone, dim)
            if min(group.tau) >= 1:
                sparse += costs.dense_seconds(share.shape)
                continue
            cost, fresh = (statistics.mean(values[h] for h in group.heads) for values in (row.cost, row.refreshed))
            sparse += costs.sparse_seconds(share.shape, cost, fresh, backbone, group.rest)
            if (place := (row.layer, row.branch, group.heads)) not in seen:
                seen.add(place)
                sparse += costs.first_extra(share.shape, backbone)
    return dense / sparse


class Bench:
    """The student, and the folder of records."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.work = args, Path(args.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.pipe = tiny.load_random() if args.control else tiny.load("student")
        self.pipe.set_progress_bar_config(disable=True)
        self.size = {key: tiny.QUICK[key] for key in ("height", "width", "num_frames")} if args.quick else {}
        self.prompts = tiny.prompts("heldout")[SEEN : SEEN + args.prompts]

    def video(self, method: str, steps: int, place: int, seed: int) -> tuple[np.ndarray, dict, float]:
        """Frames [T, H, W, 3] as bytes, what HEART did, and the time by the table of costs."""
        call = {**tiny.FEW_STEPS, **self.size, "num_inference_steps": steps}
        noise = torch.Generator().manual_seed(seed)
        with heart.enabled(self.pipe, METHODS[method]() if method in METHODS else method):
            frames = self.pipe(self.prompts[place], generator=noise, output_type="np", **call).frames[0]
            config = self.pipe.transformer.config
            shape = (int(np.prod(tiny.tokens(**call))), config.attention_head_dim)
            engine = api._engine(api._attachments(self.pipe)[0])
            return to_uint8(frames), heart.stats(self.pipe).to_dict(), modelled(engine, shape)

    def dense(self, steps: int, place: int, seed: int) -> np.ndarray:
        """The dense video, made once."""
        path = self.work / f"dense {steps} {place} {seed}.npy"
        if not path.is_file():
            frames, *_ = self.video("dense", steps, place, seed)
            np.save(path.with_suffix(".part.npy"), frames)
            path.with_suffix(".part.npy").rename(path)
        return np.load(path)

    def record(self, method: str, steps: int, place: int, seed: int) -> dict[str, Any]:
        """PSNR and shares of one video, from the folder if it is there."""
        path = self.work / f"{method} {steps} {place} {seed}.json".replace("/", "_")
        if path.is_file():
            return json.loads(path.read_text())
        reference = self.dense(steps, place, seed)
        frames, stats, ratio = self.video(method, steps, place, seed)
        found = {"psnr": float(psnr(frames, reference)), "model": ratio, "dense_steps": stats["dense_steps"]["first"]}
        found |= {name: stats[name] for name in ("density", "cost", "refresh_rate", "dense_calls")}
        write_json(path, found)
        return found


def quality(bench: Bench, steps: int, wanted: Sequence[str]) -> None:
    """Fill the folder and print a line for each method."""
    args = bench.args
    for method in wanted:
        places = [(place, seed) for seed in range(args.seeds) for place in range(args.prompts)]
        rows = [bench.record(method, steps, *at) for at in places]
        found = [row["psnr"] for row in rows]
        means = {name: statistics.mean(row[name] or 0 for row in rows) for name in ("cost", "refresh_rate", "model")}
        print(
            f"{steps} steps ({rows[0]['dense_steps']} dense)  {method:34} {statistics.mean(found):5.1f} dB "
            f"(least {min(found):.1f}, {len(found)} videos)  cost {means['cost']:.3f}  anew {means['refresh_rate']:.0%}  "
            f"model {means['model']:.2f}x",
            flush=True,
        )


def times(bench: Bench, steps: int, wanted: Sequence[str]) -> list[Ratio]:
    """Attention of dense over a method's, the median of some rounds."""
    told = []
    seconds: dict[str, list[float]] = {method: [] for method in ("dense", *wanted)}
    for turn in range(bench.args.rounds + 1):
        for method, kept in seconds.items():
            kept.append(bench.video(method, steps, turn % bench.args.prompts, 0)[1]["time"]["total"])
    for method, kept in seconds.items():
        ratios = [dense / own for dense, own in zip(seconds["dense"][1:], kept[1:])]
        low, high = min(ratios), max(ratios)
        print(f"{steps} steps  {method:34} {statistics.median(ratios):.2f}x ({low:.2f}-{high:.2f})", flush=True)
        told.append(
            Ratio(f"{method}, {steps} steps, {bench.args.threads} threads", statistics.median(ratios), "of dense")
        )
    return told


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, metavar="DIR")
    parser.add_argument("--steps", default="4,8")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--methods", default=DEFAULT, help="names with semicolons between them")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--control", action="store_true", help="random weights, with a DIR of their own")
    parser.add_argument("--quick", action="store_true", help="the small size")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench, wanted = Bench(args), args.methods.split(";")
    numbers = [int(steps) for steps in args.steps.split(",")]
    if args.times:
        settle("few_steps", [ratio for steps in numbers for ratio in times(bench, steps, wanted)], args.store)
        return
    for steps in numbers:
        quality(bench, steps, wanted)


if __name__ == "__main__":
    main()
