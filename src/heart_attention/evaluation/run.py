"""Methods × prompts × seeds: generate, time, measure. What `demo`, `compare` and `ablate` share.

Data flows one way: `Method`s and a `Setting` → `run` (one atomic record a generation, so that a killed run goes on)
→ `results.json` → `tables.summarise` → tables and the report. A (prompt, seed) with all its methods is one task of an
executor (`cases`), in this process or on a cluster.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__, kernels
from ..errors import HeartError
from ..execution.executor import Executor
from ..files import read_json, write_atomic, write_json
from ..online import cost_model
from . import cases, metrics, results, timing, video
from .cases import Case, Progress
from .generation import Setting, device_of, generate, takes_turns
from .methods import DENSE, Method

__all__ = ["Setting", "fingerprint", "generate", "run"]


# ---------------------------------------- records


def _identity(method: Method, prompt: str, seed: int, setting: Setting, weights: Any) -> str:
    """What makes a generation the one that is wanted; any change of it is another record. Metrics are added later."""
    parts = [setting.model, weights, setting.call, setting.fps, method.name, method.config.to_dict(), prompt, seed]
    if setting.compile_blocks:
        parts.append("compiled blocks")
    if method.config.cost_table is not None:  # a file: what it says may change while its name stays
        parts.append(cost_model.load(method.config.cost_table).digest)
    text = json.dumps([*parts, __version__], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(pipe: Any) -> list:
    """What of a pipeline has a say in a video beside the call: class, parts with weights and precision, scheduler, device.

    The kernels too: they differ in the last bits, and with them the table of costs by which calls run dense.
    """
    from ..calibration.file import fingerprint as of
    from ..calibration.fingerprint import adapters
    from ..models.inspect import transformers_of

    transformers = transformers_of(pipe)
    known = [[of(t), adapters(t), str(getattr(t, "dtype", ""))] for t in transformers]
    others = [_part(n, c) for n, c in sorted(pipe.components.items()) if not any(c is t for t in transformers)]
    serving = [name for name, reasons in kernels.available().items() if not reasons]
    return [type(pipe).__name__, known, others, str(device_of(pipe)), serving]


def _part(name: str, part: Any) -> list:
    """What of a text encoder, a decoder or a scheduler has a say in a video."""
    from ..calibration.fingerprint import values_digest

    config = getattr(part, "config", None)
    plain = {k: v for k, v in dict(config).items() if not k.startswith("_")} if isinstance(config, Mapping) else {}
    values = values_digest(part) if hasattr(part, "named_parameters") else None
    return [name, type(part).__name__, values, str(getattr(part, "dtype", "")), plain]


class Folder:
    """A results folder: records of generations with their files, each whole or made anew."""

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out)

    def path(self, name: str) -> Path:
        """The file of a record."""
        return self.out / "records" / f"{name}.json"

    def read(self, name: str) -> dict | None:
        """A finished record with its videos still whole, else None; times that were measured again replace its own."""
        record = _load_record(self.path(name))
        again = None if record is None else dict_or_none(self.times_path(name))
        return record if record is None or again is None or _odd(record | again, self.out) else record | again

    def times_path(self, name: str) -> Path:
        """Where times of a generation that was repeated for them alone are kept."""
        return self.out / "times" / f"{name}.json"

    def put(self, name: str, made: dict[str, Any]) -> None:
        """Write the videos and statistics of a generation, then its record."""
        row = made["row"]
        stats = write_json(self.out / row["stats"], made["stats"])
        for path, data in made["files"].items():
            write_atomic(self.out / path, data)
        write_json(self.path(name), row | {"bytes": row["bytes"] | {row["stats"]: stats.stat().st_size}})

    def measured(self, name: str, row: dict, reference: str, setting: Setting) -> dict:
        """The record with every metric that is wanted: those that it lacks are computed from the lossless videos."""
        missing = [m for m in setting.metrics if row.get(m) is None]
        if row["method"] == DENSE:
            return {**row, **dict.fromkeys(setting.metrics)}
        if missing:
            frames = [video.read(self.out / path) for path in (row["lossless"], reference)]
            row = {**row, **metrics.compare(frames[0], frames[1], missing)}
            write_json(self.path(name), row)
        return row


def _load_record(path: Path) -> dict | None:
    """A record whose fields are what they must be and whose files are whole; anything else counts as absent."""
    try:
        record, folder = dict_or_none(path), path.parent.parent
        if record is None or _odd(record, folder):
            return None
        sizes, videos = record["bytes"], {record["video"], record["lossless"]}
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
        return record if whole and videos <= set(sizes) and record["stats"] else None
    except (OSError, KeyError, TypeError, AttributeError, ValueError):
        return None


def _odd(record: dict, folder: Path) -> bool:
    """Whether a field of a record is missing, of another type, out of range, or a path out of the folder."""
    try:
        results.check_row(record, "the record", folder, metrics.CONVENTIONS)
        return False
    except HeartError:
        return True


def dict_or_none(path: Path) -> dict | None:
    """The object in a JSON file; None if it is not there, damaged or of another kind."""
    try:
        found = read_json(path)
    except HeartError:
        return None
    return found if isinstance(found, dict) else None


# ---------------------------------------- all generations


def run(
    pipe: Any,
    methods: Sequence[Method],
    prompts: Sequence[str],
    seeds: Sequence[int],
    setting: Setting,
    out: str | Path,
    progress: Progress | None = None,
    warm: bool = True,
    executor: Executor[Case] | None = None,
    retime: bool = False,
) -> dict:
    """All generations, case by case, dense first; finished ones are taken from `out`.

    `executor` has cases run elsewhere (`cases.opened`); None: here, on `pipe`. With `retime`, cases whose times cannot be
    trusted are generated again.
    """
    if not methods or methods[0].name != DENSE:
        raise HeartError(
            f"the first method is {methods[0].name if methods else 'missing'!r}: it must be dense, the reference"
        )
    folder, began = Folder(out), time.perf_counter()
    whole = cases_of(pipe, methods, prompts, seeds, setting, warm)
    left = [case for case in (_missing(case, folder, retime) for case in whole) if case.wanted]
    _report_known(whole, left, setting, progress)
    spent = _generate(left, folder, executor or cases.local(pipe, progress), progress if executor else None)
    rows = [row for case in whole for row in _finish(case, folder)]
    more: dict[str, Any] = {"model": setting.model, "call": setting.call, "seeds": list(seeds)}
    more["configs"] = {m.name: m.config.to_dict() for m in methods}
    more["in_turns"], more["fps"] = takes_turns(pipe, setting), setting.fps
    if setting.compile_blocks:
        more["compile_blocks"] = True
    more["devices"] = results.devices(rows)
    if spent and executor is None:  # what metrics, videos and bookkeeping cost on top of the generations themselves
        more["overhead"] = round((time.perf_counter() - began) / spent - 1, 4)
    made = {
        "schema": results.SCHEMA,
        "provenance": results.provenance(pipe, **more),
        "conventions": {n: metrics.CONVENTIONS[n] for n in setting.metrics},
        "rows": rows,
    }
    results.save(made, out)
    return made


def cases_of(
    pipe: Any, methods: Sequence[Method], prompts: Sequence[str], seeds: Sequence[int], setting: Setting, warm: bool
) -> list[Case]:
    """Every (prompt, seed) with all methods and the names of their records."""
    weights, made = fingerprint(pipe), []
    for prompt in prompts:
        for seed in seeds:
            named = tuple((m, f"{m.name}-{_identity(m, prompt, seed, setting, weights)}") for m in methods)
            made.append(Case(prompt, seed, named, frozenset(name for _, name in named), setting, warm))
    return made


def _missing(case: Case, folder: Folder, retime: bool) -> Case:
    """What is left of a case; dense runs along whenever anything is, where times are compared with its."""
    known = {name: folder.read(name) for _, name in case.methods}
    wanted = frozenset(n for n, row in known.items() if row is None or (retime and timing.verdict([row])))
    along = case.setting.timed
    left = tuple((m, name) for m, name in case.methods if name in wanted or (along and m.name == DENSE))
    return dataclasses.replace(case, methods=left, wanted=wanted)


def _report_known(whole: Sequence[Case], left: Sequence[Case], setting: Setting, progress: Progress | None) -> None:
    """Tell progress what need not be generated."""
    to_do = {id_ for case in left for id_ in ((case.prompt, case.seed, m.name) for m, _ in case.methods)}
    for case in whole if progress else ():
        for method, _ in case.methods:
            if progress and (case.prompt, case.seed, method.name) not in to_do:
                progress(method.name, int(setting.call.get("num_inference_steps", 1)))


def _generate(left: Sequence[Case], folder: Folder, executor: Executor[Case], progress: Progress | None) -> float:
    """Have cases made and keep their records; seconds of the generations."""
    spent = 0.0
    for case, (name, made) in executor.do(left, lambda key: b""):
        folder.put(name, made)
        spent += made["row"]["wall_s"]
        if progress:
            progress(made["row"]["method"], int(case.setting.call.get("num_inference_steps", 1)))
    return spent


def _finish(case: Case, folder: Folder) -> list[dict]:
    """The rows of a case with all metrics, and its strip of frames."""
    rows, reference = [], ""
    for method, name in case.methods:
        row = folder.read(name)
        if row is None:
            raise HeartError(f"the record {name} is gone from {folder.out}: run the comparison again")
        reference = row["lossless"] if method.name == DENSE else reference
        rows.append(folder.measured(name, row, reference, case.setting))
    key = hashlib.sha256("".join(name for _, name in case.methods).encode()).hexdigest()[:16]
    path = folder.out / "strips" / f"{key}.png"
    if not path.is_file():
        video.strip([(row["method"], video.read(folder.out / row["lossless"])) for row in rows], path)
    return [{**row, "strip": f"strips/{key}.png"} for row in rows]
