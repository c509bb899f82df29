"""`heart.compare`: methods side by side on one pipeline, with tables and videos in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import HeartError
from . import cases, metrics, pipelines, tables
from . import methods as names_of_methods
from .cases import Cluster
from .run import Setting, run


def compare(
    pipe: Any,
    methods: Sequence[str] = names_of_methods.DEFAULT,
    prompts: Sequence[str] | None = None,
    out: str | Path = "runs/compare",
    *,
    seeds: Sequence[int] = (0,),
    call: dict[str, Any] | None = None,
    metrics: Sequence[str] | None = None,
    calibrations: Sequence[str] = (),
    force_sparse: bool = False,
    model: str | None = None,
    fps: int | None = None,
    in_turns: bool | None = None,
    compile_blocks: bool = False,
    progress: Callable[[str, int], Any] | None = None,
    cluster: Cluster | None = None,
    retime: bool = False,
) -> dict[str, Any]:
    """Run methods on prompts and seeds, measure them against dense attention, and write results and tables.

    Args:
        pipe: a diffusers video pipeline.
        methods: names such as "xattention", "xattention+heart", "svg2+joint"; dense, the reference, is always the first.
        prompts: texts; None: the embedded model's own, where `pipe` is that.
        out: folder of records, videos, `results.json` and tables; a second call with it makes only what is missing.
        seeds: of the starting noise; every prompt runs with each.
        call: arguments of the pipeline's call (height, num_inference_steps, …); None: the model's native ones.
        metrics: names of metrics against dense; None: PSNR, SSIM, and LPIPS where its weights are at hand.
        calibrations: files for the methods with +ebc, +heart or +joint; the embedded model brings its own.
        force_sparse: every method runs sparse even where dense would be quicker.
        model: name to record; None: what the pipeline was loaded from.
        fps: frames a second of the videos; None: the model's own.
        in_turns: methods take turns step by step, so that a busy moment meets all; None: so on a CPU.
        compile_blocks: the transformer's repeated blocks are compiled around attention, for dense too.
        progress: called as `progress(method, steps)` while generations go on.
        cluster: Ray cluster that (prompt, seed) pairs are spread over, `cases.Cluster("auto", loader)`; None: here.
        retime: what was timed on a busy machine is generated again.

    Returns:
        What `results.json` holds: schema, provenance, conventions of the metrics, one row a generation.
    """
    plan = planned(
        pipe, methods, prompts, call=call, metrics=metrics, calibrations=calibrations, force_sparse=force_sparse,
        model=model, fps=fps, in_turns=in_turns, compile_blocks=compile_blocks,
    )  # fmt: skip
    seeds = list(dict.fromkeys(seeds))
    with cases.opened(cluster) as executor:
        made = run(
            pipe, plan.methods, plan.prompts, seeds, plan.setting, out, progress, executor=executor, retime=retime
        )
    tables.write_tables(made, out)
    return made


class Plan(NamedTuple):
    """What is compared: methods with dense first, prompts, and what all generations have in common."""

    methods: list[names_of_methods.Method]
    prompts: list[str]
    setting: Setting


def planned(
    pipe: Any,
    methods: Sequence[str],
    prompts: Sequence[str] | None = None,
    *,
    call: dict[str, Any] | None = None,
    metrics: Sequence[str] | None = None,
    calibrations: Sequence[str] = (),
    force_sparse: bool = False,
    model: str | None = None,
    fps: int | None = None,
    in_turns: bool | None = None,
    compile_blocks: bool = False,
) -> Plan:
    """The plan of a comparison from what `compare` is given."""
    model = model or pipelines.name_of(pipe)
    sorted_ = names_of_methods.sort_calibrations(calibrations)
    wanted = list(dict.fromkeys([names_of_methods.DENSE, *methods]))
    names_of_methods.check(wanted, sorted_, model)
    chosen = build_methods(wanted, pipe, model, sorted_, force_sparse)
    setting = Setting(
        model,
        dict(call) if call is not None else pipelines.call_arguments(model, pipe),
        check_metrics(metrics),
        fps or pipelines.frame_rate(pipe),
        in_turns,
        compile_blocks,
    )
    return Plan(chosen, _prompts(prompts, model), setting)


def build_methods(
    wanted: Sequence[str],
    pipe: Any,
    model: str,
    calibrations: names_of_methods.Calibrations,
    force_sparse: bool = False,
) -> list[names_of_methods.Method]:
    """The methods of these names; `force_sparse` for all of them or for none."""
    changes = {"force_sparse": True} if force_sparse else {}
    return [
        names_of_methods.build(n, pipe, model, calibrations, **({} if n == names_of_methods.DENSE else changes))
        for n in wanted
    ]


def check_metrics(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Full names of the metrics; None: the default ones."""
    return metrics.defaults() if wanted is None else metrics.check(wanted)


def _prompts(prompts: Sequence[str] | None, model: str) -> list[str]:
    if prompts:
        return list(dict.fromkeys(prompts))  # one that counted twice would make intervals look narrower than they are
    if model not in pipelines.TINY:
        raise HeartError(f"no prompts for model {model!r}: give some, as a list of texts")
    from .. import tiny

    return tiny.prompts("demo")[:8]
