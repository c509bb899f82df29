"""`heart compare`: the paper's main table for any model, methods and prompts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import HeartError
from ..evaluation.methods import DEFAULT
from .arguments import (
    add_cluster,
    add_command,
    add_compile,
    add_device,
    add_docs,
    add_json,
    add_model,
    add_retime,
    add_size,
    announce_compile,
    check_docs,
    check_folder,
    check_generation,
    cluster_of,
    seeds_of,
    words,
)


def register(commands) -> None:
    """Add the command."""
    one = add_command(
        commands, "compare", "the paper's main table for any model, methods and prompts", run_compare,
        "Methods: dense; a backbone as published; +tmr, +ebc, +heart: the paper's parts; +joint: joint calibration and TMR.",
    )  # fmt: skip
    add_run_arguments(one, "runs/compare")
    add_device(one)
    add_cluster(one)
    add_compile(one)
    one.add_argument("--methods", default=",".join(DEFAULT), help="comma-separated")
    one.add_argument(
        "--metrics", help="comma-separated: psnr, ssim, lpips, vmaf, … (default: psnr,ssim, and lpips with its weights)"
    )
    one.add_argument(
        "--calibration", action="append", default=[], metavar="F.heart.json",
        help="for +ebc and +heart (made with --method probes) or +joint; may be repeated",
    )  # fmt: skip
    one.add_argument("--force-sparse", action="store_true", help="all methods sparse even where dense would be quicker")
    add_retime(one)
    add_docs(one)
    one.add_argument("--judges", metavar="DIR", help="also lay out videos for VBench and VisionReward there")
    one.add_argument("--scores", metavar="DIR", help="take the judges' JSON from there into results and table")


def add_run_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """Model, prompts, seeds, size and folder of many generations."""
    add_model(parser)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt a line, or vbench, or vbench:DIMENSION (default: the embedded model's)",
    )
    parser.add_argument("--limit", type=int, help="use only so many prompts")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    add_size(parser)
    parser.add_argument("--quick", action="store_true", help="the embedded model's small size")
    parser.add_argument("--out", default=out, metavar="DIR", help="folder for results")
    add_json(parser, "the table")


def read_prompts(args: argparse.Namespace, split: str, default: int) -> list[str]:
    """The prompts that the user named, or the first of the embedded model's own."""
    from ..evaluation import pipelines

    if args.limit is not None and args.limit < 1:
        raise HeartError(f"--limit is {args.limit}: it must be 1 or more")
    if args.prompts:
        found = pipelines.read_prompts(args.prompts)
    elif args.model in pipelines.TINY:
        from .. import tiny

        found = tiny.prompts(split)[:default]
    else:
        raise HeartError(
            f"no prompts for model {args.model!r}: give a file with --prompts, one prompt a line, or vbench"
        )
    return found[: args.limit]


def run_compare(args: argparse.Namespace) -> int:
    """All methods on all prompts; table, results, optionally videos for the judges and their scores."""
    from ..evaluation import compare, methods, pipelines, results
    from ..evaluation.metrics import judges
    from .progress import Steps

    check_generation(args)
    check_folder(args.out, "--out")
    check_docs(args, "compare")
    announce_compile(args)
    wanted, prompts = words(args.methods, "--methods"), read_prompts(args, "demo", 8)
    seeds = seeds_of(args)
    names = compare.check_metrics(words(args.metrics, "--metrics") if args.metrics else None)
    methods.check(wanted, methods.sort_calibrations(args.calibration), args.model)
    if args.scores and not Path(args.scores).is_dir():
        raise HeartError(f"there is no folder {args.scores!r}: give the one that --judges laid out")
    if args.judges:
        judges.check_folder(args.judges)
    cluster = cluster_of(args)
    pipe = pipelines.load(args.model, args.dtype, args.device)
    call = pipelines.call_arguments(args.model, pipe, args.size, args.frames, args.steps, args.quick)
    count = len({"dense", *wanted})
    with Steps(call["num_inference_steps"] * len(prompts) * len(seeds) * count) as progress:
        made = compare.compare(
            pipe, wanted, prompts, args.out, seeds=seeds, call=call, metrics=names, calibrations=args.calibration,
            force_sparse=args.force_sparse, model=args.model, compile_blocks=args.compile,
            progress=progress, cluster=cluster,
            retime=args.retime,
        )  # fmt: skip
    lines = _lay_out(made, args) if args.judges else []
    if args.scores:
        made = judges.attach_scores(made, args.scores, args.out)
        results.save(made, args.out)
    show(made, args, lines)
    return 0


def _lay_out(made: dict, args: argparse.Namespace) -> list[str]:
    """Videos for the judges, and what to type there."""
    from ..evaluation.metrics import judges

    rows = [{**r, "video": str(Path(args.out) / r["video"])} for r in made["rows"]]
    judges.export(rows, args.judges)
    return [line for name in dict.fromkeys(r["method"] for r in rows) for line in judges.commands(args.judges, name)]


def show(made: dict, args: argparse.Namespace, lines: list[str]) -> None:
    """Print the table with what must be known about it, and where everything is."""
    from ..evaluation import tables

    summary = tables.write_tables(made, args.out)
    if args.docs:
        from ..evaluation.studies import reproduction

        reproduction.fill(args.docs, compared=args.out)
    if args.json:
        print(json.dumps(tables.finite(summary), indent=1))
        return
    print(tables.text_table(summary, made["conventions"]), "", *tables.reuse_lines(made), sep="\n")
    print(*tables.notes(summary, made), *lines, tables.overhead_line(made), sep="\n")
    print(f"results, tables and videos: {args.out} (`heart report {args.out}` makes a page of it)")
