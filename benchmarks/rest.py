"""The rest dropped or approximated: videos of the embedded model against dense, with attention time.

    python benchmarks/rest.py [--steps 25] [--prompts 2] [--threads 2] [--json FILE]

One table: PSNR against the dense video of the same prompt and seed, density, cost, heads refreshed, and attention over
dense, all methods of a prompt one after the other in one process. Ratios are only worth reading from an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import heart_attention as heart
from heart_attention import tiny

CLUSTERS = heart.SVG2(q_clusters=128, k_clusters=256, rank="error")
METHODS = {
    "xattention τ 0.9, dropped": heart.HeartConfig(heart.XAttention(8, 64), 0.9, heart.TMR(relative=0.1)),
    "svg2 38 × 125 τ 0.9, dropped": heart.HeartConfig(heart.SVG2(38, 125, min_ratio=0.1), 0.9, heart.TMR(relative=0.2)),
    "clusters 128 × 256, 5 % exact": heart.HeartConfig(CLUSTERS, 0.05, heart.TMR(relative=0.2), rest="mean"),
    "clusters 128 × 256, 10 % exact": heart.HeartConfig(CLUSTERS, 0.1, heart.TMR(relative=0.2), rest="mean"),
    "clusters 128 × 256, 20 % exact": heart.HeartConfig(CLUSTERS, 0.2, heart.TMR(relative=0.2), rest="mean"),
}


def generate(pipe: Any, prompt: str, seed: int, call: dict) -> np.ndarray:
    """One video [T, H, W, 3] in 0..1."""
    return pipe(prompt, generator=torch.Generator().manual_seed(seed), output_type="np", **call).frames[0]


def measured(pipe: Any, config: heart.HeartConfig, prompt: str, seed: int, call: dict) -> tuple[np.ndarray, dict]:
    """A video with HEART, and what it did."""
    with heart.enabled(pipe, config, force_sparse=True):
        video = generate(pipe, prompt, seed, call)
        return video, heart.stats(pipe).to_dict()


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """In dB, for values in 0..1."""
    return -10 * math.log10(max(float(np.square(a - b).mean()), 1e-12))


def rows(pipe: Any, prompts: list[str], call: dict) -> list[dict]:
    """One row for each prompt and method."""
    found = []
    everything_dense = heart.HeartConfig(heart.XAttention(8, 64), 1.0)
    for seed, prompt in enumerate(prompts):
        reference, dense = measured(pipe, everything_dense, prompt, seed, call)
        for name, config in METHODS.items():
            video, stats = measured(pipe, config, prompt, seed, call)
            found.append(
                {"method": name, "prompt": prompt, "psnr": psnr(video, reference), "density": stats["density"],
                 "cost": stats["cost"], "refreshed": stats["refresh_rate"],
                 "speed_up": dense["time"]["total"] / stats["time"]["total"], "time": stats["time"]}
            )  # fmt: skip
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=2, help="how many held-out prompts, each with a seed of its own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all rows here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    call = {**tiny.NATIVE, "num_inference_steps": args.steps}
    found = rows(tiny.load(), tiny.prompts("heldout")[: args.prompts], call)
    print(f"\n{'method':<34}{'PSNR dB':>9}{'density':>9}{'cost':>7}{'refreshed':>11}{'attention':>11}")
    for name in METHODS:
        mine = [row for row in found if row["method"] == name]
        means = [
            float(np.mean([row[key] for row in mine])) for key in ("psnr", "density", "cost", "refreshed", "speed_up")
        ]
        print(f"{name:<34}{means[0]:>9.2f}{means[1]:>9.3f}{means[2]:>7.3f}{means[3]:>11.0%}{means[4]:>10.2f}×")
    if args.json:
        args.json.write_text(json.dumps({"steps": args.steps, "threads": args.threads, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
