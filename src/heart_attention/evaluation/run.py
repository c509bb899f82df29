"""Methods × prompts × seeds on one pipeline: generate, time, measure. What `demo`, `compare` and `ablate` share.

Data flows one way: `Method`s and a `Setting` → `run` (one atomic record a generation, so that a killed run goes on)
→ `results.json` → `summarise` → tables and the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..errors import HeartError
from ..files import read_json, write_atomic, write_json
from . import metrics, video

SCHEMA = "heart-results/1"


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of a table: a name and the HeartConfig that makes it (dense attention is thresholds of 1)."""

    name: str
    config: Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all methods of a comparison have in common."""

    model: str
    call: dict[str, Any]  # arguments of the pipeline's call: size, frames, steps, guidance
    metrics: tuple[str, ...] = ("psnr", "ssim")
    fps: int = 8


class ForwardTimer:
    """Wall time spent inside the denoising model's forwards (the paper's end-to-end latency)."""

    def __init__(self, transformers: Iterable) -> None:
        self.seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._handles = []
        for module in transformers:
            self._handles.append(module.register_forward_pre_hook(self._start))
            self._handles.append(module.register_forward_hook(self._stop, always_call=True))

    def _start(self, module, args) -> None:
        import torch

        if torch.cuda.is_available():  # events, so that timing adds no synchronisation
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
            self._events.append((begin, None))
        self._began = time.perf_counter()

    def _stop(self, module, args, output) -> None:
        import torch

        if torch.cuda.is_available():
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._events[-1] = (self._events[-1][0], end)
        else:
            self.seconds += time.perf_counter() - self._began

    def close(self) -> float:
        """Remove the hooks; total seconds."""
        for handle in self._handles:
            handle.remove()
        if self._events:
            import torch

            torch.cuda.synchronize()
            self.seconds = sum(a.elapsed_time(b) for a, b in self._events if b is not None) / 1000
        return self.seconds


def provenance(pipe=None, **more: Any) -> dict[str, Any]:
    """Machine, versions and whatever else says where a figure comes from."""
    import diffusers
    import torch

    found = {
        "heart": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "machine": f"{platform.machine()} {_cpu_name()}".strip(),
        "threads": torch.get_num_threads(),
        "device": str(getattr(pipe, "_execution_device", "cpu")),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return {**found, **more}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def generate(pipe, method: Method, prompt: str, seed: int, setting: Setting, on_step=None) -> tuple[np.ndarray, dict]:
    """One video with one method: frames uint8 [T, H, W, 3] and its row, with the engine's statistics under "stats"."""
    import torch

    from .. import api
    from ..models.inspect import transformers_of

    def tick(pipe, step, timestep, values):
        if on_step:
            on_step()
        return values

    generator = torch.Generator("cpu").manual_seed(seed)
    with api.enabled(pipe, method.config):
        timer, began = ForwardTimer(transformers_of(pipe)), time.perf_counter()
        try:
            output = pipe(prompt, generator=generator, callback_on_step_end=tick, output_type="np", **setting.call)
        finally:
            seconds, wall = timer.close(), time.perf_counter() - began
        stats = api.stats(pipe).to_dict()
    row = {
        "method": method.name,
        "prompt": prompt,
        "seed": seed,
        "attention_s": stats["time"]["total"],
        "total_s": seconds,
        "wall_s": wall,
        "density": stats["density"],
        "refresh_rate": stats["refresh_rate"],
        "parts_s": stats["time"],
        "stats": stats,
    }
    return video.to_uint8(output.frames[0]), row


