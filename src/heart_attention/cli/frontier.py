"""`heart frontier`: how good methods are at how much speed, each at several budgets."""

from __future__ import annotations

import argparse
import json

from ..errors import HeartError
from .arguments import add_cluster, add_command, add_device, check_folder, check_generation, cluster_of, seeds_of, words
from .compare import add_run_arguments, read_prompts

METHODS = "xattention@0.7,xattention@0.8,xattention@0.9,svg2@0.7,svg2@0.8,svg2@0.9"


def register(commands) -> None:
    """Add the command."""
    one = add_command(
        commands, "frontier", "speed against quality of methods at several budgets each", run_frontier,
        "A budget follows the method's name: heart@0.25 is of time, xattention@0.8 a threshold, xattention+joint@0.8 as sparse "
        "as that threshold. Videos do not depend on the machine's load, times do: --quality-only makes the former, --times-only "
        "measures the latter again in the same folder, when the machine is idle.",
    )  # fmt: skip
    add_run_arguments(one, "runs/frontier")
    add_device(one)
    add_cluster(one)
    one.add_argument("--methods", default=METHODS, help="comma-separated, with budgets")
    one.add_argument("--metrics", help="comma-separated (default: psnr,ssim, and lpips with its weights)")
    one.add_argument(
        "--calibration", action="append", default=[], metavar="F.heart.json",
        help="for heart, +joint, +ebc, +heart; may be repeated, also for several budgets of one method",
    )  # fmt: skip
    one.add_argument("--force-sparse", action="store_true", help="all methods sparse even where dense would be quicker")
    part = one.add_mutually_exclusive_group()
    part.add_argument("--quality-only", action="store_true", help="no times: nothing takes turns, dense runs once")
    part.add_argument("--times-only", action="store_true", help="times again that are missing or cannot be trusted")
    one.add_argument("--timed", type=int, metavar="N", help="measure times on the first N prompts only (default: all)")
    one.add_argument(
        "--velocity",
        type=int,
        default=0,
        metavar="N",
        help="velocity errors on the first N prompts, a generation more each",
    )
    one.add_argument("--plot", metavar="FILE.svg", help="write the front as a picture")
    one.add_argument("--axis", choices=("attention", "total"), default="attention", help="of the picture")


def run_frontier(args: argparse.Namespace) -> int:
    """Generate, time and measure; print the table and how the methods compare."""
    from ..evaluation import compare, methods, pipelines
    from ..evaluation.frontier import frontier, plot
    from ..evaluation.report import report
    from .progress import Steps

    check_generation(args)
    check_folder(args.out, "--out")
    _check_counts(args)
    if args.plot:
        plot.check_suffix(args.plot)
    wanted, prompts = words(args.methods, "--methods"), read_prompts(args, "demo", 8)
    seeds = seeds_of(args)
    names = compare.check_metrics(words(args.metrics, "--metrics") if args.metrics else None)
    methods.check(wanted, methods.sort_calibrations(args.calibration), args.model)
    cluster = cluster_of(args)
    pipe = pipelines.load(args.model, args.dtype, args.device)
    call = pipelines.call_arguments(args.model, pipe, args.size, args.frames, args.steps, args.quick)
    generations = len({"dense", *wanted}) * len(seeds) * (len(prompts) + min(args.velocity, len(prompts)))
    with Steps(call["num_inference_steps"] * generations) as progress:
        made = frontier(
            pipe, wanted, prompts, args.out, timed=0 if args.quality_only else args.timed, times_only=args.times_only,
            velocity_prompts=args.velocity, seeds=seeds, progress=progress, cluster=cluster, call=call, metrics=names,
            calibrations=args.calibration, force_sparse=args.force_sparse, model=args.model,
        )  # fmt: skip
    pictures = [str(plot.write(made, args.plot, args.axis))] if args.plot else []
    _show(made, args, [*pictures, str(report(args.out))])
    return 0


def _check_counts(args: argparse.Namespace) -> None:
    for name in ("timed", "velocity"):
        value = getattr(args, name)
        if value is not None and value < 0:
            raise HeartError(f"--{name} is {value}: it must be 0 or more")


def _show(made: dict, args: argparse.Namespace, files: list[str]) -> None:
    from ..evaluation import tables
    from ..evaluation.frontier import front

    if args.json:
        print(json.dumps(made["frontier"], indent=1))
        return
    summary = tables.summarise(made)
    print(tables.text_table(summary, made["conventions"]), "")
    ahead = [e["method"] for e in made["frontier"]["methods"] if e["front_attention"]]
    if ahead:
        print("unbeaten in attention time and PSNR: " + ", ".join(ahead))
    print(*front.lines(made["frontier"]["comparisons"]), sep="\n")
    print(*tables.notes(summary, made), sep="\n")
    print("written: " + ", ".join([*files, f"{args.out}/frontier.json"]))
