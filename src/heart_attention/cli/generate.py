"""`heart demo` and `heart generate`: the main jobs on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..errors import HeartError
from .arguments import add_device, add_model, add_size


def register(commands) -> None:
    """Add the commands of this file."""
    demo = commands.add_parser("demo", help="dense, XAttention and SVG2, plain and with HEART, on the embedded model")
    demo.add_argument("--out", default="heart-demo", metavar="DIR", help="results folder (default heart-demo)")
    demo.add_argument("--prompt", action="append", help="a prompt of your own (may be given several times)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--steps", type=int, help="denoising steps (default 25, quick 12, full 50)")
    size = demo.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a smaller size and 12 steps")
    size.add_argument("--full", action="store_true", help="8 prompts, 50 steps, also mask reuse alone")
    demo.add_argument("--json", action="store_true", help="print the table as JSON")
    demo.set_defaults(func=run_demo)

    one = commands.add_parser("generate", help="one video with HEART from any diffusers video model")
    add_model(one)
    one.add_argument("--prompt", required=True)
    one.add_argument("--out", default="video.mp4", metavar="FILE.mp4")
    one.add_argument("--preset", default="xattention", help="backbone or preset name (default xattention)")
    one.add_argument(
        "--calibration", action="append", metavar="F.heart.json", help="per-head thresholds (twice: two transformers)"
    )
    one.add_argument("--dense", action="store_true", help="without HEART")
    add_size(one)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--fps", type=int, default=8)
    add_device(one)
    one.add_argument("--json", action="store_true", help="print what happened as JSON")
    one.set_defaults(func=run_generate)


class Progress:
    """A progress bar over denoising steps on standard error, quiet when that is not a terminal."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=total, unit="step", file=sys.stderr, dynamic_ncols=True)

    def __call__(self, method: str, steps: int) -> None:
        self.bar.set_description(method, refresh=False)
        self.bar.update(steps)

    def close(self) -> None:
        self.bar.close()


def _demo_plan(args) -> tuple[list[str], int, bool]:
    """Prompts, steps and whether the small size is wanted."""
    from .. import tiny

    prompts = args.prompt or tiny.prompts("demo")[: 8 if args.full else 1]
    steps = args.steps if args.steps is not None else (12 if args.quick else 50 if args.full else 25)
    return prompts, steps, args.quick


def run_demo(args: argparse.Namespace) -> int:
    """Five methods (with `--full` mask reuse alone too) on the embedded model: table, report, results, videos."""
    from ..evaluation import methods, pipelines, report, run

    prompts, steps, quick = _demo_plan(args)
    pipe = pipelines.load("tiny")
    call = pipelines.call_arguments("tiny", pipe, steps=steps, quick=quick)
    chosen = [methods.build(name, pipe, "tiny") for name in (methods.FULL if args.full else methods.DEFAULT)]
    setting = run.Setting("tiny", call)
    progress = Progress(steps * len(prompts) * len(chosen))
    try:
        results = run.run(pipe, chosen, prompts, [args.seed], setting, args.out, progress)
    finally:
        progress.close()
    summary = run.write_tables(results, args.out)
    page = report.build(args.out)
    if args.json:
        print(json.dumps(summary, indent=1))
        return 0
    print(run.text_table(summary))
    print("\n" + "\n".join([*run.reuse_lines(results), _explain(pipe, call, chosen, results)]))
    print(f"\nreport: {page}\nresults: {Path(args.out) / 'results.json'}")
    return 0


def _explain(pipe, call: dict, chosen: list, results: dict) -> str:
    """What was run, in two lines a stranger understands."""
    from .. import tiny

    t, h, w = tiny.tokens(**call)
    n = t * h * w
    svg2 = next(m.config.backbone for m in chosen if m.name == "svg2").scaled_to(n)
    calibrated = [m.name for m in chosen if m.name.endswith("+heart") and not isinstance(m.config.thresholds, float)]
    thresholds = f"calibrated thresholds in {', '.join(calibrated)}" if calibrated else "shared thresholds of 0.9"
    return (
        f"{call['width']}×{call['height']}, {t} frames = {n} video tokens, "
        f"{call['num_inference_steps']} steps with guidance, {len(results['rows'])} videos; {thresholds};\n"
        f"SVG2 with {svg2.q_clusters} × {svg2.k_clusters} clusters (300 × 1,000 at 32,760 tokens). "
        "PSNR and SSIM are against dense; times are of this machine, to be read as ratios."
    )


def run_generate(args: argparse.Namespace) -> int:
    """One video; prints what HEART did."""
    from ..evaluation import methods, pipelines, run, video

    if not args.out.endswith(".mp4"):
        raise HeartError(f"--out is {args.out!r}: give a file name that ends in .mp4")
    pipe = pipelines.load(args.model, args.dtype, args.device)
    call = pipelines.call_arguments(args.model, pipe, args.size, args.frames, args.steps)
    method = methods.build("dense", pipe, args.model) if args.dense else _preset_method(args, pipe)
    progress = Progress(call["num_inference_steps"])
    try:
        frames, row = run.generate(
            pipe, method, args.prompt, args.seed, run.Setting(args.model, call), lambda: progress(method.name, 1)
        )
    finally:
        progress.close()
    path = video.write_mp4(args.out, frames, args.fps)
    stats = row.pop("stats")
    if args.json:
        print(json.dumps({**row, "video": str(path)}, indent=1))
        return 0
    print(f"{path}: {frames.shape[2]}×{frames.shape[1]}, {len(frames)} frames, {method.name}")
    if not args.dense:
        density, refreshed = row["density"], row["refresh_rate"]
        print(f"density {density:.3f}, masks predicted anew {refreshed:.0%}" if density is not None else "all dense")
        for reason, count in (stats.get("dense_reasons") or {}).items():
            print(f"dense {count} times: {reason}")
    return 0


def _preset_method(args, pipe):
    """The preset the user named, with their calibration or the one shipped with the embedded model."""
    from ..calibration import experts
    from ..config import preset
    from ..evaluation import methods, run

    config = preset(args.preset, pipe)
    path = args.calibration or methods.shipped_calibration(config.backbone.name, args.model)
    if path:
        config = config.replace(thresholds=experts.load(path))
    return run.Method(args.preset, config)
