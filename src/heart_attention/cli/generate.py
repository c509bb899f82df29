"""`heart demo` and `heart generate`: the main jobs on the command line."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from ..errors import HeartError
from ..online import warmup
from .arguments import (
    add_command,
    add_compile,
    add_device,
    add_json,
    add_model,
    add_size,
    announce_compile,
    check_folder,
    check_generation,
)
from .progress import Steps

OF_HEART = ("preset", "calibration", "dense_steps", "dense_last_steps", "force_sparse")  # mean nothing without it


def register(commands) -> None:
    """Add the commands of this file."""
    _register_demo(commands)
    one = add_command(
        commands, "generate", "one video with HEART from any diffusers video model", run_generate,
        "The ending of --out says the format: .mp4, .gif or .webp.",
    )  # fmt: skip
    add_model(one)
    one.add_argument("--prompt", required=True, help="what the video shall show")
    one.add_argument("--negative-prompt", metavar="TEXT", help="what it shall not show")
    one.add_argument("--image", metavar="FILE", help="first frame, for image-to-video models")
    one.add_argument("--out", default="video.mp4", metavar="FILE", help=".mp4, .gif or .webp")
    one.add_argument("--preset", help="backbone, preset or config file (default: the calibration's, else xattention)")
    one.add_argument(
        "--calibration",
        action="append",
        default=[],
        metavar="F.heart.json",
        help="operating point (twice: two transformers)",
    )
    one.add_argument("--dense", action="store_true", help="without HEART")
    one.add_argument(
        "--dense-steps", type=warmup.read, metavar="N|auto", help="first steps that stay dense (default: the preset's)"
    )
    one.add_argument("--dense-last-steps", type=int, metavar="N", help="last steps that stay dense (default: none)")
    one.add_argument("--force-sparse", action="store_true", help="sparse even where dense would be quicker")
    add_size(one)
    one.add_argument("--guidance", type=float, metavar="SCALE", help="guidance scale (default: the pipeline's)")
    one.add_argument("--seed", type=int, default=0, help="of the starting noise")
    one.add_argument("--fps", type=int, help="frames a second (default: the model's: Wan 16, HunyuanVideo 24, …)")
    add_device(one)
    add_compile(one)
    add_json(one, "what happened")


def _register_demo(commands) -> None:
    demo = add_command(
        commands, "demo", "dense, XAttention and SVG2, plain and with HEART, on the embedded model", run_demo
    )
    demo.add_argument("--out", default="heart-demo", metavar="DIR", help="results folder")
    demo.add_argument("--prompt", action="append", help="a prompt of your own (may be given several times)")
    demo.add_argument("--seed", type=int, default=0, help="of the starting noise")
    demo.add_argument("--steps", type=int, help="denoising steps (default 25, quick 12, full 50)")
    demo.add_argument(
        "--force-sparse", action="store_true", help="all methods sparse even where dense would be quicker"
    )
    size = demo.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a smaller size and 12 steps")
    size.add_argument(
        "--full",
        action="store_true",
        help="8 prompts, 50 steps, also the paper's parts one by one (+tmr, +ebc, +heart)",
    )
    add_compile(demo)
    add_json(demo, "the table")


# ---------------------------------------- demo


def _demo_plan(args: argparse.Namespace) -> tuple[list[str], int]:
    """Prompts and steps."""
    from .. import tiny

    prompts = args.prompt or tiny.prompts("demo")[: 8 if args.full else 1]
    return prompts, args.steps if args.steps is not None else (12 if args.quick else 50 if args.full else 25)


def run_demo(args: argparse.Namespace) -> int:
    """The shipped methods on the embedded model: table, report, results, videos."""
    from ..evaluation import methods, pipelines, tables
    from ..evaluation.compare import compare
    from ..evaluation.report import report

    check_folder(args.out, "--out")
    announce_compile(args)
    prompts, steps = _demo_plan(args)
    pipelines.check_call(steps=steps)
    pipe = pipelines.load("tiny")
    call = pipelines.call_arguments("tiny", pipe, steps=steps, quick=args.quick)
    wanted = methods.shipped_rows(args.full)
    with Steps(steps * len(prompts) * len(wanted)) as progress:
        made = compare(
            pipe, wanted, prompts, args.out, seeds=[args.seed], call=call, force_sparse=args.force_sparse, model="tiny",
            compile_blocks=args.compile, progress=progress,
        )  # fmt: skip
    page = report(args.out)
    summary = tables.summarise(made)
    if args.json:
        print(json.dumps(tables.finite(summary), indent=1))
        return 0
    print(
        tables.text_table(summary, made["conventions"]), "", *tables.reuse_lines(made), *tables.notes(summary, made),
        _explain(call, made), sep="\n",
    )  # fmt: skip
    print(f"\nreport: {page}\nresults: {Path(args.out) / 'results.json'}")
    return 0


def _explain(call: dict[str, Any], made: dict) -> str:
    """What was run, in two lines a stranger understands."""
    from .. import tiny

    t, h, w = tiny.tokens(**call)
    paper = any(row["method"].endswith("+heart") for row in made["rows"])
    return (
        f"{call['width']}×{call['height']}, {t} frames = {t * h * w} video tokens, "
        f"{call['num_inference_steps']} steps with guidance, {len(made['rows'])} videos; +joint: every head's threshold\n"
        "jointly calibrated, and mask reuse. PSNR and SSIM are against dense; times are of this machine, to be read as ratios."
        + (
            "\n+tmr: mask reuse alone; +ebc: thresholds calibrated by the paper's protocol; +heart: both."
            if paper
            else ""
        )
    )


# ---------------------------------------- generate


def run_generate(args: argparse.Namespace) -> int:
    """One video; prints what HEART did."""
    from ..evaluation import pipelines, run, video

    _check(args)
    announce_compile(args)
    base = None if args.dense else _config_source(args)
    more = _more(args)
    if more and (kind := pipelines.class_of(args.model)):
        _check_taken(more, kind)
    pipe = pipelines.load(args.model, args.dtype, args.device)
    _check_taken(more, type(pipe))
    call = {**pipelines.call_arguments(args.model, pipe, args.size, args.frames, args.steps), **more}
    method = _method(args, base, pipe)
    with Steps(call["num_inference_steps"]) as progress:
        setting = run.Setting(args.model, call, compile_blocks=args.compile)
        frames, row = run.generate(pipe, method, args.prompt, args.seed, setting, lambda: progress(method.name, 1))
    path = video.write(args.out, frames, args.fps or pipelines.frame_rate(pipe))
    stats = row.pop("stats")
    if args.json:
        print(json.dumps({**row, "video": str(path)}, indent=1))
        return 0
    print(f"{path}: {frames.shape[2]}×{frames.shape[1]}, {len(frames)} frames, {method.name}")
    print(_seconds(row, stats))
    if not args.dense:
        for line in _what_happened(row):
            print(line)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Everything that can be judged before a model is loaded."""
    from ..evaluation import video

    video.check_suffix(args.out)
    check_generation(args)
    if args.dense_steps is not None:
        warmup.check(args.dense_steps, "--dense-steps")
    for name, least in (("fps", 1), ("dense_last_steps", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise HeartError(f"--{name.replace('_', '-')} is {value}: it must be {least} or more")
    idle = [name for name in OF_HEART if args.dense and getattr(args, name) not in (None, False, [])]
    if idle:
        raise HeartError(f"--dense is without HEART: leave --{idle[0].replace('_', '-')} out, or --dense")
    if args.guidance is not None and not math.isfinite(args.guidance):
        raise HeartError(f"--guidance is {args.guidance}: give a number, 1 for none")
    if args.image:
        _picture(args.image)


def _picture(path: str) -> Any:
    """The picture in a file; what is none is told."""
    from PIL import Image

    if not Path(path).is_file():
        raise HeartError(f"there is no picture {path!r}: check the path")
    try:
        return Image.open(path).convert("RGB")
    except OSError:  # PIL's own error for what it does not know is one
        raise HeartError(f"{path!r} is not a picture that can be read: give a PNG, JPEG or WebP file") from None


def _config_source(args: argparse.Namespace) -> Any:
    """What `heart.enable` shall be given: calibration files, or a preset's name; contradictions are refused."""
    from ..calibration.file import Calibration
    from ..evaluation import methods

    if not args.calibration:
        name = args.preset or "xattention"
        if name.partition("@")[0] == methods.HEART:
            if not Path(args.model).is_dir():  # a folder may hold the embedded model
                methods.check([name], {}, args.model)
            return name
        backbone = _backbone_of(name)
        _check_preset(name, args.model)
        return (methods.shipped_calibration(backbone, args.model) if backbone == name else None) or name
    files = {path: Calibration.load(path) for path in args.calibration}
    kinds = {point["backbone"]["name"] for one in files.values() for point in one.points}
    if args.preset and kinds != {_backbone_of(args.preset)}:
        raise HeartError(
            f"{args.calibration[0]} is a calibration for {', '.join(sorted(kinds))} but --preset is {args.preset}: "
            "leave --preset out, or give a calibration for it"
        )
    _check_calibrations(files, args.model)
    return args.calibration[0] if len(args.calibration) == 1 else args.calibration


def _check_preset(name: str, model: str) -> None:
    """A preset or config for another model is told before that model is loaded."""
    from ..config import HeartConfig
    from ..evaluation import pipelines
    from ..presets import PRESETS, check_model

    name = name.partition("@")[0]
    config = PRESETS[name].config if name in PRESETS else HeartConfig.load(name) if name.endswith(".json") else None
    if config is not None and config.model is not None and (outline := pipelines.outline_of(model)) is not None:
        check_model(config, outline)


def _check_calibrations(files: dict[str, Any], model: str) -> None:
    """The same for calibrations, as far as class and heads tell; the rest of the fingerprint takes the weights."""
    from ..evaluation import pipelines

    outline = pipelines.outline_of(model)
    for path, one in files.items() if outline is not None else ():
        mine = (one.model["class"], one.heads) if one.model else None
        here = (type(outline).__name__, outline.config.get("num_attention_heads", one.heads))
        if mine is not None and mine != here:
            raise HeartError(
                f"{path} was made for {mine[0]} with {mine[1]} heads but {model} has {here[0]} with {here[1]}: "
                "calibrate this model"
            )


def _backbone_of(name: str) -> str:
    """The backbone that a preset, config file or backbone's name stands for, a threshold after "@" left out."""
    from ..calibration.solve.budget import Budget
    from ..config import HeartConfig
    from ..presets import PRESETS, find_preset

    name, at, budget = name.partition("@")
    if at:
        Budget.named(budget, "threshold")
    if name.endswith(".json"):
        return HeartConfig.load(name).backbone.name
    return PRESETS[name].config.backbone.name if name in PRESETS else _known(name, find_preset)


def _known(name: str, find_preset: Any) -> str:
    from .. import backbones

    if name not in backbones.names():
        find_preset(name)  # raises, with all names
    return name


def _more(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the call beyond size and steps."""
    more: dict[str, Any] = {}
    if args.guidance is not None:
        more["guidance_scale"] = args.guidance
    if args.negative_prompt is not None:
        more["negative_prompt"] = args.negative_prompt
    if args.image:
        more["image"] = _picture(args.image)
    return more


def _check_taken(more: dict[str, Any], kind: type) -> None:
    """What a pipeline of this class does not take is refused by name."""
    import inspect

    taken = inspect.signature(kind.__call__).parameters
    for name in more:
        if name not in taken:
            option = {"guidance_scale": "guidance", "negative_prompt": "negative-prompt"}.get(name, name)
            raise HeartError(f"{kind.__name__} takes no {name}: leave --{option} out, or choose another model")


def _method(args: argparse.Namespace, source: Any, pipe: Any) -> Any:
    """What the user asked for as a method, changed where they said so."""
    from ..api import resolve
    from ..evaluation import methods

    if args.dense:
        return methods.build("dense", pipe, args.model)
    config, _ = resolve(source, pipe)
    changes: dict[str, Any] = {"force_sparse": True} if args.force_sparse else {}
    asked = {name: getattr(args, name) for name in ("dense_steps", "dense_last_steps")}
    changes |= {name: value for name, value in asked.items() if value is not None}
    return methods.Method(args.preset or config.backbone.name, config.replace(**changes) if changes else config)


def _seconds(row: dict, stats: dict) -> str:
    """How long it took, and how much quicker sparse steps were than the dense ones of the same generation."""
    text = f"{row['wall_s']:.1f} s, {row['total_s']:.1f} s of them in the denoising model"
    steps = [s for s in stats["steps"] if s["calls"]]
    dense = [s["time"]["total"] for s in steps if s["dense_calls"] == s["calls"]]
    sparse = [s["time"]["total"] for s in steps if s["dense_calls"] < s["calls"]]
    if dense and sparse and sum(sparse):
        ratio = (sum(dense) / len(dense)) / (sum(sparse) / len(sparse))
        text += f"; attention of a sparse step {ratio:.1f}× as fast as of a dense one"
    return text


def _what_happened(row: dict) -> list[str]:
    if row["refresh_rate"] is None:
        lines = ["every attention call ran dense"]
    else:
        lines = [f"density {row['density']:.3f}, masks predicted anew {row['refresh_rate']:.0%}"]
    return lines + [f"dense {count} times: {reason}" for reason, count in row["dense_reasons"].items()]
