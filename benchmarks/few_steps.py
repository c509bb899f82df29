"""Few steps without guidance: the embedded student at 4 and 8 steps, sparse against its own dense videos.

    python benchmarks/few_steps.py [--steps 4,8] [--prompts 2] [--threads 2] [--calibration FILE ...] [--json]

PSNR against the student's dense video of the same prompt and seed, on prompts that nothing was calibrated on; attention time
over dense, all methods of a prompt in turn after one round that is not counted. Times want an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import numpy as np
import torch

import heart_attention as heart
from heart_attention import tiny
from heart_attention.evaluation.metrics.similarity import psnr
from heart_attention.evaluation.video import to_uint8

SEEN = 6  # held-out prompts that calibrations verify on


def clusters(share: float) -> heart.HeartConfig:
    """Clusters ranked by error with means for the rest; a share of keys is exact."""
    backbone = heart.SVG2(q_clusters=128, k_clusters=256, rank="error")
    return heart.HeartConfig(backbone, share, heart.TMR(relative=0.2), rest="mean")


def configs(calibrations: list[str]) -> dict[str, Any]:
    """What is compared, by name."""
    made: dict[str, Any] = {"dense": heart.HeartConfig(thresholds=1.0)}
    made["xattention 0.9, dropped"] = heart.HeartConfig(heart.XAttention(8, 64), 0.9, heart.TMR(relative=0.1))
    made |= {f"clusters, {share:.0%} exact": clusters(share) for share in (0.1, 0.15, 0.2, 0.3)}
    return made | {path: path for path in calibrations}


def generate(pipe: Any, config: Any, prompt: str, steps: int, size: dict[str, Any]) -> tuple[np.ndarray, dict]:
    """Frames [T, H, W, 3] as bytes, and what HEART did."""
    call = {**tiny.FEW_STEPS, **size, "num_inference_steps": steps}
    with heart.enabled(pipe, config):
        frames = pipe(prompt, generator=torch.Generator().manual_seed(0), output_type="np", **call).frames[0]
        return to_uint8(frames), heart.stats(pipe).to_dict()


def measure(pipe: Any, made: dict[str, Any], prompts: list[str], steps: int, size: dict[str, Any]) -> list[dict]:
    """One row a method: PSNR of every prompt, attention of dense over its own, shares."""
    rows: dict[str, dict[str, list]] = {name: {"psnr": [], "speedup": [], "stats": []} for name in made}
    for prompt in prompts:
        dense_frames, dense = generate(pipe, made["dense"], prompt, steps, size)
        for name, config in made.items():
            frames, stats = generate(pipe, config, prompt, steps, size)
            rows[name]["psnr"].append(None if name == "dense" else float(psnr(frames, dense_frames)))
            rows[name]["speedup"].append(dense["time"]["total"] / stats["time"]["total"])
            rows[name]["stats"].append(stats)
    return [{"method": name, "steps": steps, **_summary(row)} for name, row in rows.items()]


def _summary(row: dict[str, list]) -> dict[str, Any]:
    last = row["stats"][-1]
    shares = {key: last[key] for key in ("density", "cost", "refresh_rate", "dense_steps", "fallbacks")}
    known = [value for value in row["psnr"] if value is not None]
    return {"psnr": known, "speedup": statistics.median(row["speedup"]), **shares}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="4,8")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", choices=("native", "quick"), default="native")
    parser.add_argument("--calibration", action="append", default=[], metavar="FILE", help="made on the student")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pipe, made = tiny.load("student"), configs(args.calibration)
    prompts = tiny.prompts("heldout")[SEEN : SEEN + args.prompts]
    size = {key: tiny.QUICK[key] for key in ("height", "width", "num_frames")} if args.size == "quick" else {}
    for config in made.values():  # nothing is built on the clock
        generate(pipe, config, prompts[0], 2, {"height": 64, "width": 64, "num_frames": 4})
    for steps in map(int, args.steps.split(",")):
        for row in measure(pipe, made, prompts, steps, size):
            print(json.dumps(row) if args.json else _line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    decibels = " / ".join(f"{value:.1f}" for value in row["psnr"]) or "-"
    cost = "-" if row["cost"] is None else f"{row['cost']:.3f}"
    first = row["dense_steps"]["first"]
    return f"{row['steps']} steps ({first} dense)  {row['method']:28} {decibels:>14} dB  cost {cost}  {row['speedup']:.2f}x"


if __name__ == "__main__":
    main()
