"""Results folders: `results.json` with where its figures come from, checked by type and range when it is read back."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import HeartError, named
from ..files import read_json, write_json

SCHEMA = "heart-results/1"
FILE = "results.json"
LONGEST = 100_000  # characters of a prompt or path
LARGEST = 1e9  # no figure of a row comes near it
# Of a row: what must be there to be shown, and of what kind; None where a figure does not exist (density of dense).
_NEEDED = {
    "method": str,
    "prompt": str,
    "seed": int,
    "attention_s": float,
    "total_s": float,
    "density": float,
    "refresh_rate": float,
}
_OPTIONAL = {
    "wall_s": float,
    "timed": bool,
    "dense_share": float,
    "cost": float,
    "spread": float,
    "waited": float,
    "kernel": str,
    "device": str,
    "place": str,
    "video": str,
    "lossless": str,
    "stats": str,
    "strip": str,
    "parts_s": dict,
    "reference_s": dict,
    "dense_reasons": dict,
    "steps_s": list,
    "reference_steps_s": list,
    "vbench_dimensions": dict,
}
_MAY_BE_NONE = ("density", "refresh_rate", "dense_share", "cost", "spread", "waited", "strip")
FIGURES = ("vbench", "visionreward", "psnr", "ssim")  # that tables and the page know without a convention
_FILES = ("video", "lossless", "stats", "strip")  # paths below the folder


def provenance(pipe: Any = None, **more: Any) -> dict[str, Any]:
    """Machine, versions and whatever else says where a figure comes from."""
    import diffusers
    import torch

    facts = {
        "heart": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "machine": f"{platform.machine()} {cpu_name()}".strip(),
        "threads": torch.get_num_threads(),
        "device": str(getattr(pipe, "_execution_device", "cpu")),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return {**facts, **more}


def cpu_name() -> str:
    """What the processor calls itself; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def devices(rows: list[dict]) -> dict[str, int]:
    """How many devices of which kind made these rows; what older versions made does not say."""
    kinds = {(row["device"], row["place"]) for row in rows if row.get("device") and row.get("place")}
    return {kind: sum(k == kind for k, _ in kinds) for kind in sorted({k for k, _ in kinds})}


def save(results: dict, folder: str | Path) -> Path:
    """Write a results folder's file."""
    return write_json(Path(folder) / FILE, results)


def load(folder: str | Path) -> dict:
    """Read and check a results folder: schema, every row's fields by type and range, paths that stay inside it."""
    path = Path(folder) / FILE
    results, where = read_json(path), named(path)
    if not isinstance(results, dict) or results.get("schema") != SCHEMA or not isinstance(results.get("rows"), list):
        raise HeartError(f"{where} is not of schema {SCHEMA!r}: make it again with `heart compare`")
    whole = all(isinstance(row, dict) and row.keys() >= _NEEDED.keys() for row in results["rows"])
    if not whole or not results["rows"] or not isinstance(results.get("provenance"), dict):
        raise HeartError(f"{where} has no rows or incomplete ones: make it again with `heart compare`")
    _check_conventions(results, where)
    for i, row in enumerate(results["rows"]):
        check_row(row, f"{where}, row {i}", Path(folder), results["conventions"])
    return results


def _check_conventions(results: dict, where: str) -> None:
    texts = results.setdefault("conventions", {})
    if not isinstance(texts, dict) or not all(isinstance(v, str) for v in texts.values()):
        raise HeartError(f"{where}: the conventions are not texts by metric: make it again with `heart compare`")


def check_row(row: Any, where: str, folder: Path, conventions: Iterable[str]) -> None:
    """Raise unless a row's fields are all there, of their types and in their ranges, and its files inside the folder."""
    if not isinstance(row, dict) or not row.keys() >= _NEEDED.keys():
        raise HeartError(f"{where} is incomplete: make it again with `heart compare`")
    metrics = (*FIGURES, *conventions)
    kinds = {**_NEEDED, **_OPTIONAL, **dict.fromkeys(metrics, float)}
    for name, value in row.items():
        empty = value is None and name in (*_MAY_BE_NONE, *metrics)
        if name in kinds and not empty and not _is(value, kinds[name]):
            raise HeartError(f"{where}: {name} is {_short(value)}: make it again with `heart compare`")
    for name in ("attention_s", "total_s", "wall_s"):
        if row.get(name, 0.0) < 0:
            raise HeartError(f"{where}: {name} is {row[name]}, below 0: make it again with `heart compare`")
    for name in _FILES:
        if row.get(name) is not None and not inside(folder, row[name]):
            raise HeartError(f"{where}: {name} is {_short(row[name])}, outside the folder: it is not used")


def inside(folder: Path, name: str) -> bool:
    """Whether a file named in a results folder lies in it, symbolic links followed; one that cannot be lies nowhere."""
    try:
        path = (folder / name).resolve()
        path.is_file()  # raises where a name is longer than any file's
        return "\0" not in name and path.is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):
        return False


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number that a figure can be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST  # NaN is not


def _is(value: Any, kind: type) -> bool:
    """Whether a JSON value is of the kind a field has: numbers finite, containers of such numbers or texts."""
    if kind is float:
        return is_number(value)
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 1 << 64
    if kind is dict:
        return isinstance(value, dict) and all(v is None or _is(v, float) for v in value.values())
    if kind is list:
        return isinstance(value, list) and all(_is(v, float) for v in value)
    return isinstance(value, str) and kind is str and len(value) <= LONGEST


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
