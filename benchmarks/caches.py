"""What caches and sparse attention do together: videos of the embedded model against dense without a cache.

    python benchmarks/caches.py --work DIR [--steps 25] [--prompts 2] [--size native|quick]

For every cache, with dense attention and with HEART: PSNR against the dense video of the same prompt and seed, the share of
attention calls that ran, and the attention time of dense over it by the table of costs (dense calls count as 1). Nothing here
depends on a busy machine. Every video is one record in DIR, so that a stopped run goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig, hooks

import heart_attention as heart
from few_steps import METHODS, modelled
from heart_attention import api, tiny
from heart_attention.evaluation.metrics.similarity import psnr
from heart_attention.evaluation.video import to_uint8
from heart_attention.files import write_json
from ratios import Ratio, add_arguments, settle

SEEN = 6  # held-out prompts that calibrations verify on


def broadcast(pipe: Any) -> Any:
    """Every second attention is that of the step before, at the noise levels that its authors name."""
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 800),
        current_timestep_callback=lambda: pipe.current_timestep,
    )


CACHES: dict[str, Callable[[Any], Any]] = {
    "none": lambda pipe: None,
    "first block 0.05": lambda pipe: FirstBlockCacheConfig(threshold=0.05),
    "first block 0.1": lambda pipe: FirstBlockCacheConfig(threshold=0.1),
    "PAB 2": broadcast,
    "TaylorSeer 2": lambda pipe: hooks.TaylorSeerCacheConfig(
        cache_interval=2, disable_cache_before_step=5, taylor_factors_dtype=torch.float32, use_lite_mode=True
    ),
}
ATTENTION = ("dense", "clusters, 20 % exact")


class Bench:
    """The embedded model, and the folder of records."""

    def __init__(self, args: argparse.Namespace):
        self.work = Path(args.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.pipe = tiny.load()
        self.pipe.set_progress_bar_config(disable=True)
        self.call = {**(tiny.QUICK if args.size == "quick" else tiny.NATIVE), "num_inference_steps": args.steps}
        self.prompts = tiny.prompts("heldout")[SEEN : SEEN + args.prompts]
        self.name = f"{args.size} {args.steps}"

    def video(self, cache: str, attention: str, place: int) -> tuple[np.ndarray, dict[str, Any]]:
        """Frames as bytes, and what ran."""
        transformer, noise = self.pipe.transformer, torch.Generator().manual_seed(0)
        config = METHODS[attention]().replace(force_sparse=True)
        if (chosen := CACHES[cache](self.pipe)) is not None:
            transformer.enable_cache(chosen)
        try:
            with heart.enabled(self.pipe, config):
                frames = self.pipe(self.prompts[place], generator=noise, output_type="np", **self.call).frames[0]
                stats = heart.stats(self.pipe).to_dict()
                shape = (int(np.prod(tiny.tokens(**self.call))), transformer.config.attention_head_dim)
                own = modelled(api._engine(api._attachments(self.pipe)[0]), shape)
        finally:
            if chosen is not None:
                transformer.disable_cache()
        every = 2 * self.call["num_inference_steps"] * len(transformer.blocks)
        share = stats["calls"] / every
        return to_uint8(frames), {"calls": share, "model": own / share, "refresh_rate": stats["refresh_rate"]}

    def reference(self, place: int) -> np.ndarray:
        """The dense video without a cache, made once."""
        path = self.work / f"{self.name} {place}.npy"
        if not path.is_file():
            np.save(path, self.video("none", "dense", place)[0])
        return np.load(path)

    def record(self, cache: str, attention: str, place: int) -> dict[str, Any]:
        """What one video shows, from the folder if it is there."""
        path = self.work / f"{self.name} {place} {cache} {attention}.json"
        if not path.is_file():
            reference = self.reference(place)
            frames, found = self.video(cache, attention, place)
            write_json(path, {"psnr": float(psnr(frames, reference)), **found})
        return json.loads(path.read_text())


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--size", choices=("native", "quick"), default="native")
    add_arguments(parser)
    args = parser.parse_args()
    told = []
    bench = Bench(args)
    for cache in CACHES:
        for attention in ATTENTION:
            if (cache, attention) == ("none", "dense"):
                continue
            rows = [bench.record(cache, attention, place) for place in range(args.prompts)]
            means = {name: statistics.mean(row[name] or 0 for row in rows) for name in rows[0]}
            print(
                f"| {cache} | {attention} | {means['psnr']:.1f} | {means['calls']:.2f} | {means['refresh_rate']:.0%} "
                f"| {means['model']:.2f}x |",
                flush=True,
            )
            told.append(Ratio(f"{cache}, {attention}, {bench.name}", means["model"], "of dense by the cost table"))
    settle("caches", told, args.store)


if __name__ == "__main__":
    main()
