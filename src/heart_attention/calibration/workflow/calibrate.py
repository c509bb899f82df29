"""A whole calibration: plan, dense trajectories, measurements, assignment, verification; resumable at any point.

Every piece of work is a pure function of the plan and the model and leaves one record in the work folder, so a
calibration that was killed goes on where it was and ends in the same bytes. The modules in the order of the work:
`settings` (what is wanted), `plan` (what is measured), `tasks` and `runner` (doing it), `solve.strategies` and
`solve.search` (from measurements to thresholds), and here the whole, with its verification and the file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import kernels
from ...backbones import Backbone
from ...errors import HeartError
from ...execution.executor import Executor, LocalExecutor
from ...models import family_of
from ...models.inspect import transformers_of
from ...online import cost_model
from .. import experts, file
from ..measure import draws, trajectory
from ..solve.case import Case, Outcome
from ..solve.strategies import BY_NAME
from ..solve.times import TimeModel, table_for
from .defaults import settings_for
from .phases import Phases, phases_of
from .plan import Contexts, draw_contexts, plan
from .runner import Progress, Runner
from .settings import Settings
from .store import Store
from .tasks import CalibrationWorker, Task, set_up

__all__ = ["Settings", "calibrate", "measure", "run"]

SUFFIX = ".heart.json"
SENSITIVITY_PROMPTS = 2  # prompts on which phases are weighed


def calibrate(
    pipe: Any,
    backbone: Backbone | str = "xattention",
    *,
    prompts: Sequence[str] | None = None,
    held_out: Sequence[str] | None = None,
    call: dict[str, Any] | None = None,
    out: str | os.PathLike | None = None,
    work: str | os.PathLike | None = None,
    resume: bool = True,
    progress: Progress | None = None,
    ray: str | None = None,
    loader: Callable[[], Any] | None = None,
    workers: int | None = None,
    **settings: Any,
) -> file.Calibration:
    """Measure a pipeline's heads and give each its operating point.

    Args:
        pipe: a diffusers video pipeline.
        backbone: a name (the preset's settings for this model) or a backbone with settings of your own.
        prompts: to calibrate on; None: ten built in. `held_out`: to verify on; None: six built in.
        call: arguments of the pipeline's call (height, width, num_frames, num_inference_steps …); None: the model's own.
        out: file to write, `*.heart.json`.
        work: work folder; None: beside `out`, or a temporary one. With `resume` a stopped calibration goes on there.
        progress: called with (stage, done, total, seconds left or None).
        ray: "auto" or the address of a Ray cluster to spread the work over; `loader` then makes the pipeline there.
        workers: how many Ray workers; None: as many as the cluster can hold.
        settings: fields of `Settings`: method, budget, candidates, contexts, rounds, seed, dense_steps, transformer …
    """
    transformers_of(pipe)  # what is no pipeline is refused
    target = None if out is None else out_path(out)
    chosen = settings_for(pipe, backbone, prompts, held_out, call, settings)
    with _work_folder(work, target) as folder:
        calibration = run(
            pipe, chosen, folder, resume=resume, progress=progress, ray=ray, loader=loader, workers=workers
        )
    if target is not None:
        calibration.save(target)
    return calibration


def out_path(out: str | os.PathLike) -> Path:
    """The file that a calibration is written to; another ending is refused."""
    if not str(out).endswith(SUFFIX):
        raise HeartError(f"out is {str(out)!r}: give a file name that ends in {SUFFIX}")
    return Path(out)


def work_folder(out: Path) -> Path:
    """The work folder that belongs to a calibration's file."""
    return out.with_name(out.name.removesuffix(SUFFIX) + ".work")


@contextlib.contextmanager
def _work_folder(given: str | os.PathLike | None, out: Path | None) -> Iterator[Path]:
    if given is not None or out is not None:
        yield Path(given) if given is not None else work_folder(out)  # type: ignore[arg-type]
        return
    with tempfile.TemporaryDirectory(prefix="heart-calibration-") as folder:
        yield Path(folder)


def run(
    pipe: Any, settings: Settings, work: str | os.PathLike, *, resume: bool = True, progress: Progress | None = None,
    ray: str | None = None, loader: Callable[[], Any] | None = None, workers: int | None = None,
) -> file.Calibration:  # fmt: skip
    """A calibration from complete settings (see `calibrate` for the rest)."""
    return to_file(
        *measure(pipe, settings, work, resume=resume, progress=progress, ray=ray, loader=loader, workers=workers)
    )


def measure(
    pipe: Any, settings: Settings, work: str | os.PathLike, *, resume: bool = True, progress: Progress | None = None,
    ray: str | None = None, loader: Callable[[], Any] | None = None, workers: int | None = None,
) -> tuple[Case, Outcome, dict[str, Any], dict[str, Any]]:  # fmt: skip
    """All of a calibration but the file: case, outcome, verification figures, plan."""
    document = plan(pipe, settings)
    store = Store(work, document, resume)
    layers, heads = document["model"]["layers"], document["model"]["heads"]
    phases = phases_of(settings, pipe.scheduler, document.get("served"))
    with store.held(), _executor(pipe, settings, ray, loader, workers) as executor:
        runner = Runner(store, executor, progress, phases)
        contexts = draw_contexts(settings, layers, heads, document.get("served"))
        runner.trajectories(settings, contexts)
        document["grid"] = grid_of(experts.chosen(pipe, settings.transformer), store, contexts)
        case = case_of(pipe, settings, phases, document)
        case = replace(case, phases=_weighed(case, runner, contexts, document))
        outcome = BY_NAME[settings.method](case, contexts, runner)
        verification = verification_of(case, contexts, runner, outcome)
    return case, outcome, verification, document


def _weighed(case: Case, runner: Runner, contexts: Contexts, document: dict[str, Any]) -> Phases:
    """Phases weighed by what the reference's velocity error in each does to the final latent."""
    phases, settings = case.phases, case.settings
    if phases.count == 1:
        return phases
    levels, first, last = document["noise_levels"], phases.intervals[0][0], phases.intervals[-1][1]
    edges = (levels[first], *phases.sigmas, levels[last])
    tasks = [
        Task("effects", p, text=text, edges=edges, choice=case.shared[0])
        for p, text in enumerate(settings.prompts[:SENSITIVITY_PROMPTS])
    ]
    effects = np.mean([records[0] for records in runner.records("phase weights", tasks)], axis=0)
    rows = runner.verified("verifying, start", contexts.calibration, case.shared)
    errors = case.phase_means(contexts.calibration, [row["error"] for row in rows])
    if not effects.all() or not errors.all():
        raise HeartError(
            f"phases cannot be weighed: in one of them the reference τ {settings.taus[settings.reference]:g} leaves nothing "
            "out; give a lower shared threshold, or one phase"
        )
    return phases.weighed(effects / errors)


def case_of(pipe: Any, settings: Settings, phases: Phases, document: dict[str, Any]) -> Case:
    """What the strategies work on, with the table of costs: files of any budget can be solved again for one of time."""
    model = document["model"]
    device = next(experts.chosen(pipe, settings.transformer).parameters()).device
    kernel = kernels.choose(None, torch.empty(1, 1, 1, model["head_dim"], device=device), settings.kernel)
    kind = cost_model.kind_of(device, kernel.name)
    table = table_for(kind, settings.cost_table)
    first, last = document.get("served") or (0, settings.steps - 1)
    times = TimeModel(
        kind=kind,
        digest=table.digest,
        tokens=int(np.prod(document["grid"] or [1])),
        heads=model["heads"],
        head_dim=model["head_dim"],
        refresh=float(settings.refresh),
        steps=last - first + 1,
        dense_steps=max(0, settings.first_dense_steps - first),
        scale_clusters=settings.scale_clusters,
    )
    return Case(settings, model["layers"], model["heads"], phases, times, table)


def grid_of(transformer: Any, store: Store, contexts: Contexts) -> list[int] | None:
    """Video tokens (frames, rows, columns) of the generations that were measured, from any recorded context."""
    prompt, steps = next(iter(contexts.steps().items()))
    inputs = trajectory.from_bytes(store.trajectories.read(prompt, steps[0])).branches[0].inputs
    grid = family_of(transformer).grid(transformer.config, inputs)
    return None if grid is None else [int(n) for n in grid]


def _executor(
    pipe: Any, settings: Settings, ray: str | None, loader: Callable[[], Any] | None, workers: int | None = None
) -> Executor[Task]:
    if ray is None:
        return LocalExecutor(CalibrationWorker(pipe, settings.job()))
    from ...execution.ray import RayExecutor

    if loader is None:
        raise HeartError("calibrating on Ray needs a loader, which makes the pipeline on each worker")
    return RayExecutor(ray, functools.partial(set_up, loader, settings.job()), workers)


def verification_of(case: Case, contexts: Contexts, runner: Runner, outcome: Outcome) -> dict[str, Any]:
    """Joint error and realised sparsity of the shared point and of the choice, where calibrated and held out."""
    out: dict[str, Any] = {}
    for name, sample in (("calibration", contexts.calibration), ("held_out", contexts.held_out)):
        if sample:
            stage = f"verifying, {name.replace('_', ' ')}"
            out[name] = {
                "contexts": [list(c) for c in sample],
                "shared": runner.verify(stage, sample, case.shared),
                "chosen": runner.verify(stage, sample, outcome.choice),
            }
    return out


def to_file(case: Case, outcome: Outcome, verification: dict[str, Any], document: dict[str, Any]) -> file.Calibration:
    """The calibration that a file holds."""
    settings, extra, call = case.settings, dict(outcome.extra), case.settings.call
    bands = extra.pop("bands", None)
    measured = {"grid": document["grid"], "generator": draws.GENERATOR, "guidance_scale": call.get("guidance_scale")}
    measured |= {"budget": str(settings.budget)}
    if "served" in document:
        measured |= {"transformer": settings.transformer, "served": document["served"]}
    measured |= {"cache": document["cache"]} if "cache" in document else {}
    if case.times is not None:
        extra["time"] = case.times.to_dict()
    order = {} if isinstance(settings.order, str) else {"order": settings.order}  # of every head
    return file.Calibration(
        points=[point.to_dict() | order for point in settings.candidate_points],
        choice=_squeezed(case, np.array(outcome.choice)),
        phases=case.phases.to_dict(),
        method=settings.method,
        model=document["model"],
        E=_squeezed(case, outcome.error),
        S=_squeezed(case, outcome.tables.sparsity),
        cost=_squeezed(case, outcome.tables.cost),
        bands=None if bands is None else _squeezed(case, bands),
        error={"name": settings.error, **settings.error_settings},
        solver=outcome.report,
        verification=verification,
        height=call.get("height"),
        width=call.get("width"),
        frames=call.get("num_frames"),
        steps=settings.steps,
        scheduler=document["scheduler"],
        prompts={"count": len(settings.prompts), "hash": file.prompts_hash(settings.prompts)},
        seed=settings.seed,
        versions=file.versions(),
        settings=settings.saved() | measured,
        extra=extra,
    )


def _squeezed(case: Case, table: np.ndarray) -> np.ndarray:
    """A table [P, …] as a calibration holds it: one phase has no axis of its own."""
    return table[0] if case.phases.count == 1 else table
