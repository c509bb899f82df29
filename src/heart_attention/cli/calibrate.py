"""`heart calibrate`, `heart solve` and `heart show`: per-head thresholds on the command line."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from ..errors import HeartError
from .arguments import add_device, add_model, add_size, numbers

SUFFIX = ".heart.json"


def register(commands) -> None:
    """Add the commands of this file."""
    _register_calibrate(commands)
    solve = commands.add_parser("solve", help="new thresholds from a calibration's tables, without a model")
    solve.add_argument("file", metavar=f"F{SUFFIX}")
    solve.add_argument("--budget", metavar="B", help="shared=τ, sparsity=S or threshold=τ (default shared=0.9)")
    solve.add_argument("--weights", metavar="LL,LH,HL,HH", help="other band weights, from the stored band energies")
    solve.add_argument("--solver", choices=("exact", "cbc", "dp"), default="exact", help="cbc: PuLP's, as a check")
    solve.add_argument("--out", metavar=f"F{SUFFIX}", help="write the new calibration")
    solve.add_argument("--json", action="store_true", help="print the result as JSON")
    solve.set_defaults(func=run_solve)

    show = commands.add_parser("show", help="what is in a calibration; import and export of thresholds")
    show.add_argument("file", metavar=f"F{SUFFIX}", nargs="?")
    show.add_argument("--png", metavar="F.png", help="write the picture of heads and thresholds")
    show.add_argument("--ranks", metavar="N", type=int, help="how evenly N GPUs share the heads, in order and by cost")
    show.add_argument("--colour", choices=("auto", "always", "never"), default="auto")
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
    show.set_defaults(func=run_show)


def _register_calibrate(commands) -> None:
    one = commands.add_parser("calibrate", help="measure a model's heads and give each its threshold (EBC)")
    add_model(one)
    one.add_argument("--backbone", default="xattention", choices=("xattention", "svg2"))
    one.add_argument("--out", required=True, metavar=f"F{SUFFIX}")
    one.add_argument("--transformer", choices=("transformer", "transformer_2"), help="of a pipeline with two (Wan2.2)")
    how = one.add_argument_group("method")
    how.add_argument("--method", default="joint", choices=("joint", "isolated", "probes"), help="probes: the paper's")
    how.add_argument("--candidates", metavar="τ,τ,…", help="thresholds to choose from (default: by the method)")
    how.add_argument("--budget", metavar="B", help="shared=τ, sparsity=S or threshold=τ (default shared=0.9)")
    how.add_argument("--strata", choices=("paper", "sparse"), help="steps to draw from (default: by the method)")
    how.add_argument("--velocity", default="guided", choices=("guided", "cond"))
    how.add_argument(
        "--mean", choices=("plain", "relative"),
        help="of errors over contexts: relative to the shared threshold's in each, or plain (default: by the method)",
    )  # fmt: skip
    how.add_argument("--error", default="spectral", help="spectral (default), mse or attention")
    how.add_argument("--contexts", type=int, help="prompt-step pairs for gradients and verification")
    how.add_argument("--rounds", type=int, help="rounds of the joint method")
    how.add_argument("--seed", type=int, default=0)
    what = one.add_argument_group("generations that are measured")
    what.add_argument("--prompts", metavar="FILE", help="calibration prompts, one a line (default: ten built in)")
    what.add_argument("--held-out", metavar="FILE", help="prompts for verification only (default: six built in)")
    add_size(what)
    what.add_argument("--guidance", type=float, help="guidance scale")
    what.add_argument("--dense-steps", type=int, help="first steps that stay dense at inference (default 5)")
    what.add_argument(
        "--order", metavar="raster|tiles|CONFIG.json", help="token order, or a config of heart tune-order"
    )
    where = one.add_argument_group("where it runs")
    where.add_argument("--work", metavar="DIR", help="work folder (default: F.work)")
    where.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="go on in the work folder")
    where.add_argument("--ray", metavar="auto|ADDRESS", help="spread the work over a Ray cluster")
    where.add_argument("--workers", type=int, help="with --ray: how many workers")
    where.add_argument("--kernel", default="auto")
    add_device(where)
    one.add_argument("--json", action="store_true", help="print the result as JSON")
    one.set_defaults(func=run_calibrate)


# ---------------------------------------- calibrate


class Progress:
    """How far each stage is and the time left: a bar on a terminal, a line at every tenth elsewhere."""

    def __init__(self, file: Any = None) -> None:
        self.file = sys.stderr if file is None else file
        self.bar: Any = None
        self.stage, self.tenth = "", -1

    def __call__(self, stage: str, done: int, total: int, left: float | None) -> None:
        rest = "" if left is None or done >= total else f"{clock(left)} left"
        if stage != self.stage:
            self.close()
            self.stage, self.tenth = stage, -1
        if self.file.isatty():
            self._draw(stage, done, total, rest)
        elif (tenth := 10 if done >= total else 10 * done // total) > self.tenth:
            self.tenth = tenth
            print(f"{stage}: {done}/{total}, {10 * tenth}%{rest and ', ' + rest}", file=self.file, flush=True)

    def _draw(self, stage: str, done: int, total: int, rest: str) -> None:
        from tqdm import tqdm

        if self.bar is None or self.bar.total != total:
            self.close()
            self.stage = stage
            form = "{desc:<28} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
            self.bar = tqdm(total=total, desc=stage, initial=done, file=self.file, bar_format=form)
        self.bar.n = done
        self.bar.set_postfix_str(rest, refresh=False)
        self.bar.refresh()

    def close(self) -> None:
        """End the present bar."""
        if self.bar is not None:
            self.bar.close()
        self.bar, self.stage = None, ""


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 4:05."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _out_path(out: str) -> Path:
    if not out.endswith(SUFFIX):
        raise HeartError(f"--out is {out!r}: give a file name that ends in {SUFFIX}")
    return Path(out)


def default_prompts(model: str) -> tuple[list[str], list[str]]:
    """Ten prompts to calibrate on and six held out: the embedded model's own words, else VBench's."""
    from .. import tiny
    from ..evaluation import pipelines

    if model in pipelines.TINY:
        return tiny.prompts("calibration")[:10], tiny.prompts("heldout")[:6]
    from ..calibration.workflow import calibrate

    built_in = pipelines.read_prompts(str(Path(calibrate.__file__).with_name("prompts.txt")))
    return built_in[:10], built_in[10:]


def _settings(args: argparse.Namespace, pipe: Any) -> Any:
    from ..calibration import experts
    from ..calibration.measure import velocity_error
    from ..calibration.solve import solver
    from ..calibration.workflow import calibrate
    from ..config import preset
    from ..evaluation import pipelines

    config = preset(args.backbone, pipe)
    call = pipelines.call_arguments(args.model, pipe, args.size, args.frames, args.steps)
    if args.guidance is not None:
        call["guidance_scale"] = args.guidance
    prompts, held_out = default_prompts(args.model)
    if args.prompts:
        prompts = pipelines.read_prompts(args.prompts)
    if args.held_out:
        held_out = pipelines.read_prompts(args.held_out)
    velocity_error.by_name(args.error)
    budget = solver.Budget.parse(args.budget) if args.budget else solver.Budget()
    limit = {"shared": "shared", "sparsity": "min_sparsity", "threshold": "max_mean_threshold"}[budget.kind]
    given = {
        "candidates": tuple(numbers(args.candidates, "--candidates")) if args.candidates else None,
        "contexts": args.contexts,
        "rounds": args.rounds,
        "strata": args.strata,
    }
    for name in ("contexts", "rounds"):
        if given[name] is not None and given[name] < 1:
            raise HeartError(f"--{name} is {given[name]}: it must be 1 or more")
    held_out = [p for p in held_out if p not in prompts]
    dense = config.dense_steps if args.dense_steps is None else args.dense_steps
    first, last = experts.served(pipe, args.transformer, call["num_inference_steps"])
    room = max(last + 1 - max(first, dense), 1)  # short runs with few prompts have no more contexts
    given["contexts"] = given["contexts"] or min(calibrate.Settings.contexts, room * len(prompts))
    return calibrate.Settings(
        backbone=config.backbone,
        prompts=tuple(prompts),
        held_out=tuple(held_out),
        held_out_contexts=min(calibrate.Settings.held_out_contexts, room * len(held_out)),
        call=call,
        method=args.method,
        velocity=args.velocity,
        mean=args.mean,
        error=args.error,
        seed=args.seed,
        dense_steps=dense,
        order=_order(args.order) or config.order,
        kernel=args.kernel,
        scale_clusters=config.scale_clusters,
        transformer=args.transformer,
        **{limit: budget.value},
        **{k: v for k, v in given.items() if v is not None},
    )


def _order(given: str | None) -> Any:
    """A token order by name, or that of a config."""
    from ..config import HeartConfig

    return HeartConfig.load(given).order if given and given.endswith(".json") else given


def run_calibrate(args: argparse.Namespace) -> int:
    """Measure, solve, verify; write the file and say what came out."""
    out = _out_path(args.out)
    if args.workers is not None and (args.workers < 1 or not args.ray):
        raise HeartError("--workers is the number of Ray workers: give 1 or more, together with --ray")
    if args.seed < 0:
        raise HeartError(f"--seed is {args.seed}: it must be 0 or more")
    from ..calibration import show
    from ..calibration.workflow import calibrate
    from ..evaluation import pipelines

    pipe = pipelines.load(args.model, args.dtype, args.device)
    settings = _settings(args, pipe)
    work = Path(args.work) if args.work else out.with_name(out.name.removesuffix(SUFFIX) + ".work")
    progress = Progress()
    try:
        made = calibrate.calibrate(
            pipe,
            settings,
            work,
            resume=args.resume,
            progress=progress,
            ray=args.ray,
            loader=functools.partial(pipelines.load, args.model, args.dtype, args.device),
            workers=args.workers,
        )
    finally:
        progress.close()
    made.save(out)
    _print(made, args.json, {"file": str(out), "work": str(work)}, show)
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

    out = _out_path(args.out) if args.out else None
    if not (args.budget or args.weights):
        raise HeartError("there is nothing to change: give --budget shared=τ|sparsity=S|threshold=τ, or --weights")
    old = Calibration.load(args.file)
    made = old.reweighted(tuple(numbers(args.weights, "--weights"))) if args.weights else old
    made = made.resolve(args.budget or "shared=0.9", args.solver)
    moved = int((made.thresholds != old.thresholds).sum())
    more: dict[str, Any] = {"changed": moved if args.json else f"{moved} of {made.thresholds.size} heads"}
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
    more: dict[str, Any] = {"picture": args.png} if args.png else {}
    if args.ranks is not None:
        more["balance"] = _balance(made, args.ranks, args.json)
    if args.out:
        made.save(_out_path(args.out))
        more["file"] = args.out
    colours = {"always": True, "never": False, "auto": None}[args.colour]
    _print(made, args.json, more, show, colours)
    return 0


def _balance(made: Any, ranks: int, as_json: bool) -> Any:
    """How evenly GPUs share the heads: figures, or a line to read."""
    from ..models import ulysses

    found = ulysses.balance(ulysses.costs_of(made), ranks)
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
