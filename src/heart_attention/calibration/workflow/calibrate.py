"""A whole calibration: plan, dense trajectories, measurements, assignment, verification; resumable at any point.

Every piece of work is a pure function of the plan and the model and leaves one record in the work folder, so a
calibration that was killed goes on where it was and ends in the same bytes. The rooms, in the order of the work:
`settings` (what is wanted), `planning` (what is measured), `runner` (doing it), `methods` and `search` (from
measurements to thresholds), and here the whole, with its verification and the file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import HeartError
from ...execution.executor import Executor, LocalExecutor
from ...models import family_of
from .. import experts, file
from ..measure import draws, trajectory
from ..solve.search import Outcome, shared_choice
from ..solve.strategies import BY_NAME
from .plan import Contexts, draw_contexts, plan
from .runner import Progress, Runner
from .settings import Settings
from .store import Store
from .tasks import CalibrationWorker, Task, set_up

__all__ = ["Settings", "calibrate", "measure"]


def calibrate(
    pipe: Any,
    settings: Settings,
    work: Any,
    *,
    resume: bool = True,
    progress: Progress | None = None,
    ray: str | None = None,
    loader: Callable[[], Any] | None = None,
    workers: int | None = None,
) -> Any:
    """Calibrate a pipeline's transformer; returns a `file.Calibration` for the caller to save.

    Args:
        work: the work folder; with `resume` a calibration that was stopped goes on there.
        progress: called with (stage, done, total, seconds left or None).
        ray: "auto" or the address of a Ray cluster to spread the work over; `loader` then makes the pipeline there.
        workers: how many Ray workers; None: as many as the cluster has room for.
    """
    outcome, verification, document = measure(
        pipe, settings, work, resume=resume, progress=progress, ray=ray, loader=loader, workers=workers
    )
    return to_file(settings, outcome, verification, document)


def measure(
    pipe: Any, settings: Settings, work: Any, *, resume: bool = True, progress: Progress | None = None,
    ray: str | None = None, loader: Callable[[], Any] | None = None, workers: int | None = None,
) -> tuple[Outcome, dict[str, Any], dict[str, Any]]:  # fmt: skip
    """All of a calibration but the file: outcome, verification figures, plan."""
    document = plan(pipe, settings)
    store = Store(work, document, resume)
    layers, heads = document["model"]["layers"], document["model"]["heads"]
    with store.held():
        executor = _executor(pipe, settings, ray, loader, workers)
        try:
            runner = Runner(store, executor, progress)
            contexts = draw_contexts(settings, layers, heads, document.get("served"))
            runner.trajectories(settings, contexts)
            outcome = BY_NAME[settings.method](settings, contexts, runner, layers, heads)
            verification = verification_of(settings, contexts, runner, outcome, layers, heads)
        finally:
            executor.close()
    document["grid"] = grid_of(experts.chosen(pipe, settings.transformer), store, contexts)
    return outcome, verification, document


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


def verification_of(
    settings: Settings, contexts: Contexts, runner: Runner, outcome: Outcome, layers: int, heads: int
) -> dict[str, Any]:
    """Joint error and realised sparsity of the shared threshold and of the choice, where calibrated and held out."""
    shared = shared_choice(settings, layers, heads)
    out: dict[str, Any] = {}
    for name, sample in (("calibration", contexts.calibration), ("held_out", contexts.held_out)):
        if sample:
            out[name] = {
                "contexts": [list(c) for c in sample],
                "shared": runner.verify(f"verifying, {name.replace('_', ' ')}", sample, shared),
                "chosen": runner.verify(f"verifying, {name.replace('_', ' ')}", sample, outcome.choice),
            }
    return out


def to_file(settings: Settings, outcome: Outcome, verification: dict[str, Any], document: dict[str, Any]) -> Any:
    taus = np.asarray(settings.taus)
    extra = dict(outcome.extra)
    bands = extra.pop("bands", None)
    call = settings.call
    kept = (
        "shared", "strata", "velocity", "mean", "dense_steps", "order", "scale_clusters", "contexts", "rounds", "gamma",
        "start", "realised", "grid",
    )  # fmt: skip
    one_of_two = {name: document[name] for name in ("transformer", "served") if name in document}
    return file.Calibration(
        thresholds=taus[np.asarray(outcome.choice)],
        backbone=settings.backbone.to_dict(),
        method=settings.method,
        model=document["model"],
        candidates=taus,
        E=outcome.error,
        S=outcome.sparsity,
        bands=bands,
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
        settings={name: document[name] for name in kept}
        | {"generator": draws.GENERATOR, "guidance_scale": call.get("guidance_scale")}
        | one_of_two,
        extra=extra,
    )
