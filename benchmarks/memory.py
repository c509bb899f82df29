"""Whether generations leave memory behind: what is held after 2 of them and after 50, with HEART enabled throughout.

python benchmarks/memory.py                     # a minute or less, one thread
python benchmarks/memory.py --generations 200
python benchmarks/memory.py --json              # for machines
python benchmarks/memory.py --real              # what is kept at real sizes, on paper and by running one layer: minutes

A WanPipeline with random weights generates a few latents at a time. Told are the bytes of all living tensors, which
must not grow, and the process's resident memory, which also has what allocators keep in hand.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import psutil
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline

import heart_attention as heart
import resident
from small_wan import small_wan

EARLY = 2  # generations until everything that stays has been made
STEPS, SIZE, FRAMES = 5, 64, 9  # 48 video tokens
MB = 1 << 20


def pipeline() -> WanPipeline:
    """A pipeline without text encoder and VAE: embeddings go in, latents come out."""
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipe = WanPipeline(None, None, None, scheduler, small_wan())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def config(backbone: str) -> heart.HeartConfig:
    """Sparse from the third step on, with masks that are sometimes reused."""
    made = {"xattention": heart.XAttention(stride=4, block=8), "svg2": heart.SVG2(q_clusters=4, k_clusters=8)}
    return heart.HeartConfig(made[backbone], 0.6, heart.TMR(relative=0.1), dense_steps=2, force_sparse=True)


def generate(pipe: WanPipeline, seed: int) -> None:
    """One generation with guidance."""
    text = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(seed))
    pipe(
        prompt_embeds=text,
        negative_prompt_embeds=torch.zeros_like(text),
        height=SIZE,
        width=SIZE,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
    )


def held() -> dict[str, int]:
    """Bytes of living tensors, how many objects the collector knows, and resident bytes."""
    gc.collect()
    known = gc.get_objects()
    tensors = {x.data_ptr(): x.nbytes for x in known if issubclass(type(x), torch.Tensor)}  # views count once
    return {"tensors": sum(tensors.values()), "objects": len(known), "resident": psutil.Process().memory_info().rss}


def measure(backbone: str, generations: int) -> dict[str, Any]:
    """What is held after `EARLY` and after all generations."""
    pipe = pipeline()
    found: dict[str, Any] = {}
    with heart.enabled(pipe, config(backbone)):
        for i in range(generations):
            generate(pipe, i)
            if i + 1 == EARLY:
                found["early"] = held()
        found["late"] = held()
        found["density"] = heart.stats(pipe)["density"]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--real", action="store_true", help="caches at the sizes of Wan2.1-1.3B and -14B")
    parser.add_argument("--heads", type=int, default=1, help="with --real: heads that are run; 0 only counts on paper")
    parser.add_argument("--only", default="", help="with --real: backbones whose name has this")
    args = parser.parse_args()
    if args.real:
        rows = resident.table(args.heads, args.heads > 0, args.only)
        print(json.dumps(rows, indent=1)) if args.json else resident.show(rows)
        return
    if args.generations <= EARLY:
        parser.error(f"--generations must be more than {EARLY}")
    torch.set_num_threads(1)
    result = {name: measure(name, args.generations) for name in ("xattention", "svg2")}
    if args.json:
        print(json.dumps(result))
        return
    for name, found in result.items():
        print(f"{name}, density {found['density']:.2f}, after {EARLY} and after {args.generations} generations")
        for what in ("tensors", "resident"):
            early, late = found["early"][what] / MB, found["late"][what] / MB
            print(f"  {what:9} {early:9.3f} MB {late:9.3f} MB  {late - early:+.3f} MB")
        print(f"  {'objects':9} {found['early']['objects']:9} {found['late']['objects']:12}")


if __name__ == "__main__":
    main()
