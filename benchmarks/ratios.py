"""Ratios that a benchmark found, beside those stored for the same kind of machine: a fall of more than a tenth is told.

A benchmark calls `settle` with its ratios. They are compared with `results/BENCHMARK.KIND.json`, where KIND is the
processor's architecture and vector width, or the GPU's name. With `--store` they are written there: ratios that this
run did not measure stay as they are. Versions and the machine's names are in the file, so that a reader can judge it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from heart_attention.evaluation.results import cpu_name

FOLDER = Path(__file__).parent / "results"
TENTH = 0.1
COARSE = 1e-3  # seconds


@dataclass(frozen=True)
class Ratio:
    """One figure.

    Args:
        name: what was measured, with sizes and threads; the same in every run.
        value: the ratio.
        unit: what it is a ratio of, in words.
        higher: whether more is better.
    """

    name: str
    value: float
    unit: str
    higher: bool = True

    def fall(self, stored: float) -> float:
        """By what share this is worse than a stored value; negative if it is better."""
        better, worse = (self.value, stored) if self.higher else (stored, self.value)
        return 1 - better / worse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The option that every benchmark has."""
    parser.add_argument("--store", action="store_true", help="keep this run's ratios for later runs to compare with")


def kind() -> str:
    """The kind of machine: ratios of one kind are comparable."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"kind": kind(), "processor": cpu_name(), "cores": os.cpu_count(), "system": platform.system()}


def versions() -> dict[str, str]:
    """Of everything that the figures depend on."""
    import diffusers

    import heart_attention

    found = {"heart_attention": heart_attention, "torch": torch, "diffusers": diffusers}
    return {"python": platform.python_version(), **{name: module.__version__ for name, module in found.items()}}


def settle(benchmark: str, ratios: list[Ratio], store: bool, folder: Path = FOLDER) -> list[str]:
    """Compare with the stored ratios, print and return the regressions; with `store` keep this run's."""
    path = folder / f"{benchmark}.{kind()}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"versions": {}, "ratios": {}}
    told = _regressions(ratios, kept["ratios"])
    if known := sum(r.name in kept["ratios"] for r in ratios):
        print(f"\n{known} of {len(ratios)} ratios are stored for this kind of machine ({kind()}); {len(told)} fell")
    else:
        print(f"\nno stored ratios for this kind of machine ({kind()}): --store keeps these in {path}")
    print(*told, sep="\n", end="\n" if told else "")
    if store:
        _refuse_coarse_clock(ratios)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_text(benchmark, ratios, kept))
    return told


def _refuse_coarse_clock(ratios: list[Ratio]) -> None:
    """Under a limit of CPU time (`ulimit -t`) the process's clock moves in steps of milliseconds, and short times are 0."""
    before = after = time.process_time()
    while after == before:
        after = time.process_time()
    if after - before > COARSE:
        raise SystemExit(
            f"not stored: the CPU clock moves by {1e3 * (after - before):.1f} ms; run it without ulimit -t"
        )
    if none := [r.name for r in ratios if not (math.isfinite(r.value) and r.value > 0)]:
        raise SystemExit(f"not stored: {none[0]} is not above 0, so its time could not be measured")


def _regressions(ratios: list[Ratio], kept: dict[str, Any]) -> list[str]:
    return [
        f"REGRESSION {r.name}: {r.value:.3f} {r.unit}, stored {kept[r.name]['value']:.3f} ({fall:.0%} worse)"
        for r in ratios
        if r.name in kept and (fall := r.fall(kept[r.name]["value"])) > TENTH
    ]


def _text(benchmark: str, ratios: list[Ratio], kept: dict[str, Any]) -> str:
    """The file, a line for each ratio: it names the day, and `versions` what was installed on that day."""
    day = date.today().isoformat()
    new = {r.name: {"value": round(r.value, 4), "unit": r.unit, "higher": r.higher, "day": day} for r in ratios}
    rows = dict(sorted((kept["ratios"] | new).items()))
    days = {row["day"] for row in rows.values()}
    told = {d: v for d, v in (kept["versions"] | {day: versions()}).items() if d in days}
    dump = partial(json.dumps, ensure_ascii=False)
    lines = ",\n".join(f"  {dump(name)}: {dump(row)}" for name, row in rows.items())
    head = "".join(
        f' "{k}": {dump(v)},\n' for k, v in {"benchmark": benchmark, "machine": machine(), "versions": told}.items()
    )
    return f'{{\n{head} "ratios": {{\n{lines}\n }}\n}}\n'
