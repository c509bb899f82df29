"""Names of methods, as in the paper's tables, turned into configs: `dense`, `xattention`, `svg2+heart`, `svg2+joint`.

A row is what it is called: `+ebc` and `+heart` take calibrations by the paper's protocol only (one head sparse at a time,
three candidates, its strata, a plain mean), `+joint` takes all others. A calibration brings its whole operating point:
backbone settings, token order, dense steps.

What follows "@" is a budget: `heart@0.25` of time, `xattention@0.8` a threshold, `xattention+joint@0.8` as sparse as that
threshold. A calibration is solved again for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..calibration.solve.budget import Budget
from ..errors import HeartError

DENSE = "dense"
HEART = "heart"  # operating points of all kinds


class Part(NamedTuple):
    """What a suffix switches on: temporal mask reuse, and which kind of calibration ("", "paper" or "joint")."""

    reuse: bool
    calibration: str


PARTS = {
    "": Part(False, ""),
    "tmr": Part(True, ""),
    "ebc": Part(False, "paper"),
    "heart": Part(True, "paper"),
    "joint": Part(True, "joint"),
}
HOW = {"paper": "--method probes", "joint": "--method joint"}  # how `heart calibrate` makes each kind
PAPER_CANDIDATES = (0.85, 0.9, 0.95)
# The demo's rows: each shipped backbone as published, and with joint calibration and mask reuse.
DEMO = (DENSE, "xattention", "xattention+joint", "svg2", "svg2+joint")
# What `heart compare` runs unless told: the paper's method too.
DEFAULT = (DENSE, "xattention", "xattention+heart", "xattention+joint", "svg2", "svg2+heart", "svg2+joint")
FULL = (
    DENSE, "xattention", "xattention+tmr", "xattention+ebc", "xattention+heart", "xattention+joint",
    "svg2", "svg2+tmr", "svg2+ebc", "svg2+heart", "svg2+joint",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of a table: a name and the HeartConfig that makes it (dense attention is thresholds of 1)."""

    name: str
    config: Any


Calibrations = Mapping[tuple[str, str], Sequence[str]]  # (backbone's name, kind) -> one file, or one a transformer


def kind_of(calibration: Any) -> str:
    """The kind of a calibration: "points" if heads have points of several kinds, "paper" by its protocol, else "joint"."""
    if not calibration.simple:
        return "points"
    settings = calibration.settings
    as_in_paper = (
        calibration.method == "probes"
        and settings.get("strata") == "paper"
        and settings.get("mean") == "plain"
        and calibration.candidates is not None
        and tuple(calibration.candidates) == _paper_candidates(calibration)
    )
    return "paper" if as_in_paper else "joint"


def _paper_candidates(calibration: Any) -> tuple[float, ...]:
    """What the paper's protocol chooses from with this calibration's backbone."""
    from .. import backbones
    from ..calibration.workflow.settings import paper_candidates

    return paper_candidates(backbones.find(calibration.backbone["name"]), calibration.settings.get("shared", 0.9))


