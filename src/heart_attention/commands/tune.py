"""`heart tune-delta`: the reuse threshold δ for a model, from one recorded dense generation."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..errors import HeartError
from .arguments import add_device, add_model, add_size


def register(commands) -> None:
    """Add the command."""
    p = commands.add_parser("tune-delta", help="choose δ of temporal mask reuse from one dense generation")
    add_model(p)
    p.add_argument("--backbone", default="xattention", choices=("xattention", "svg2"))
    p.add_argument("--target", type=float, default=0.9, help="IoU that reused masks shall keep (default 0.9)")
    p.add_argument("--relative", action="store_true", help="δ as a share of the anchor's norm: carries over to sizes")
    p.add_argument("--per-layer", action="store_true", help="one δ a layer")
    p.add_argument("--prompt", help="default: the embedded model's first demo prompt, or 'a video'")
    p.add_argument("--seed", type=int, default=0)
    add_size(p)
    p.add_argument("--quick", action="store_true", help="the embedded model's small size and 12 steps")
    add_device(p)
    p.add_argument("--out", metavar="CONFIG.json", help="write a config with the chosen δ")
    p.add_argument("--json", action="store_true", help="print curve and choice as JSON")
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Record, choose, print."""
    from .. import pipelines, tuning
    from ..config import find_preset

    if not 0 < args.target <= 1:
        raise HeartError(f"--target is {args.target}: give a number above 0, at most 1")
    pipe = pipelines.load(args.model, args.dtype, args.device)
    call = pipelines.call_arguments(args.model, pipe, args.size, args.frames, args.steps, args.quick)
    config, _ = find_preset(args.backbone, pipe)
    probe = record(pipe, config, _prompt(args), args.seed, call)
    gate = config.reuse.gate
    tuned = tuning.tune(probe, args.target, args.relative, args.per_layer, gate)
    if args.out:
        config.replace(reuse=tuned.policy(gate)).save(args.out)
    print(json.dumps(as_dict(tuned, args), indent=1) if args.json else as_text(tuned, args))
    return 0


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return args.prompt
    if args.model.startswith("tiny"):
        from .. import tiny

        return tiny.prompts("demo")[0]
    return "a video"


def record(pipe: Any, config: Any, prompt: str, seed: int, call: dict) -> Any:
    """One dense generation with a `MaskProbe` riding along."""
    import torch

    from ..compare import transformers_of
    from ..config import threshold_table
    from ..models import family_of, intercept
    from ..tuning import MaskProbe

    transformers = transformers_of(pipe)
    layers = family_of(transformers[0]).find(transformers[0])
    heads = getattr(layers[0][1], "heads", None) or transformers[0].config.num_attention_heads
    table = threshold_table(config.thresholds, len(transformers), len(layers), heads)
    probe = MaskProbe(config.backbone, table, config.dense_steps, config.scale_clusters)
    attached = intercept.attach_pipeline(pipe, probe)
    try:
        pipe(prompt=prompt, generator=torch.Generator().manual_seed(seed), output_type="latent", **call)
    finally:
        for attachment in attached:
            attachment.detach()
    return probe


def as_dict(tuned: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Curve and choice as plain JSON types."""
    from dataclasses import asdict

    point = {k: v for k, v in asdict(tuned.point).items() if k != "delta"}
    return {
        "model": args.model,
        "backbone": args.backbone,
        "target_iou": args.target,
        "relative": tuned.relative,
        "delta": tuned.delta,
        **point,
        "curve": [asdict(p) for p in tuned.points],
        "layers": None if tuned.layers is None else [asdict(p) for p in tuned.layers],
    }


def as_text(tuned: Any, args: argparse.Namespace) -> str:
    """The curve as a table, the choice under it."""
    name = "relative δ" if tuned.relative else "δ"
    lines = [f"{name:>12} {'reuse':>8} {'IoU reused':>11} {'IoU all':>9}"]
    for p in tuned.points:
        mark = " <-" if p == tuned.point else ""
        lines.append(f"{p.delta:>12.4g} {p.reuse:>8.3f} {p.iou:>11.3f} {p.iou_all:>9.3f}{mark}")
    for layer, p in enumerate(tuned.layers or []):
        lines.append(f"layer {layer:>3}: {name} {p.delta:.4g}, reuse {p.reuse:.3f}, IoU {p.iou:.3f}")
    given = f"{tuned.delta:.4g}" if isinstance(tuned.delta, float) else [float(f"{x:.4g}") for x in tuned.delta]
    form = f"TMR({'relative' if tuned.relative else 'delta'}={given})"
    lines.append(
        f"{form}: {tuned.point.reuse:.1%} of the masks are reused, with IoU {tuned.point.iou:.3f} (target {args.target:g})"
    )
    return "\n".join(lines)
