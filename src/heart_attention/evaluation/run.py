"""Methods × prompts × seeds on one pipeline: generate, time, measure. What `demo`, `compare` and `ablate` share.

Data flows one way: `Method`s and a `Setting` → `run` (one atomic record a generation, so that a killed run goes on)
→ `results.json` → `tables.summarise` → tables and the report. The methods of one (prompt, seed) run in turns, a
denoising step each, so that a busy moment of the machine meets all of them (`timing`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..errors import HeartError
from ..files import read_json, write_json
from . import metrics, results, timing, video
from .methods import DENSE, Method

Progress = Callable[[str, int], Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all methods of a comparison have in common.

    Args:
        model: the model's name, for records and tables.
        call: arguments of the pipeline's call: size, frames, steps, guidance.
        metrics: names of the metrics against dense.
        fps: frames a second of the videos that are written.
        in_turns: methods take turns step by step; None: so on a CPU, where others share the machine.
    """

    model: str
    call: dict[str, Any]
    metrics: tuple[str, ...] = ("psnr", "ssim")
    fps: int = 8
    in_turns: bool | None = None


# ---------------------------------------- one generation


class _Lane:
    """One method's generation among others: its own view of the pipeline, and what is put aside while others run."""

    def __init__(self, pipe: Any, pause: Callable[[], None] | None) -> None:
        from ..models.attachment import attachment_of
        from ..models.inspect import transformers_of

        self.pipe, self.pause = (pipe, None) if pause is None else (_view(pipe), pause)
        self._attachments = lambda: [a for a in map(attachment_of, transformers_of(self.pipe)) if a is not None]
        self.timer = timing.ForwardTimer(_modules(pipe))
        self.seconds, self._began = 0.0, time.perf_counter()

    def step_done(self) -> None:
        """A denoising step is over: the others' turn."""
        self.timer.step += 1
        if self.pause is None:
            return
        self.seconds += time.perf_counter() - self._began
        mine = self._attachments()
        for attachment in mine:
            attachment.pause()
        self.timer.paused = True
        try:
            self.pause()
        finally:
            self.timer.paused = False
            for attachment in mine:
                attachment.resume()
            self._began = time.perf_counter()

    def close(self) -> tuple[list[float], float]:
        """Seconds of the model by step, and of the whole generation without the others' turns."""
        return self.timer.close(), self.seconds + time.perf_counter() - self._began


def _view(pipe: Any) -> Any:
    """The same pipeline with a scheduler of its own, so that several generations can be under way."""
    view = copy.copy(pipe)
    view.scheduler = copy.deepcopy(pipe.scheduler)
    return view


def _modules(pipe: Any) -> list:
    """The denoising models as the pipeline calls them, compiled or not (two for Wan2.2)."""
    from ..models.inspect import named_transformers

    return [getattr(pipe, name) for name in named_transformers(pipe)]


def generate(
    pipe: Any,
    method: Method,
    prompt: str,
    seed: int,
    setting: Setting,
    on_step: Callable[[], Any] | None = None,
    pause: Callable[[], None] | None = None,
) -> tuple[np.ndarray, dict]:
    """One video with one method: frames uint8 [T, H, W, 3] and its row, with the engine's statistics under "stats".

    `pause` is called after every step and returns when it is this generation's turn again.
    """
    import torch

    from .. import api

    lane = _Lane(pipe, pause)

    def step_done(pipe: Any, step: int, timestep: Any, values: dict) -> dict:
        if on_step:
            on_step()
        lane.step_done()
        return values

    generator = torch.Generator("cpu").manual_seed(seed)
    try:
        with api.enabled(lane.pipe, method.config):
            output = lane.pipe(
                prompt, generator=generator, callback_on_step_end=step_done, output_type="np", **setting.call
            )
            stats = api.stats(lane.pipe, wait=True).to_dict()
    finally:
        steps, wall = lane.close()
    return video.to_uint8(output.frames[0]), _row(method, prompt, seed, stats, steps, wall)


