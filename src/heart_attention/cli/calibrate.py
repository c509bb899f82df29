"""`heart calibrate`, `heart solve` and `heart show`: per-head thresholds on the command line."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from ..errors import HeartError
from .arguments import add_command, add_device, add_json, add_model, add_size, check_generation, numbers
from .progress import Stages

SUFFIX = ".heart.json"


def register(commands) -> None:
    """Add the commands of this file."""
    _register_calibrate(commands)
    solve = add_command(commands, "solve", "new thresholds from a calibration's tables, without a model", run_solve)
    solve.add_argument("file", metavar=f"F{SUFFIX}", help="the calibration")
    solve.add_argument("--budget", metavar="B", help="shared=τ, sparsity=S, threshold=τ or time=T (default shared=0.9)")
    solve.add_argument(
        "--cost-table", metavar="FILE.json", help="of heart tune-costs, for time=T (default: what ships)"
    )
    solve.add_argument("--weights", metavar="LL,LH,HL,HH", help="other band weights, from the stored band energies")
    solve.add_argument("--solver", choices=("exact", "cbc", "dp"), default="exact", help="cbc: PuLP's, as a check")
    solve.add_argument("--out", metavar=f"F{SUFFIX}", help="write the new calibration")
    solve.add_argument("--json", action="store_true", help="print the result as JSON")

    show = add_command(commands, "show", "what is in a calibration; import and export of thresholds", run_show)
    show.add_argument("file", metavar=f"F{SUFFIX}", nargs="?", help="the calibration (none with --import)")
    show.add_argument("--png", metavar="F.png", help="write the picture of heads and thresholds")
    show.add_argument("--choices", action="store_true", help="print how many heads took which point, as Markdown")
    show.add_argument("--ranks", metavar="N", type=int, help="how evenly N GPUs share the heads, in order and by cost")
    show.add_argument("--colour", choices=("auto", "always", "never"), default="auto", help="of the map of heads")
    show.add_argument("--json", action="store_true", help="print the figures as JSON")
    show.add_argument("--export", choices=("modelopt", "csv", "json"), help="print the thresholds in another format")
    show.add_argument("--config", metavar="config.json", help="with --export modelopt: write into this model config")
    show.add_argument(
        "--import", dest="table", metavar="TABLE", help="read thresholds from CSV, JSON or a config.json instead"
    )
    show.add_argument("--backbone", default="xattention", help="with --import: what the thresholds are for")
    show.add_argument("--model", help="with --import: bind the calibration to this model")
    show.add_argument("--budget", metavar="B", default="shared=0.9", help="with --import of a measured table")
    show.add_argument("--out", metavar=f"F{SUFFIX}", help="write the calibration, or what --export gives")


def _register_calibrate(commands) -> None:
    from ..calibration.workflow.settings import options

    one = add_command(
        commands, "calibrate", "measure a model's heads and give each its threshold", run_calibrate,
        "--method probes is the paper's protocol (rows +ebc and +heart of a comparison), joint is ours (+joint).",
    )  # fmt: skip
    add_model(one)
    one.add_argument("--backbone", default="xattention", help="name of the backbone (default xattention)")
    one.add_argument("--out", required=True, metavar=f"F{SUFFIX}", help="the calibration to write")
    titles = ("method", "generations that are measured", "where it runs")
    groups = {title: one.add_argument_group(title) for title in titles}
    for name, option in options().items():
        flag = "--" + name.replace("_", "-")
        more: dict[str, Any] = {"metavar": option.metavar} if option.metavar else {}
        groups[option.group].add_argument(flag, choices=option.choices, help=option.help, **more)
    what = groups["generations that are measured"]
    what.add_argument("--prompts", metavar="FILE", help="calibration prompts, one a line (default: ten built in)")
    what.add_argument("--held-out", metavar="FILE", help="prompts for verification only (default: six built in)")
    add_size(what)
    what.add_argument("--guidance", type=float, help="guidance scale")
    where = groups["where it runs"]
    where.add_argument("--work", metavar="DIR", help="work folder (default: F.work)")
    where.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on in the work folder")
    where.add_argument("--ray", metavar="auto|ADDRESS", help="spread the work over a Ray cluster")
    where.add_argument("--workers", type=int, help="with --ray: how many workers")
    add_device(where)
    add_json(one)


# ---------------------------------------- calibrate


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, as values."""
    from ..calibration.workflow.settings import options

    given: dict[str, Any] = {}
    for name, option in options().items():
        text = getattr(args, name)
        if text is None:
            continue
        try:
            given[name] = option.parse(text)
        except HeartError:
            raise
        except ValueError:
            raise HeartError(f"--{name.replace('_', '-')} is {text!r}: give a number") from None
        if option.least is not None and given[name] < option.least:
            raise HeartError(f"--{name.replace('_', '-')} is {text}: it must be {option.least:g} or more")
    return given


