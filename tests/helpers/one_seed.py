"""Generates one seed with several methods on two threads: prints digests of the videos and what ran dense, as JSON."""

from __future__ import annotations

import hashlib
import json
import logging

import torch

torch.set_num_threads(2)
logging.disable(logging.WARNING)

import heart_attention as heart  # noqa: E402
from heart_attention import tiny  # noqa: E402
from heart_attention.evaluation import methods  # noqa: E402

CALL = {**tiny.QUICK, "num_inference_steps": 8, "output_type": "np"}
CLUSTERS = heart.HeartConfig(
    heart.SVG2(32, 64, rank="error"), 0.1, heart.TMR(relative=0.2), dense_steps=2, rest="mean", force_sparse=True
)


def configs(pipe) -> dict[str, heart.HeartConfig]:
    named = ("xattention", "xattention+joint", "svg2+joint")
    forced = {name: methods.build(name, pipe, "tiny", dense_steps=2, force_sparse=True).config for name in named}
    free = {f"{name}, not forced": methods.build(name, pipe, "tiny", dense_steps=2).config for name in named}
    return {**forced, **free, "clusters": CLUSTERS}


def main() -> None:
    pipe, told = tiny.load(), {}
    for name, config in configs(pipe).items():
        with heart.enabled(pipe, config):
            video = pipe("a red ball", generator=torch.Generator().manual_seed(5), **CALL).frames[0]
            stats = heart.stats(pipe)
        digest = hashlib.sha256(video.tobytes()).hexdigest()
        told[name] = {
            "video": digest,
            "calls": stats["calls"],
            "dense": stats["dense_calls"],
            "why": stats["dense_reasons"],
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