def _identity(method: Method, prompt: str, seed: int, setting: Setting) -> str:
    """What makes a record the one that is wanted; any change of it is another record."""
    parts = [setting.model, setting.call, method.name, method.config.to_dict(), prompt, seed, __version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _load_record(path: Path) -> dict | None:
    """A finished record with its videos still there, else None."""
    if not path.is_file():
        return None
    record = read_json(path)
    folder = path.parent.parent
    kept = isinstance(record, dict) and all((folder / record.get(k, "?")).is_file() for k in ("video", "lossless"))
    return record if kept else None


def _make_record(pipe, method, prompt, seed, setting, out: Path, name: str, reference, on_step) -> dict:
    frames, row = generate(pipe, method, prompt, seed, setting, on_step)
    stats = row.pop("stats")
    row["stats"] = f"stats/{name}.json"
    row["video"], row["lossless"] = f"videos/{name}.mp4", f"videos/{name}.mkv"
    write_json(out / row["stats"], stats)
    video.write_mp4(out / row["video"], frames, setting.fps)
    video.write_lossless(out / row["lossless"], frames, setting.fps)
    row.update(dict.fromkeys(setting.metrics))
    if reference is not None:
        row.update(metrics.compare(frames, reference, setting.metrics))
    write_json(out / "records" / f"{name}.json", row)
    return row


def warm_up(pipe, methods: Sequence[Method], prompt: str, setting: Setting) -> None:
    """Two short steps with every method, so that nothing is built or measured for the first time on the clock."""
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


def run(
    pipe,
    methods: Sequence[Method],
    prompts: Sequence[str],
    seeds: Sequence[int],
    setting: Setting,
    out: str | Path,
    progress: Callable[[str, int], Any] | None = None,
    warm: bool = True,
) -> dict:
    """All generations, dense first and interleaved by prompt; finished ones are taken from `out`."""
    out = Path(out)
    if not methods or methods[0].name != "dense":
        raise HeartError(
            f"the first method is {methods[0].name if methods else 'missing'!r}: it must be dense, the reference"
        )
    wanted = [(p, s, m, f"{m.name}-{_identity(m, p, s, setting)}") for p in prompts for s in seeds for m in methods]
    missing = [w for w in wanted if _load_record(out / "records" / f"{w[3]}.json") is None]
    if missing and warm:
        warm_up(pipe, methods, prompts[0], setting)
    rows, reference, made, began = [], None, 0.0, time.perf_counter()
    for prompt, seed, method, name in wanted:
        row = _load_record(out / "records" / f"{name}.json")
        if row is None:
            advance = (lambda name=method.name: progress(name, 1)) if progress else None
            against = None if method.name == "dense" else reference
            row = _make_record(pipe, method, prompt, seed, setting, out, name, against, advance)
            made += row["wall_s"]
        elif progress:
            progress(method.name, int(setting.call.get("num_inference_steps", 1)))
        if method.name == "dense":  # first of its (prompt, seed): what the others are compared with
            reference = video.read(out / row["lossless"])
        rows.append(row)
    configs = {m.name: m.config.to_dict() for m in methods}
    more = {"model": setting.model, "call": setting.call, "seeds": list(seeds), "configs": configs}
    if made:  # what metrics, videos and bookkeeping cost on top of the generations themselves
        more["overhead"] = round((time.perf_counter() - began) / made - 1, 4)
    conventions = {n: metrics.CONVENTIONS[n] for n in setting.metrics}
    results = {"schema": SCHEMA, "provenance": provenance(pipe, **more), "conventions": conventions, "rows": rows}
    write_json(out / "results.json", results)
    return results


# ------------------------------------------------------------------------------------------------- tables


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % confidence interval (Student's t); half-width 0 for a single value."""
    from scipy import stats

    array = np.asarray([v for v in values if v is not None and math.isfinite(v)], float)
    if array.size == 0:
        return math.nan, 0.0
    if array.size == 1:
        return float(array[0]), 0.0
    return float(array.mean()), float(stats.t.ppf(0.975, array.size - 1) * array.std(ddof=1) / math.sqrt(array.size))


def speedup(rows: Sequence[dict], base: Sequence[dict], key: str) -> tuple[float, float, float]:
    """Geometric mean of base/row over equal (prompt, seed), with the ends of its 95 % interval."""
    by_case = {(r["prompt"], r["seed"]): r[key] for r in base}
    logs = [
        math.log(by_case[r["prompt"], r["seed"]] / r[key])
        for r in rows
        if r[key] and (r["prompt"], r["seed"]) in by_case
    ]
    middle, half = interval(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def difference(results: dict, one: str, other: str, key: str = "psnr") -> tuple[float, float]:
    """Mean of one method's figure minus another's over equal (prompt, seed), and half of its 95 % interval.

    Prompts differ far more than methods do: the difference prompt by prompt is the one that tells methods apart.
    """
    of = {
        name: {(r["prompt"], r["seed"]): r.get(key) for r in results["rows"] if r["method"] == name}
        for name in (one, other)
    }
    pairs = [(value, of[other].get(case)) for case, value in of[one].items()]
    return interval([a - b for a, b in pairs if a is not None and b is not None])


def summarise(results: dict) -> list[dict[str, Any]]:
    """One row a method: means over prompts and seeds, speed-ups over dense with confidence intervals."""
    rows = results["rows"]
    names = list(dict.fromkeys(r["method"] for r in rows))
    dense = [r for r in rows if r["method"] == "dense"]
    table = []
    for name in names:
        mine = [r for r in rows if r["method"] == name]
        entry: dict[str, Any] = {"method": name, "n": len(mine)}
        for key in ("vbench", "visionreward", *results.get("conventions", {})):
            values = [r.get(key) for r in mine]
            if any(v is not None for v in values):
                entry[key], entry[f"{key}_ci"] = interval([v for v in values if v is not None])
        for key in ("attention_s", "total_s"):
            entry[key] = interval([r[key] for r in mine])[0]
            name_of = key.replace("_s", "_speedup")
            entry[name_of], *entry[f"{name_of}_ci"] = speedup(mine, dense, key)
        for key in ("density", "refresh_rate"):
            entry[key] = interval([r[key] for r in mine if r[key] is not None])[0] if name != "dense" else None
        parts = [r["parts_s"] for r in mine if r.get("parts_s")]
        entry["parts_s"] = {k: float(np.mean([p.get(k) or 0.0 for p in parts])) for k in parts[0]} if parts else {}
        table.append(entry)
    return table


COLUMNS = [  # key, heading, format
    ("vbench", "VBench", "{:.2%}"),
    ("visionreward", "VReward", "{:.4f}"),
    ("psnr", "PSNR dB", "{:.2f}"),
    ("psnr_pooled", "PSNR pooled", "{:.2f}"),
    ("ssim", "SSIM", "{:.4f}"),
    ("ssim_box", "SSIM box", "{:.4f}"),
    ("lpips_alex", "LPIPS alex", "{:.4f}"),
    ("lpips_vgg", "LPIPS vgg", "{:.4f}"),
    ("lpips_vgg01", "LPIPS vgg01", "{:.4f}"),
    ("vmaf", "VMAF", "{:.1f}"),
    ("density", "density", "{:.3f}"),
    ("refresh_rate", "refreshed", "{:.0%}"),
    ("attention_s", "attention s", "{:.2f}"),
    ("attention_speedup", "speed-up", "{:.2f}×"),
    ("total_s", "end to end s", "{:.2f}"),
    ("total_speedup", "speed-up", "{:.2f}×"),
]


def cells(summary: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Headings and text cells of a summary; columns that no method fills are left out."""
    used = [c for c in COLUMNS if any(_number(e.get(c[0])) for e in summary)]
    body = [[e["method"], *(f.format(e[k]) if _number(e.get(k)) else "–" for k, _, f in used)] for e in summary]
    return ["method", *(c[1] for c in used)], body


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def markdown(summary: Sequence[dict], results: dict | None = None) -> str:
    """The table as Markdown, with the conventions of its metrics underneath."""
    head, body = cells(summary)
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    for name, text in (results or {}).get("conventions", {}).items():
        lines.append(f"\n{name}: {text}.")
    return "\n".join(lines) + "\n"


def text_table(summary: Sequence[dict]) -> str:
    """The table for a terminal, columns aligned."""
    head, body = cells(summary)
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))
        for row in [head, *body]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def reuse_lines(results: dict) -> list[str]:
    """For each backbone that also ran with mask reuse: what that took off, one line each."""
    rows, lines = {e["method"]: e for e in summarise(results)}, []
    for name, entry in rows.items():
        backbone, _, part = name.partition("+")
        if part not in ("tmr", "heart") or backbone not in rows:
            continue
        base = rows[backbone]
        before, after = (sum(e["parts_s"].get(k, 0.0) for k in ("prediction", "planning")) for e in (base, entry))
        if not before or not entry.get("attention_s"):
            continue
        gain, half = difference(results, name, backbone)
        lines.append(
            f"{name} against {backbone}: prediction and planning {after / before - 1:+.0%}, attention "
            f"{base['attention_s'] / entry['attention_s']:.2f}×, PSNR {gain:+.2f}{f' ± {half:.2f}' if half else ''} dB"
        )
    return lines


def overhead_line(results: dict) -> str:
    """What a comparison cost on top of its generations, in one line."""
    share = results["provenance"].get("overhead")
    if share is None:
        return "nothing was generated: every record was there already"
    return f"overhead {share:.1%} of the generations (videos, metrics, records)"


def write_tables(results: dict, out: str | Path) -> list[dict]:
    """`table.md`, `table.csv` and `table.json` beside the results; returns the summary."""
    import csv
    import io

    summary = summarise(results)
    write_atomic(Path(out) / "table.md", markdown(summary, results))
    write_json(Path(out) / "table.json", [{k: _finite(v) for k, v in e.items()} for e in summary])
    buffer = io.StringIO()
    head, body = cells(summary)
    csv.writer(buffer).writerows([head, *body])
    write_atomic(Path(out) / "table.csv", buffer.getvalue())
    return summary


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_NEEDED = {"method", "prompt", "seed", "attention_s", "total_s", "density", "refresh_rate"}  # of a row, to be shown


def load_results(folder: str | Path) -> dict:
    """Read and check a results folder."""
    results = read_json(Path(folder) / "results.json")
    if not isinstance(results, dict) or results.get("schema") != SCHEMA or not isinstance(results.get("rows"), list):
        raise HeartError(f"{folder}/results.json is not of schema {SCHEMA!r}: make it again with `heart compare`")
    whole = all(isinstance(row, dict) and row.keys() >= _NEEDED for row in results["rows"])
    if not whole or not results["rows"] or not isinstance(results.get("provenance"), dict):
        raise HeartError(f"{folder}/results.json has no rows or incomplete ones: make it again with `heart compare`")
    return results