def sort_calibrations(paths: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """Calibration files by what they are for: (backbone's name, kind)."""
    from ..calibration.file import Calibration

    sorted_: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        made = Calibration.load(path)
        kind = kind_of(made)
        sorted_.setdefault((HEART if kind == "points" else made.backbone["name"], kind), []).append(path)
    return sorted_


def shipped_calibration(backbone: str, model: str, kind: str = "joint") -> str | None:
    """The calibration of that kind which the package carries for an embedded model, if there is one."""
    from .. import tiny
    from ..presets import SHIPPED_HEART

    if backbone == HEART:
        name = SHIPPED_HEART.get(model)
    else:
        beginning = {"tiny": "", "tiny-hunyuan": "hunyuan-"}.get(model)
        ending = "-paper.heart.json" if kind == "paper" else ".heart.json"
        name = None if beginning is None else f"{beginning}{backbone}{ending}"
    path = Path(tiny.path()).parent / "calibrations" / name if name else None
    return str(path) if path is not None and path.is_file() else None


def shipped_rows(full: bool = False) -> tuple[str, ...]:
    """The demo's rows: those that ship, with `heart` where its calibration does."""
    rows = FULL if full else DEMO
    return (*rows, HEART) if shipped_calibration(HEART, "tiny", "points") else rows


def parse(name: str) -> tuple[str, str]:
    """A method's name as (backbone, part); ("dense", "") for dense attention. Unknown names are refused."""
    from .. import backbones

    method, at, budget = name.partition("@")
    backbone, plus, part = method.partition("+")
    if at:
        Budget.named(budget, "time")
    if name == DENSE or method == HEART:
        return method, ""
    if backbone not in backbones.names() or part not in PARTS or (plus and not part):
        suffixes = ", ".join(f"+{p}" for p in PARTS if p)
        raise HeartError(
            f"unknown method {name!r}: use dense, heart, or one of {', '.join(backbones.names())}, alone or with {suffixes}"
        )
    return backbone, part


def build(name: str, pipe: Any, model: str, calibrations: Calibrations | None = None, **changes: Any) -> Method:
    """The method of that name for this pipeline; `changes` replace fields of its config."""
    from ..config import HeartConfig
    from ..online.reuse import Always
    from ..presets import preset

    backbone, suffix = parse(name)
    if backbone == DENSE:
        return Method(DENSE, HeartConfig(thresholds=1.0, reuse=Always(), dense_steps=0))
    part, budget = Part(True, "points") if backbone == HEART else PARTS[suffix], name.partition("@")[2]
    if part.calibration:
        config = operating_point(_files(name, backbone, part.calibration, model, calibrations or {}), pipe, budget)
    else:
        config = preset(backbone, pipe)
        config = config.replace(thresholds=Budget.named(budget, "threshold").value) if budget else config
    if not part.reuse:
        config = config.replace(reuse=Always())
    return Method(name, config.replace(**changes) if changes else config)


def operating_point(files: Sequence[str], pipe: Any, budget: str = "") -> Any:
    """The config that `heart.enable(pipe, files)` would use: thresholds, backbone settings, order, dense steps."""
    from ..api import from_calibration

    return from_calibration(files[0] if len(files) == 1 else list(files), pipe, budget)[0]


def _files(name: str, backbone: str, kind: str, model: str, given: Calibrations) -> Sequence[str]:
    """The calibration files of a method: those given for it, else the shipped one; none is an error that tells how."""
    if given.get((backbone, kind)):
        return _nearest(given[backbone, kind], name.partition("@")[2])
    shipped = shipped_calibration(backbone, model, kind)
    if shipped is not None:
        return [shipped]
    if kind == "points":
        raise HeartError(
            f"method {name!r} needs a calibration of operating points: make one with `heart calibrate --model {model} "
            "--points default --budget time=0.25 --out mine.heart.json` and pass it by --calibration"
        )
    made = f"`heart calibrate --model {model} --backbone {backbone} {HOW[kind]} --out {backbone}.heart.json`"
    others = [k for b, k in given if b == backbone]
    if others and kind == "paper":
        raise HeartError(
            f"method {name!r} is the paper's and the calibration given is not by its protocol: "
            f"name it {backbone}+joint, or make one with {made}"
        )
    raise HeartError(
        f"method {name!r} needs a calibration for {backbone}: make one with {made} and pass it by --calibration"
    )


def _nearest(files: Sequence[str], budget: str) -> Sequence[str]:
    """Of files for several budgets the one nearest to this; those of several transformers all together."""
    from ..calibration.file import Calibration

    settings = [Calibration.load(path).settings for path in files] if len(files) > 1 else []
    if not settings or any(s.get("transformer") for s in settings):
        return files
    made_for = [Budget.parse(s.get("budget") or "shared=1") for s in settings]
    if not budget:
        raise HeartError(
            f"{files[0]} and {files[1]} are for one method: say which budget after its name, {made_for[0].value:g}"
        )
    asked = Budget.named(budget, made_for[0].kind)
    alike = [i for i, b in enumerate(made_for) if b.kind == asked.kind] or range(len(files))
    return [files[min(alike, key=lambda i: abs(made_for[i].value - asked.value))]]


def check(names: Sequence[str], calibrations: Calibrations, model: str) -> None:
    """Refuse wrong names, missing calibrations and calibrations nobody uses, before anything is loaded."""
    used = set()
    for name in names:
        backbone, suffix = parse(name)
        kind = "points" if backbone == HEART else PARTS[suffix].calibration if backbone != DENSE else ""
        if kind:
            _files(name, backbone, kind, model, calibrations)
            used.add((backbone, kind))
    for key, files in calibrations.items():
        if key not in used:
            suffix = {"joint": "+joint", "paper": "+ebc or +heart", "points": ""}[key[1]]
            raise HeartError(
                f"{files[0]} is for {key[0]}{suffix}, not among the methods: name it, or leave the file out"
            )
