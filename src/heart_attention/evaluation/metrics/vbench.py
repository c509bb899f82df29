"""VBench: its prompt suite, the videos' names it expects, the commands it accepts, and its results read back.

VBench needs an environment of its own (`pip install vbench` there). Its command takes one dimension at a time. On its own
suite it looks for `<prompt>-<0…4>` with the ending of whichever file it sees first, so videos lie in a folder of their own, and
judges each dimension on that dimension's prompts; on others it judges every video and reads the prompts from a file.
"""

from __future__ import annotations

import functools
import json
import shlex
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from ...errors import HeartError, named, shown
from ...files import cache_dir, locked, read_json, write_atomic
from ..results import is_number
from .package import Package, checked, download

WHEEL = Package("vbench", "0.1.5", "13266ed4715d91a7669ab58484b9e010bc91bb96e129d414fb512d4937890023")
INSTEAD = "fetch the wheel elsewhere and run `heart fetch-weights vbench --file WHEEL`"
SUITE = ("vbench/VBench_full_info.json", "5dd2de80ee43cda750b2b72ea7023657c0b90d3702041c7e4608c65dbe50dccd")
# The paper's six dimensions: (lowest, highest, weight, kind), by VBench's published constants.
DIMENSIONS = {
    "subject_consistency": (0.1462, 1.0, 1.0, "quality"),
    "motion_smoothness": (0.706, 0.9975, 1.0, "quality"),
    "dynamic_degree": (0.0, 1.0, 0.5, "quality"),
    "aesthetic_quality": (0.0, 1.0, 1.0, "quality"),
    "imaging_quality": (0.0, 1.0, 1.0, "quality"),
    "overall_consistency": (0.0, 0.364, 1.0, "semantic"),
}
KIND_WEIGHT = {"quality": 4.0, "semantic": 1.0}


# ---------------------------------------- the prompt suite


def prompts(dimension: str | None = None) -> list[str]:
    """VBench's prompts in its order, or those of one dimension; fetched once, checked by hash."""
    entries = _suite()
    known = sorted({d for e in entries for d in e["dimension"]})
    if dimension is not None and dimension not in known:
        raise HeartError(f"VBench has no dimension {dimension!r}: choose from {', '.join(known)}")
    found = [e["prompt_en"] for e in entries if dimension is None or dimension in e["dimension"]]
    return list(dict.fromkeys(found))


@functools.cache
def _suite() -> list[dict[str, Any]]:
    path = cache_dir() / "vbench-prompts.json"
    if not path.is_file():
        fetch()
    return json.loads(checked(path.read_bytes(), SUITE[1], str(path)))


def fetch(wheel: str | Path | None = None) -> Path:
    """Put VBench's prompt list into the cache, from the package index or from a wheel already at hand."""
    with tempfile.TemporaryDirectory() as folder, locked(cache_dir() / "vbench.lock"):
        path = Path(wheel) if wheel else download(WHEEL, Path(folder), INSTEAD)
        if not path.is_file():
            raise HeartError(f"there is no archive {str(path)!r}: check the path")
        checked(path.read_bytes(), WHEEL.digest, str(path))
        with zipfile.ZipFile(path) as archive:
            return write_atomic(cache_dir() / "vbench-prompts.json", archive.read(SUITE[0]))


def in_suite(texts: list[str]) -> bool:
    """Whether these are prompts of VBench's suite, as far as it is at hand; nothing is fetched for the question."""
    path = cache_dir() / "vbench-prompts.json"
    return path.is_file() and set(texts) <= {e["prompt_en"] for e in _suite()}


# ---------------------------------------- commands


def commands(folder: str | Path, standard: bool) -> list[list[str]]:
    """What to run in VBench's environment to judge one method's folder, as argument lists; one a dimension."""
    folder = Path(folder)
    mode = ["--mode", "vbench_standard"] if standard else ["--mode", "custom_input"]
    mode += [] if standard else ["--prompt_file", str(folder / "prompts.json")]
    return [
        ["vbench", "evaluate", "--videos_path", str(folder / "videos"), "--dimension", name, *mode,
         "--output_path", str(folder / "vbench" / name)]
        for name in DIMENSIONS
    ]  # fmt: skip


def shell_line(folder: str | Path, standard: bool) -> str:
    """The same as one line to type."""
    first = next(iter(DIMENSIONS))
    words = [w.removesuffix(first) for w in commands(folder, standard)[0]]  # what ends in the dimension gets it from $d
    typed = [shlex.quote(w) if w and not w.endswith("/") else f'{shlex.quote(w) if w else ""}"$d"' for w in words]
    return f"for d in {' '.join(DIMENSIONS)}; do {' '.join(typed)}; done"


# ---------------------------------------- results


def total(scores: dict[str, float]) -> float:
    """VBench's official weighting restricted to the paper's six dimensions, in 0..1."""
    sums = {kind: [0.0, 0.0] for kind in KIND_WEIGHT}
    for name, (low, high, weight, kind) in DIMENSIONS.items():
        sums[kind][0] += weight * (scores[name] - low) / (high - low)
        sums[kind][1] += weight
    means = {kind: part / weight for kind, (part, weight) in sums.items()}
    return sum(KIND_WEIGHT[kind] * means[kind] for kind in means) / sum(KIND_WEIGHT.values())


def read(folder: str | Path) -> dict[str, float] | None:
    """Scores of the six dimensions and `total` from all `*_eval_results.json` below a folder; None if there is none.

    Of several results for one dimension the last by name (VBench names them by date) counts.
    """
    scores: dict[str, float] = {}
    files = sorted(Path(folder).glob("**/*_eval_results.json"), key=lambda p: p.name)
    for path in files:
        data = read_json(path)
        if not isinstance(data, dict):
            raise HeartError(f"{named(path)} is not a VBench result: expected an object with one entry a dimension")
        scores |= {name: _score(value, name, path) for name, value in data.items() if name in DIMENSIONS}
    if not files:
        return None
    missing = [name for name in DIMENSIONS if name not in scores]
    if missing:
        raise HeartError(
            f"{named(folder)} lacks the VBench dimension {missing[0]!r}: evaluate all of {', '.join(DIMENSIONS)}"
        )
    return {**scores, "total": total(scores)}


def _score(value: Any, name: str, path: Path) -> float:
    number = value[0] if isinstance(value, list) and value else value
    if not is_number(number):
        raise HeartError(
            f"{named(path)}: {shown(name)} has no finite score but {shown(number)}: run VBench on it again"
        )
    return float(number)