def run_calibrate(args: argparse.Namespace) -> int:
    """Measure, solve, verify; write the file and say what came out."""
    if not args.out.endswith(SUFFIX):
        raise HeartError(f"--out is {args.out!r}: give a file name that ends in {SUFFIX}")
    if args.workers is not None and (args.workers < 1 or not args.ray):
        raise HeartError("--workers is the number of Ray workers: give 1 or more, together with --ray")
    check_generation(args)
    given = _settings(args)
    from ..calibration import show
    from ..calibration.workflow import calibrate
    from ..evaluation import pipelines

    pipe = pipelines.load(args.model, args.dtype, args.device)
    call = pipelines.call_arguments(args.model, pipe, args.size, args.frames, args.steps)
    if args.guidance is not None:
        call["guidance_scale"] = args.guidance
    work = Path(args.work) if args.work else calibrate.work_folder(Path(args.out))
    progress = Stages()
    try:
        made = calibrate.calibrate(
            pipe,
            args.backbone,
            prompts=pipelines.read_prompts(args.prompts) if args.prompts else None,
            held_out=pipelines.read_prompts(args.held_out) if args.held_out else None,
            call=call,
            out=args.out,
            work=work,
            resume=args.resume,
            progress=progress,
            ray=args.ray,
            loader=functools.partial(pipelines.load, args.model, args.dtype, args.device),
            workers=args.workers,
            **given,
        )
    finally:
        progress.close()
    _print(made, args.json, {"file": args.out, "work": str(work)}, show)
    return 0


def _print(made: Any, as_json: bool, more: dict[str, Any], show: Any, colours: bool | None = None) -> None:
    if as_json:
        print(json.dumps({**more, **show.summary(made)}, indent=1))
        return
    print(show.text(made, sys.stdout.isatty() if colours is None else colours))
    for label, value in more.items():
        print(f"{label:<12}{value}")


# ---------------------------------------- solve


def run_solve(args: argparse.Namespace) -> int:
    """Solve a stored table again."""
    from ..calibration import show
    from ..calibration.file import Calibration
    from ..calibration.workflow.calibrate import out_path

    out = out_path(args.out) if args.out else None
    if not (args.budget or args.weights):
        raise HeartError(
            "there is nothing to change: give --budget shared=τ|sparsity=S|threshold=τ|time=T, or --weights"
        )
    old = Calibration.load(args.file)
    made = old.reweighted(tuple(numbers(args.weights, "--weights"))) if args.weights else old
    made = made.resolve(args.budget or "shared=0.9", args.solver, args.cost_table)
    moved = int((made.choice != old.choice).sum())
    more: dict[str, Any] = {"changed": moved if args.json else f"{moved} of {made.choice.size} heads"}
    if out:
        made.save(out)
        more["file"] = str(out)
    _print(made, args.json, more, show)
    return 0


# ---------------------------------------- show


def run_show(args: argparse.Namespace) -> int:
    """Show a calibration; or import one, or export its thresholds."""
    from ..calibration import show

    if (args.file is None) == (args.table is None):
        raise HeartError(f"give a calibration file to show, or --import TABLE with --out F{SUFFIX}")
    if args.config and args.export != "modelopt":
        raise HeartError("--config goes with --export modelopt")
    made = _import(args) if args.table else _load(args.file)
    if args.png:
        show.picture(made, args.png)
    if args.export:
        return _export(args, made)
    if args.choices:
        from ..calibration import choices

        print(json.dumps(choices.choices(made), indent=1) if args.json else choices.markdown(made), end="")
        return 0
    more: dict[str, Any] = {"picture": args.png} if args.png else {}
    if args.ranks is not None:
        more["balance"] = _balance(made, args.ranks, args.json)
    if args.out:
        from ..calibration.workflow.calibrate import out_path

        made.save(out_path(args.out))
        more["file"] = args.out
    colours = {"always": True, "never": False, "auto": None}[args.colour]
    _print(made, args.json, more, show, colours)
    return 0


def _balance(made: Any, ranks: int, as_json: bool) -> Any:
    """How evenly GPUs share the heads: figures, or a line to read."""
    from ..models import head_assignment

    found = head_assignment.balance(head_assignment.head_costs(made), ranks)
    if as_json:
        return {"ranks": ranks, **found}
    figures = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    return f"{ranks} ranks, dearest over mean: {figures}"


def _load(path: str) -> Any:
    from ..calibration.file import Calibration

    return Calibration.load(path)


def _import(args: argparse.Namespace) -> Any:
    """A table from elsewhere as a calibration, bound to a model if one is named."""
    from dataclasses import replace

    from .. import backbones
    from ..calibration import export, file

    made = export.read_table(args.table, backbones.by_name(args.backbone).to_dict(), args.budget)
    if args.model:
        from ..evaluation import pipelines

        made = replace(made, model=file.fingerprint(pipelines.load(args.model).transformer))
    return made


def _export(args: argparse.Namespace, made: Any) -> int:
    from ..calibration import export
    from ..files import write_atomic

    if args.export == "modelopt" and args.config:
        print(f"{export.write_modelopt(made, args.config)}: {export.KEY} written")
        return 0
    if args.export == "modelopt":
        text = json.dumps({export.KEY: export.modelopt_block(made)}, indent=1) + "\n"
    elif args.export == "csv":
        text = export.to_csv(made)
    else:
        text = export.thresholds_json(made)
    if args.out:
        write_atomic(args.out, text)
    else:
        sys.stdout.write(text)
    return 0
