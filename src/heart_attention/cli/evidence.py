"""`heart compare`, `ablate`, `study`, `report`, `project`, `fetch-weights`: the paper's tables and figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import HeartError
from ..evaluation.studies import ABLATIONS, STUDIES
from .arguments import add_model, add_size, numbers


def _model_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    add_model(parser)
    parser.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: the embedded model's own)")
    parser.add_argument("--limit", type=int, help="use only so many prompts")
    add_size(parser)
    parser.add_argument("--quick", action="store_true", help="the embedded model's small size")
    parser.add_argument("--out", default=out, metavar="DIR")
    parser.add_argument("--json", action="store_true")


def _docs_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--docs", metavar="PAGE.md", help="also fill that page (docs/reproduction.md of a checkout)")


def register(commands) -> None:
    """Add the commands of this file."""
    one = commands.add_parser("compare", help="the paper's main table for any model, methods and prompts")
    _model_arguments(one, "runs/compare")
    one.add_argument("--methods", default="dense,xattention,xattention+heart,svg2,svg2+heart")
    one.add_argument("--seeds", default="0", help="comma-separated")
    one.add_argument("--metrics", default="psnr,ssim", help="psnr, psnr_pooled, ssim, ssim_box, lpips_alex, …, vmaf")
    one.add_argument("--calibration", action="append", metavar="F.heart.json", help="for +ebc and +heart")
    one.add_argument("--judges", metavar="DIR", help="also lay out videos for VBench and VisionReward there")
    one.add_argument("--scores", metavar="DIR", help="take the judges' JSON from there into the table")
    one.set_defaults(func=run_compare)

    ablate = commands.add_parser("ablate", help="the paper's ablation tables")
    ablate.add_argument("which", choices=[*ABLATIONS, "all"])
    _model_arguments(ablate, "runs/ablate")
    ablate.add_argument("--backbone", default="xattention", choices=["xattention", "svg2"])
    ablate.add_argument("--seeds", default="0")
    ablate.add_argument("--calibration", metavar="F.heart.json")
    ablate.add_argument("--deltas", help="comma-separated absolute δ (default: the paper's, or around the preset's)")
    ablate.add_argument("--objectives", metavar="NAME=FILE,…", help="calibrations for the objective table")
    _docs_argument(ablate)
    ablate.set_defaults(func=run_ablate)

    study = commands.add_parser("study", help="the paper's observations, with the random-weight control")
    study.add_argument("which", choices=[*STUDIES, "all"])
    _model_arguments(study, "runs/study")
    _docs_argument(study)
    study.set_defaults(func=run_study)

    report = commands.add_parser("report", help="one HTML file from a results folder")
    report.add_argument("folder", metavar="DIR")
    report.add_argument("--out", metavar="FILE.html")
    report.set_defaults(func=run_report)

    fetch = commands.add_parser("fetch-weights", help="put metric weights into the user's cache")
    fetch.add_argument("what", choices=["lpips"])
    fetch.add_argument("--file", help="an archive already downloaded")
    fetch.set_defaults(func=run_fetch)

    project = commands.add_parser("project", help="projected times on a GPU from a roofline model")
    from ..evaluation import projection as projection

    projection.add_arguments(project)
    project.set_defaults(func=projection.run)


# --------------------------------------------------------------------------------------------- shared pieces


def _prompts(args, split: str, default: int) -> list[str]:
    from ..evaluation import pipelines

    if args.prompts:
        found = pipelines.read_prompts(args.prompts)
    elif args.model in pipelines.TINY:
        from .. import tiny

        found = tiny.prompts(split)[:default]
    else:
        raise HeartError(f"no prompts for model {args.model!r}: give a file with --prompts, one prompt a line")
    if args.limit is not None and args.limit < 1:
        raise HeartError(f"--limit is {args.limit}: it must be 1 or more")
    return found[: args.limit]


def _setup(args, steps: int | None = None):
    from ..evaluation import pipelines

    pipe = pipelines.load(args.model)
    wanted = args.steps if args.steps is not None else steps
    return pipe, pipelines.call_arguments(args.model, pipe, args.size, args.frames, wanted, args.quick)


def _calibrations(paths: list[str] | None) -> dict[str, list[str]]:
    """The files of each backbone: one, or one for each of a pipeline's two transformers."""
    from ..calibration.file import Calibration

    found: dict[str, list[str]] = {}
    for path in paths or []:
        found.setdefault(Calibration.load(path).backbone["name"], []).append(path)
    return found


# -------------------------------------------------------------------------------------------------- commands


