"""Velocity error of sparse attention in held-out contexts, all heads sparse at once, nothing calibrated.

    python benchmarks/velocity.py --work DIR [--prompts 8] [--contexts 4] [--control 2] [--threads 2]

Teacher-forced: every context (prompt, step) of a dense generation is computed once more with each operating point, from
a cold prediction, and the guided velocity compared with the dense one (relative squared error). The random-weight control
stands beside it. Every measurement is one record in DIR, so that a stopped run goes on. A last table: the attention
output's error at equal masks, dropped and approximated.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import heart_attention as heart
from heart_attention import kernels, tiny
from heart_attention.calibration.measure import gradient, trajectory, velocity_error
from heart_attention.calibration.measure.candidates import Spec
from heart_attention.calibration.measure.replay import Replay
from heart_attention.evaluation import methods
from heart_attention.files import write_json
from heart_attention.online.points import Point
from ratios import Ratio, add_arguments, settle

SEEN = 6  # held-out prompts that calibrations verify on
STEPS = 25
DENSE_STEPS = 5
X = heart.XAttention(8, 64)
C = heart.SVG2(q_clusters=128, k_clusters=256, rank="error", min_ratio=0.0)
SHIPPED = "heart"  # the embedded model's calibration, its points chosen head by head and by noise level
POINTS = {
    "xattention 0.9, dropped": Point(X, 0.9),
    "xattention 0.7, dropped": Point(X, 0.7),
    "clusters, 7 % exact": Point(C, 0.07, "mean"),
    "clusters, 7 % exact, 10 first iterations": Point(replace(C, init_iters=10), 0.07, "mean"),
    "clusters, 10 % exact": Point(C, 0.1, "mean"),
    "clusters, 20 % exact": Point(C, 0.2, "mean"),
    "equal groups of 8, 10 % exact": Point(replace(C, equal_groups=8), 0.1, "mean"),
    "equal groups of 16, 10 % exact": Point(replace(C, equal_groups=16), 0.1, "mean"),
    "equal groups of 64, 10 % exact": Point(replace(C, equal_groups=64), 0.1, "mean"),
    "equal groups of 64, 20 % exact": Point(replace(C, equal_groups=64), 0.2, "mean"),
}


def chosen(config: heart.HeartConfig, sigma: float) -> tuple[Spec, Any]:
    """The points of a config, and which of them every head takes at a noise level."""
    table = config.points
    assert table is not None
    return Spec(table.points, scale_clusters=config.scale_clusters), table.choice[0][table.phase(sigma)]


def steps_of(prompt: int, count: int) -> list[int]:
    """Sparse steps spread over a generation, others for every prompt."""
    edges = np.linspace(DENSE_STEPS, STEPS, count + 1)
    return [int(a + (b - a) * ((prompt * 0.37 + 0.2) % 1)) for a, b in zip(edges, edges[1:])]


def measured(
    pipe: Any, folder: Path, prompts: list[str], contexts: int, config: heart.HeartConfig
) -> dict[str, list[dict]]:
    """What forwards show of each point in each context."""
    folder.mkdir(parents=True, exist_ok=True)
    replay = Replay(pipe.transformer, scheduler=pipe.scheduler)
    layers, heads = pipe.transformer.config.num_layers, pipe.transformer.config.num_attention_heads
    points, spec = list(POINTS), Spec(tuple(POINTS.values()))
    names = [*points, SHIPPED]
    error = velocity_error.by_name("mse")
    found: dict[str, list[dict]] = {name: [] for name in names}
    call = {**tiny.NATIVE, "num_inference_steps": STEPS}

    pipe.scheduler.set_timesteps(STEPS)
    levels = (pipe.scheduler.timesteps / pipe.scheduler.config.num_train_timesteps).tolist()

    def judge(context: trajectory.Context) -> None:
        for k, name in enumerate(names):
            path = folder / f"{name} {context.prompt} {context.step}.json"
            if not path.is_file():
                if name == SHIPPED:
                    tried = chosen(config, levels[context.step])
                else:
                    tried = (spec, ((k,) * heads,) * layers)
                write_json(path, gradient.verify(replay, context, *tried, error))
                print(path.stem, json.loads(path.read_text())["error"], flush=True)
            found[name].append(json.loads(path.read_text()))

    try:
        for prompt, text in enumerate(prompts):
            steps = steps_of(prompt, contexts)
            kept = [folder / f"{prompt} {step}.safetensors" for step in steps]
            if not all(path.is_file() for path in kept):
                made: list[trajectory.Context] = []
                with torch.no_grad():
                    trajectory.record(pipe, replay, prompt, text, steps, call, 0, made.append)
                for context in made:
                    (folder / f"{prompt} {context.step}.safetensors").write_bytes(trajectory.to_bytes(context))
            for step in steps:
                judge(trajectory.from_bytes((folder / f"{prompt} {step}.safetensors").read_bytes()))
    finally:
        replay.close()
    return found


def output_errors(pipe: Any, folder: Path) -> list[tuple[float, float, float, float]]:
    """(share, density, error dropped, error approximated): the attention output of all heads, mean over two steps."""
    path = folder / "output.json"
    if path.is_file():
        return json.loads(path.read_text())
    rows = []
    call = {**tiny.NATIVE, "num_inference_steps": STEPS, "output_type": "latent"}
    with heart.record(pipe, steps=[6, 14]) as calls:
        pipe(tiny.prompts("heldout")[SEEN], generator=torch.Generator().manual_seed(0), **call)
    kernel = kernels.choose(None, next(iter(calls.values())).q)
    for share in (0.05, 0.1, 0.14):
        found = []
        for one in calls.values():
            mask = C.predict(one.q, one.k, share, v=one.v, key=(one.call.layer, one.call.branch, 0))
            dense = F.scaled_dot_product_attention(one.q, one.k, one.v)
            outs = [kernel.run(kernel.plan(mask, rest), one.q, one.k, one.v) for rest in ("drop", "mean")]
            errors = [((o - dense).square().sum((-1, -2)) / dense.square().sum((-1, -2))).mean() for o in outs]
            found.append((share, float(mask.density().mean()), *map(float, errors)))
        rows.append(tuple(np.mean(found, axis=0).tolist()))
    write_json(path, rows)
    return rows


def show(title: str, found: dict[str, list[dict]]) -> dict[str, float]:
    """One table; gives the mean error of every point."""
    print(
        f"\n{title}: {len(next(iter(found.values())))} contexts\n{'point':<42}{'cost':>7}{'velocity error':>16}{'geometric':>12}"
    )
    for name, rows in found.items():
        errors = [row["error"] for row in rows]
        cost = np.mean([row["cost"] for row in rows])
        print(f"{name:<42}{cost:>7.3f}{np.mean(errors):>16.5f}{np.exp(np.mean(np.log(errors))):>12.5f}")
    return {name: float(np.mean([row["error"] for row in rows])) for name, rows in found.items()}


def main() -> None:
    """Measure, then print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/velocity"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--contexts", type=int, default=4, help="steps of each prompt")
    parser.add_argument("--control", type=int, default=1, help="prompts of the random-weight control")
    parser.add_argument("--threads", type=int, default=2)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompts = tiny.prompts("heldout")[SEEN : SEEN + args.prompts]
    pipe = tiny.load()
    pipe.set_progress_bar_config(disable=True)
    config = methods.build(SHIPPED, pipe, "tiny").config
    errors = show("trained weights", measured(pipe, args.work / "trained", prompts, args.contexts, config))
    print("\nattention output at equal masks, clusters 128 × 256\n   share  density   dropped    means   ratio")
    for share, density, drop, mean in output_errors(pipe, args.work):
        print(f"{share:>8.2f}{density:>9.3f}{drop:>10.4f}{mean:>9.4f}{mean / drop:>8.3f}")
    if args.control:
        control = tiny.load_random()
        control.set_progress_bar_config(disable=True)
        show("random weights", measured(control, args.work / "random", prompts[: args.control], args.contexts, config))
    first, *others = errors.items()
    settle(
        "velocity", [Ratio(name, x / first[1], f"of the error of {first[0]}", False) for name, x in others], args.store
    )


if __name__ == "__main__":
    main()
