"""`heart ablate` and `heart study`: the paper's ablation tables and observations."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import HeartError
from ..evaluation.studies import ABLATIONS, STUDIES
from .arguments import (
    add_backbone,
    add_cluster,
    add_command,
    add_device,
    add_docs,
    add_retime,
    check_docs,
    check_folder,
    check_generation,
    cluster_of,
    numbers,
    seeds_of,
)
from .compare import add_run_arguments, read_prompts


def register(commands) -> None:
    """Add both commands."""
    ablate = add_command(
        commands, "ablate", "the paper's ablation tables", run_ablate,
        "Every row is sparse at the same calls (force_sparse): parts are compared, not the choice between dense and sparse.",
    )  # fmt: skip
    ablate.add_argument("which", choices=[*ABLATIONS, "all"], help="which table")
    add_run_arguments(ablate, "runs/ablate")
    add_device(ablate)
    add_cluster(ablate)
    add_backbone(ablate)
    ablate.add_argument(
        "--calibration", action="append", default=[], metavar="F.heart.json", help="for +ebc and +heart"
    )
    ablate.add_argument("--deltas", help="comma-separated absolute δ (default: the paper's, or around the preset's)")
    ablate.add_argument(
        "--objectives", metavar="NAME=FILE,…", help="calibrations for the objective table (default: it makes its own)"
    )
    add_retime(ablate)
    add_docs(ablate)

    study = add_command(commands, "study", "the paper's observations, with a random-weight control", run_study)
    study.add_argument("which", choices=[*STUDIES, "all"], help="which study")
    add_run_arguments(study, "runs/study")
    add_device(study)
    add_cluster(study)
    study.add_argument("--seed", type=int, default=0, help="of the layer, the rows and the noise that are drawn")
    study.add_argument(
        "--control", action=argparse.BooleanOptionalAction, default=None,
        help="also with random weights (default: for the embedded model; a large one would have to be held twice)",
    )  # fmt: skip
    add_docs(study)


def _check(args: argparse.Namespace, part: str) -> None:
    """What can be told before the work is told then."""
    check_generation(args)
    check_folder(args.out, "--out")
    check_docs(args, part)


def run_ablate(args: argparse.Namespace) -> int:
    """One ablation table or all."""
    from ..evaluation import methods, metrics, pipelines, run, tables
    from ..evaluation.studies import ablations
    from .progress import Steps

    _check(args, "ablations")
    objectives = _objectives(args.objectives) if args.objectives else {}
    deltas = numbers(args.deltas, "--deltas") if args.deltas else None
    prompts, seeds = read_prompts(args, "demo", 8), seeds_of(args)
    calibrations = methods.sort_calibrations(args.calibration)
    methods.check([f"{args.backbone}+heart"], calibrations, args.model)
    wanted, left_out = ablations.choose(args.which, args.model, bool(objectives))
    cluster = cluster_of(args)
    pipe = pipelines.load(args.model, args.dtype, args.device)
    call = pipelines.call_arguments(args.model, pipe, args.size, args.frames, args.steps, args.quick)
    setting = run.Setting(args.model, call, metrics.defaults(), pipelines.frame_rate(pipe))
    with Steps() as progress:
        bench = ablations.Bench(
            pipe,
            args.model,
            args.backbone,
            prompts,
            seeds,
            setting,
            Path(args.out),
            calibrations,
            progress,
            cluster,
            args.retime,
        )
        runs = ablations.tables_of(bench, deltas, objectives)
        made = {name: runs[name]() for name in wanted}
    _fill_docs(args, ablations=args.out)
    if args.json:
        rows = {n: {"finding": t["finding"], "rows": tables.finite(t["summary"])} for n, t in made.items()}
        print(json.dumps({**rows, "left_out": left_out}, indent=1))
        return 0
    for name, table in made.items():
        print(f"\n{name}\n{tables.text_table(table['summary'], setting_conventions(setting))}\n{table['finding']}")
        print(*tables.notes(table["summary"], table["results"]), sep="\n")
    for name, reason in left_out.items():
        print(f"\nleft out: {name}, {reason}")
    print(f"\ntables and videos: {args.out}")
    return 0


def setting_conventions(setting) -> dict[str, str]:
    """The conventions of a setting's metrics."""
    from ..evaluation import metrics

    return {n: metrics.CONVENTIONS[n] for n in setting.metrics}


def _objectives(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and path for name, _, path in pairs):
        raise HeartError(f"--objectives is {text!r}: write NAME=FILE pairs separated by commas")
    return {name: path for name, _, path in pairs}


def run_study(args: argparse.Namespace) -> int:
    """One study or all, each with the random-weight control where there is one."""
    from ..evaluation import pipelines
    from ..evaluation.studies import runner

    _check(args, "studies")
    embedded, cluster = args.model in pipelines.TINY, cluster_of(args)
    prompts = read_prompts(args, "demo", 2)
    pipe = pipelines.load(args.model, args.dtype, args.device)
    steps = args.steps or (12 if embedded else 50)
    call = pipelines.call_arguments(args.model, pipe, args.size, args.frames, steps, args.quick)
    wanted = list(STUDIES) if args.which == "all" else [args.which]
    control = embedded if args.control is None else args.control
    made = runner.run(wanted, pipe, control, call, prompts, Path(args.out), args.seed, cluster)
    _fill_docs(args, studies=args.out)
    if args.json:
        print(json.dumps(made, indent=1))
        return 0
    for finding in made.values():
        print(f"\n{finding['study']}\n{finding['finding']}")
    print(f"\nnumbers and figures: {args.out}")
    return 0


def _fill_docs(args: argparse.Namespace, studies: str | None = None, ablations: str | None = None) -> None:
    """Fill the page from this command's folder; what the other command filled stays."""
    if args.docs:
        from ..evaluation.studies import reproduction

        reproduction.fill(args.docs, studies, ablations)