def _row(method: Method, prompt: str, seed: int, stats: dict, steps: list[float], wall: float) -> dict:
    return {
        "method": method.name,
        "prompt": prompt,
        "seed": seed,
        "attention_s": stats["time"]["total"],
        "total_s": sum(steps),
        "wall_s": wall,
        "steps_s": [round(s, 6) for s in steps],
        "density": stats["density_with_fallbacks"],
        "dense_share": stats["fallback_share"],
        "refresh_rate": stats["refresh_rate"],
        "cost": stats["cost"],
        "dense_reasons": dict(stats["fallbacks"]),
        "kernel": ", ".join(stats["kernels"]),
        "cost_table": stats["cost_table"],
        "parts_s": stats["time"],
        "stats": stats,
    }


# ---------------------------------------- records


def _identity(method: Method, prompt: str, seed: int, setting: Setting, weights: Any) -> str:
    """What makes a generation the one that is wanted; any change of it is another record. Metrics are added later."""
    parts = [setting.model, weights, setting.call, setting.fps, method.name, method.config.to_dict(), prompt, seed]
    text = json.dumps([*parts, __version__], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(pipe: Any) -> list:
    """What of a pipeline has a say in a video beside the call: its transformers, their precision and device."""
    from ..calibration.file import fingerprint as of
    from ..models.inspect import transformers_of

    return [[of(t), str(getattr(t, "dtype", "")), str(getattr(t, "device", ""))] for t in transformers_of(pipe)]


def _load_record(path: Path) -> dict | None:
    """A finished record with its videos still whole, else None: a damaged one is made anew."""
    try:
        record = read_json(path)
        sizes = record["bytes"]
        whole = all((path.parent.parent / name).stat().st_size == size for name, size in sizes.items())
        return record if whole and len(sizes) >= 2 else None
    except (HeartError, OSError, KeyError, TypeError, AttributeError):
        return None


def _save_record(row: dict, frames: np.ndarray, setting: Setting, out: Path, name: str) -> dict:
    """Write the videos and statistics of a generation, then its record."""
    stats = row.pop("stats")
    row["stats"], row["video"], row["lossless"] = f"stats/{name}.json", f"videos/{name}.mp4", f"videos/{name}.mkv"
    write_json(out / row["stats"], stats)
    video.write_mp4(out / row["video"], frames, setting.fps)
    video.write_lossless(out / row["lossless"], frames, setting.fps)
    row["bytes"] = {row[k]: (out / row[k]).stat().st_size for k in ("video", "lossless")}
    write_json(out / "records" / f"{name}.json", row)
    return row


def _measure(row: dict, reference: str, setting: Setting, out: Path, name: str) -> dict:
    """The record with every metric that is wanted: those that it lacks are computed from the lossless videos."""
    missing = [m for m in setting.metrics if row.get(m) is None]
    if row["method"] == DENSE:
        return {**row, **dict.fromkeys(setting.metrics)}
    if missing:
        row = {**row, **metrics.compare(video.read(out / row["lossless"]), video.read(out / reference), missing)}
        write_json(out / "records" / f"{name}.json", row)
    return row


# ---------------------------------------- all generations


def warm_up(pipe: Any, methods: Sequence[Method], prompt: str, setting: Setting) -> None:
    """Three short steps with every method, so that nothing is built or measured for the first time on the clock."""
    for method in methods:
        if method.config.dense_steps:
            method = dataclasses.replace(method, config=dataclasses.replace(method.config, dense_steps=1))
        short = dataclasses.replace(setting, call={**setting.call, "num_inference_steps": 3})
        with _hushed():
            generate(pipe, method, prompt, 0, short)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """No warnings: what is said of three steps of warming up is not meant for the user."""
    logger = logging.getLogger(__name__.partition(".")[0])
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclasses.dataclass
class _Case:
    """One (prompt, seed): all methods, dense first, and the names of their records."""

    prompt: str
    seed: int
    methods: list[tuple[Method, str]]

    def missing(self, out: Path) -> list[Method]:
        """Methods to generate; dense too whenever there is any, because times are compared with its."""
        lacking = [m for m, name in self.methods if _load_record(out / "records" / f"{name}.json") is None]
        return [m for m, _ in self.methods if m.name == DENSE or m in lacking] if lacking else []


def run(
    pipe: Any,
    methods: Sequence[Method],
    prompts: Sequence[str],
    seeds: Sequence[int],
    setting: Setting,
    out: str | Path,
    progress: Progress | None = None,
    warm: bool = True,
) -> dict:
    """All generations, case by case, dense first; finished ones are taken from `out`."""
    out = Path(out)
    if not methods or methods[0].name != DENSE:
        raise HeartError(
            f"the first method is {methods[0].name if methods else 'missing'!r}: it must be dense, the reference"
        )
    weights = fingerprint(pipe)
    named = [[(m, f"{m.name}-{_identity(m, p, s, setting, weights)}") for m in methods] for p in prompts for s in seeds]
    cases = [_Case(p, s, n) for (p, s), n in zip([(p, s) for p in prompts for s in seeds], named)]
    if warm and any(case.missing(out) for case in cases):
        warm_up(pipe, methods, prompts[0], setting)
    rows, spent, began = [], 0.0, time.perf_counter()
    for case in cases:
        spent += _generate_case(pipe, case, setting, out, progress)
        rows += _finish_case(case, setting, out)
    more: dict[str, Any] = {"model": setting.model, "call": setting.call, "seeds": list(seeds)}
    more["configs"] = {m.name: m.config.to_dict() for m in methods}
    more["in_turns"] = _in_turns(pipe, setting)
    if spent:  # what metrics, videos and bookkeeping cost on top of the generations themselves
        more["overhead"] = round((time.perf_counter() - began) / spent - 1, 4)
    conventions = {n: metrics.CONVENTIONS[n] for n in setting.metrics}
    made = {
        "schema": results.SCHEMA,
        "provenance": results.provenance(pipe, **more),
        "conventions": conventions,
        "rows": rows,
    }
    results.save(made, out)
    return made


def _in_turns(pipe: Any, setting: Setting) -> bool:
    """Whether methods take turns: not on a GPU, which nobody shares, nor with compiled models, which would recompile."""
    if setting.in_turns is not None:
        return setting.in_turns
    modules = _modules(pipe)
    compiled = any(hasattr(m, "_orig_mod") for m in modules)
    return not compiled and next(modules[0].parameters()).device.type == "cpu"


def _generate_case(pipe: Any, case: _Case, setting: Setting, out: Path, progress: Progress | None) -> float:
    """Make what is missing of a case; seconds of the generations."""
    missing = case.missing(out)
    if progress:
        for method, _ in case.methods:
            if method not in missing:
                progress(method.name, int(setting.call.get("num_inference_steps", 1)))
    if not missing:
        return 0.0

    def job(method: Method) -> Callable[[Callable[[], None] | None], tuple[np.ndarray, dict]]:
        on_step = (lambda: progress(method.name, 1)) if progress else None
        return lambda pause: generate(pipe, method, case.prompt, case.seed, setting, on_step, pause)

    before = timing.cpu_wait()
    jobs = [job(m) for m in missing]
    made = timing.in_turns(jobs) if _in_turns(pipe, setting) and len(jobs) > 1 else [j(None) for j in jobs]
    waited = timing.waited_share(before, timing.cpu_wait())
    dense = made[0][1]
    names = {m.name: name for m, name in case.methods}
    for frames, row in made:
        row["reference_s"] = {key: dense[key] for key in ("attention_s", "total_s")}
        row["reference_steps_s"] = dense["steps_s"]
        row["spread"], row["waited"] = timing.spread(dense["steps_s"]), waited
        if _load_record(out / "records" / f"{names[row['method']]}.json") is None:
            _save_record(row, frames, setting, out, names[row["method"]])
    return sum(row["wall_s"] for _, row in made)


def _finish_case(case: _Case, setting: Setting, out: Path) -> list[dict]:
    """The rows of a case with all metrics, and its strip of frames."""
    rows, reference = [], ""
    for method, name in case.methods:
        row = _load_record(out / "records" / f"{name}.json")
        if row is None:
            raise HeartError(f"the record {name} is gone from {out}: run the comparison again")
        reference = row["lossless"] if method.name == DENSE else reference
        rows.append(_measure(row, reference, setting, out, name))
    key = hashlib.sha256("".join(name for _, name in case.methods).encode()).hexdigest()[:16]
    path = out / "strips" / f"{key}.png"
    if not path.is_file():
        video.strip([(row["method"], video.read(out / row["lossless"])) for row in rows], path)
    return [{**row, "strip": f"strips/{key}.png"} for row in rows]
