"""`heart tune-delta`: the reuse threshold δ; `tune-order`: a token order for every head; `tune-costs`: a table of costs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..errors import HeartError
from .arguments import add_backbone, add_command, add_device, add_json, add_model, add_size, check_generation, numbers


def register(commands) -> None:
    """Add the three commands."""
    p = add_command(commands, "tune-delta", "choose δ of temporal mask reuse from one dense generation", run)
    add_model(p)
    add_backbone(p)
    p.add_argument("--target", type=float, default=0.9, help="IoU that reused masks shall keep (default 0.9)")
    p.add_argument("--relative", action="store_true", help="δ as a share of the anchor's norm: carries over to sizes")
    p.add_argument("--per-layer", action="store_true", help="one δ a layer")
    p.add_argument("--prompt", help="default: the embedded model's first demo prompt, or 'a video'")
    _add_generation(p)
    _register_order(commands)
    _register_costs(commands)


def _add_generation(p: Any) -> None:
    """What is generated, and where the choice goes."""
    p.add_argument("--seed", type=int, default=0, help="of the starting noise")
    add_size(p)
    p.add_argument("--quick", action="store_true", help="the embedded model's small size and 12 steps")
    add_device(p)
    p.add_argument("--out", metavar="CONFIG.json", help="write a config with what was chosen")
    add_json(p, "what was seen and chosen")


def _register_order(commands) -> None:
    p = add_command(commands, "tune-order", "choose a token order for every head from dense generations", run_order)
    add_model(p)
    p.add_argument("--config", default="xattention", help="a preset, a config or a calibration to start from")
    p.add_argument(
        "--prompt", action="append", help="may be repeated; default: two of the embedded model's, or 'a video'"
    )
    p.add_argument(
        "--keep", type=float, default=1.0, help="blocks a head shall keep, of the raster's (default 1: as many)"
    )
    p.add_argument("--looks", type=int, default=3, help="sparse steps of a generation to look at (default 3)")
    _add_generation(p)


def _register_costs(commands) -> None:
    p = add_command(commands, "tune-costs", "measure on this machine what decides dense or sparse", run_costs)
    p.add_argument(
        "--out", required=True, metavar="COSTS.json", help="the table; use it by HeartConfig(cost_table=...)"
    )
    p.add_argument("--backbones", default="", help="further backbones to measure by name, divided by commas")
    p.add_argument("--head-sizes", default="32,64,128", help="head sizes to measure (default 32,64,128)")
    p.add_argument("--rounds", type=int, default=9, help="interleaved rounds of which the best counts (default 9)")
    p.add_argument("--kernel", default="auto", help="the kernel to measure (default: the one that serves here)")
    add_device(p)
    add_json(p, "the table")


def run_costs(args: argparse.Namespace) -> int:
    """Measure, write, print."""
    import torch

    from ..evaluation import pipelines
    from ..files import write_json
    from ..tuning import costs

    sizes = numbers(args.head_sizes, "--head-sizes", int)
    if args.rounds < 1 or min(sizes) < 1:
        raise HeartError(f"--rounds is {args.rounds} and --head-sizes {args.head_sizes}: give numbers of at least 1")
    device = pipelines.check("tiny", args.dtype, args.device)
    kind = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    names = [name for name in args.backbones.split(",") if name]
    table = costs.measure(device, getattr(torch, kind), names, sizes, args.kernel, rounds=args.rounds)
    write_json(args.out, table.to_dict())
    print(json.dumps(table.to_dict(), indent=1) if args.json else f"{args.out}: {table.origin} [{table.digest}]")
    return 0


def run(args: argparse.Namespace) -> int:
    """Record, choose, print."""
    from ..evaluation import pipelines
    from ..online.reuse import TMR
    from ..presets import find_preset
    from ..tuning import delta

    check_generation(args)
    if not 0 < args.target <= 1:
        raise HeartError(f"--target is {args.target}: give a number above 0, at most 1")
    pipe = pipelines.load(args.model, args.dtype, args.device)
    call = pipelines.call_arguments(args.model, pipe, args.size, args.frames, args.steps, args.quick)
    config, _ = find_preset(args.backbone, pipe)
    probe = record(pipe, config, _prompt(args), args.seed, call)
    gate = TMR().gate
    tuned = delta.tune(probe, args.target, args.relative, args.per_layer, gate)
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
    from ..evaluation.watch import watch
    from ..tuning.delta import MaskProbe

    probe = MaskProbe(
        config.backbone,
        thresholds_of(pipe, config),
        config.first_dense_steps(call["num_inference_steps"]),
        config.scale_clusters,
    )
    watch(pipe, probe, [prompt], seed, call)
    return probe


def thresholds_of(pipe: Any, config: Any) -> list:
    """Thresholds of every head, [transformers][layers] rows."""
    from ..models.inspect import layers_and_heads, transformers_of
    from ..online.thresholds import table as threshold_table

    transformers = transformers_of(pipe)
    return threshold_table(config.thresholds, len(transformers), *layers_and_heads(transformers[0]))


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


# ---------------------------------------- token order


def run_order(args: argparse.Namespace) -> int:
    """Generate, choose, print."""
    from ..api import resolve
    from ..evaluation import pipelines
    from ..evaluation.watch import watch
    from ..tuning import order

    check_generation(args)
    if args.looks < 1:
        raise HeartError(f"--looks is {args.looks}: give at least 1")
    pipe = pipelines.load(args.model, args.dtype, args.device)
    call = pipelines.call_arguments(args.model, pipe, args.size, args.frames, args.steps, args.quick)
    config, _ = resolve(args.config, pipe)
    steps = _looks(config.first_dense_steps(call["num_inference_steps"]), call["num_inference_steps"], args.looks)
    probe = order.OrderProbe(config.backbone, thresholds_of(pipe, config), steps, config.kernel)
    watch(pipe, probe, _prompts(args), args.seed, call)
    tuned = order.tune(probe, args.keep)
    if args.out:
        config.replace(order=tuned.order, thresholds=tuned.thresholds).save(args.out)
    print(json.dumps(_order_dict(tuned, args), indent=1) if args.json else _order_text(tuned, args))
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt or not args.model.startswith("tiny"):
        return args.prompt or ["a video"]
    from .. import tiny

    return tiny.prompts("calibration")[:2]


def _looks(first: int, steps: int, count: int) -> list[int]:
    """Sparse steps to look at, the first and the last among them."""
    if steps <= first:
        raise HeartError(f"{steps} steps of which {first} are dense leave none to look at: give more --steps")
    count = min(count, steps - first)
    return sorted({first + round(i * (steps - 1 - first) / max(count - 1, 1)) for i in range(count)})


def _order_dict(tuned: Any, args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    return {"model": args.model, "config": args.config, **asdict(tuned)}


def _order_text(tuned: Any, args: argparse.Namespace) -> str:
    """Names and thresholds as a table, what they give under it."""
    tables = tuned.order if isinstance(tuned.order[0][0], tuple) else (tuned.order,)
    taus = tuned.thresholds if len(tables) > 1 else (tuned.thresholds,)
    lines = []
    for t, table in enumerate(tables):
        for layer, row in enumerate(table):
            name = f"transformer {t} layer {layer:>3}" if len(tables) > 1 else f"layer {layer:>3}"
            lines.append(f"{name}: " + " ".join(f"{x:>7} {tau:.3f}" for x, tau in zip(row, taus[t][layer])))
    lines.append(
        f"{tuned.moved:.0%} of the heads leave the raster: {1 - tuned.blocks:.1%} fewer blocks at equal thresholds; "
        f"at equal density a head's error is {tuned.error:.2f} of the raster's ({tuned.calls} calls looked at)"
    )
    if args.out:
        lines.append(f'heart.enable(pipe, "{args.out}") uses it')
    return "\n".join(lines)