def run_compare(args: argparse.Namespace) -> int:
    """All methods on all prompts; table, results, optionally videos for the judges."""
    from ..evaluation import methods, metrics, run
    from ..evaluation.metrics import judges
    from .generate import Progress

    names = tuple(n.strip() for n in args.metrics.split(",") if n.strip())
    metrics.check(names)
    calibrations = _calibrations(args.calibration)
    prompts, seeds = _prompts(args, "demo", 8), numbers(args.seeds, "--seeds", int)
    wanted = [m.strip() for m in args.methods.split(",") if m.strip()]
    pipe, call = _setup(args)
    chosen = [methods.build(name, pipe, args.model, calibrations) for name in wanted]
    progress = Progress(call["num_inference_steps"] * len(prompts) * len(seeds) * len(chosen))
    setting = run.Setting(args.model, call, names)
    try:
        results = run.run(pipe, chosen, prompts, seeds, setting, args.out, progress)
    finally:
        progress.close()
    if args.judges:
        rows = [{**r, "video": str(Path(args.out) / r["video"])} for r in results["rows"]]
        judges.export(rows, args.judges)
        for name in wanted:
            print(*judges.commands(args.judges, name), sep="\n")
    if args.scores:
        results = judges.attach_scores(results, args.scores)
    summary = run.write_tables(results, args.out)
    if args.json:
        print(json.dumps(summary, indent=1))
        return 0
    print(run.text_table(summary), "", *run.reuse_lines(results), run.overhead_line(results), sep="\n")
    return 0


def run_ablate(args: argparse.Namespace) -> int:
    """One ablation table or all."""
    from ..evaluation import run
    from ..evaluation.studies import ablations
    from .generate import Progress

    _check_docs(args)
    objectives = _objectives(args.objectives) if args.objectives else {}
    deltas = numbers(args.deltas, "--deltas") if args.deltas else None
    prompts, seeds = _prompts(args, "demo", 8), numbers(args.seeds, "--seeds", int)
    pipe, call = _setup(args)
    progress = Progress(0)
    bench = ablations.Bench(
        pipe, args.model, args.backbone, prompts, seeds, run.Setting(args.model, call), Path(args.out),
        _calibrations([args.calibration] if args.calibration else None), progress,
    )  # fmt: skip
    runs = {
        "components": lambda: ablations.components(bench),
        "policy": lambda: ablations.policy(bench),
        "delta": lambda: ablations.delta(bench, deltas),
        "objective": lambda: ablations.objective(bench, objectives),
    }
    wanted = [n for n in ABLATIONS if n != "objective" or objectives] if args.which == "all" else [args.which]
    found = {}
    try:
        for name in wanted:
            found[name] = runs[name]()
    finally:
        progress.close()
    _fill_docs(args)
    if args.json:
        print(json.dumps({n: {"finding": t["finding"], "rows": t["summary"]} for n, t in found.items()}, indent=1))
        return 0
    for name, table in found.items():
        print(f"\n{name}\n{run.text_table(table['summary'])}\n{table['finding']}")
    return 0


def _objectives(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and path for name, _, path in pairs):
        raise HeartError(f"--objectives is {text!r}: write NAME=FILE pairs separated by commas")
    return {name: path for name, _, path in pairs}


def run_study(args: argparse.Namespace) -> int:
    """One study or all, each with the random-weight control where there is one."""
    from ..config import preset
    from ..evaluation import pipelines
    from ..evaluation.studies import runner

    _check_docs(args)
    prompts = _prompts(args, "demo", 2)
    pipe, call = _setup(args, steps=12 if args.model in pipelines.TINY else 25)
    control = _control(args, pipe)
    backbone = preset("xattention", pipe).backbone
    wanted = list(STUDIES) if args.which == "all" else [args.which]
    found = runner.run(wanted, pipe, control, backbone, call, prompts, Path(args.out))
    _fill_docs(args)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    for finding in found.values():
        print(f"\n{finding['study']}\n{finding['finding']}")
    print(f"\nnumbers and figures: {args.out}")
    return 0


def _check_docs(args) -> None:
    """A page that is not there is told before the work, not after it."""
    if args.docs and not Path(args.docs).is_file():
        raise HeartError(f"there is no page {args.docs!r} to fill: give docs/reproduction.md of a checkout")


def _fill_docs(args) -> None:
    """Studies and ablations lie side by side: fill the page with what both folders have."""
    if args.docs:
        from ..evaluation.studies import reproduction

        folder = Path(args.out).parent
        reproduction.fill(args.docs, folder / "study", folder / "ablate")


def _control(args, pipe):
    """The same pipeline with random weights in its transformer."""
    import copy

    import torch

    from ..evaluation import pipelines

    if args.model in pipelines.TINY:
        return pipelines.load("tiny-random")
    control = copy.copy(pipe)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = type(pipe.transformer).from_config(pipe.transformer.config)
    control.register_modules(transformer=fresh.to(pipe.transformer.dtype).to(pipe.transformer.device).eval())
    return control


def run_report(args: argparse.Namespace) -> int:
    """Write the page and say where."""
    from ..evaluation import report

    print(report.build(args.folder, args.out))
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Fetch, check, unpack."""
    from ..evaluation.metrics import lpips

    for path in lpips.fetch(args.file):
        print(path)
    return 0
