"""Fronts from results: methods with several budgets as curves, what no other beats, and paired differences between them.

A curve joins the budgets of one method. Two methods are compared where they are equal in one thing: PSNR at equal speed,
case by case (a prompt and a seed), or speed at equal mean PSNR. Nothing is extrapolated: a curve that begins quicker, or
better, than the other method enters with its end, which counts against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import tables
from ..methods import DENSE, HEART
from ..statistics import student_t

AXES = {"attention": "attention_s", "total": "total_s"}  # speed-up over dense of -> the row's seconds
WORDS = {"attention": "attention", "total": "end to end"}
Case = tuple[str, int]


def family(name: str) -> str:
    """The method without its budget."""
    return name.partition("@")[0]


@dataclass(frozen=True)
class Place:
    """Where a method lies: its speed-up over dense, and its PSNR in every case."""

    name: str
    speed: float
    psnr: dict[Case, float]

    def mean(self, left_out: Case | None = None) -> float:
        """Mean PSNR, of all cases or of all but one."""
        return float(np.mean([value for case, value in self.psnr.items() if case != left_out]))


Curve = list[Place]  # by rising speed


def places(results: dict, axis: str = "attention", left_out: Case | None = None) -> dict[str, Place]:
    """All methods but dense that have both a PSNR and times."""
    by_name: dict[str, list[dict]] = {}
    for row in results["rows"]:
        if (row["prompt"], row["seed"]) != left_out:
            by_name.setdefault(row["method"], []).append(row)
    found = {}
    for name, rows in by_name.items():
        psnr = {(r["prompt"], r["seed"]): r["psnr"] for r in rows if r.get("psnr") is not None}
        speed = tables.speedup(rows, by_name.get(DENSE, []), AXES[axis])[0]
        if name != DENSE and psnr and math.isfinite(speed):
            found[name] = Place(name, speed, psnr)
    return found


def curves(found: dict[str, Place]) -> dict[str, Curve]:
    """Methods by family, those with several budgets and single ones alike."""
    made: dict[str, Curve] = {}
    for place in sorted(found.values(), key=lambda p: p.speed):
        made.setdefault(family(place.name), []).append(place)
    return made


def unbeaten(found: dict[str, Place]) -> list[str]:
    """Names of the methods that no other beats in both speed and PSNR, by rising speed."""
    names, best = [], -math.inf
    for place in sorted(found.values(), key=lambda p: (-p.speed, -p.mean())):
        if place.mean() > best:
            names.append(place.name)
            best = place.mean()
    return names[::-1]


# ---------------------------------------- at equal speed, at equal quality


def psnr_at(curve: Curve, speed: float, case: Case) -> float | None:
    """PSNR of a curve at a speed, between its budgets by log speed; below its slowest that one's, above nothing."""
    mine = [place for place in curve if case in place.psnr]
    if not mine or speed > mine[-1].speed:
        return None
    logs = [math.log(place.speed) for place in mine]
    return float(np.interp(math.log(speed), logs, [place.psnr[case] for place in mine]))


def speed_at(curve: Curve, psnr: float, left_out: Case | None = None) -> float | None:
    """The greatest speed at which a curve's mean PSNR is this one; None if it reaches it nowhere."""
    means = [place.mean(left_out) for place in curve]
    if means[-1] >= psnr:
        return curve[-1].speed
    for i in range(len(curve) - 2, -1, -1):
        if means[i] >= psnr:
            share = (means[i] - psnr) / (means[i] - means[i + 1])
            ends = math.log(curve[i].speed), math.log(curve[i + 1].speed)
            return math.exp(ends[0] + share * (ends[1] - ends[0]))
    return None


def compared(results: dict, subject: str, other: str, axis: str) -> dict[str, Any] | None:
    """A family against one method: PSNR at its speed, speed at its PSNR, each with a 95 % interval."""
    found = places(results, axis)
    curve, rival = curves(found).get(subject), found.get(other)
    if curve is None or rival is None:
        return None
    out: dict[str, Any] = {
        "method": subject,
        "against": other,
        "axis": axis,
        "speed": rival.speed,
        "psnr": rival.mean(),
    }
    pairs = [(psnr_at(curve, rival.speed, case), value) for case, value in rival.psnr.items()]
    gains = [mine - value for mine, value in pairs if mine is not None]
    if gains:
        out["psnr_gain"], out["psnr_gain_ci"] = tables.interval(gains)
    reached = speed_at(curve, rival.mean())
    if reached is not None:
        out["speed_at_psnr"] = reached
        out["ratio"], out["ratio_ci"] = _ratio(results, subject, other, axis)
    return out


def _ratio(results: dict, subject: str, other: str, axis: str) -> tuple[float, list[float]]:
    """Speed of a family over a method's at equal PSNR, and its 95 % interval by a jackknife over cases."""

    def log_ratio(left_out: Case | None = None) -> float:
        found = places(results, axis, left_out)
        if other not in found or subject not in (lines := curves(found)):
            return math.nan
        reached = speed_at(lines[subject], found[other].mean())
        return math.nan if reached is None else math.log(reached / found[other].speed)

    whole = log_ratio()
    cases = list(dict.fromkeys((r["prompt"], r["seed"]) for r in results["rows"]))
    parts = [part for part in map(log_ratio, cases) if math.isfinite(part)] if len(cases) > 1 else []
    half = _jackknife(parts)
    return math.exp(whole), [math.exp(whole - half), math.exp(whole + half)]


def _jackknife(parts: Sequence[float]) -> float:
    """Half of the 95 % interval from what leaving out each case gives; 0 where that tells nothing."""
    n = len(parts)
    if n < 2:
        return 0.0
    array = np.asarray(parts)
    return student_t(n - 1) * math.sqrt((n - 1) / n * float(((array - array.mean()) ** 2).sum()))


# ---------------------------------------- all of it


def front(results: dict) -> dict[str, Any]:
    """The front of results as plain JSON: every method, which are unbeaten, and families against all other methods."""
    summary = {e["method"]: e for e in tables.summarise(results) if e["method"] != DENSE}
    ahead = {axis: unbeaten(places(results, axis)) for axis in AXES}
    keep = ("n", *results["conventions"], "attention_speedup", "total_speedup", "density", "cost", "refresh_rate")
    entries = []
    for name, e in summary.items():
        entry = {"method": name, "family": family(name)} | {k: e.get(k) for k in keep}
        entry |= {f"{k}_ci": e[f"{k}_ci"] for k in keep if f"{k}_ci" in e}
        entries.append(entry | {f"front_{axis}": name in names for axis, names in ahead.items()})
    return {"methods": entries, "comparisons": _comparisons(results, list(summary))}


def _comparisons(results: dict, names: Sequence[str]) -> list[dict[str, Any]]:
    """Every family with several budgets, `heart` first, against the methods of all others."""
    sizes: dict[str, int] = {}
    for name in names:
        sizes[family(name)] = sizes.get(family(name), 0) + 1
    subjects = sorted((f for f, count in sizes.items() if count > 1 or f == HEART), key=lambda f: f != HEART)
    pairs = [(s, n, axis) for s in subjects for n in names if family(n) != s for axis in AXES]
    return [c for c in (compared(results, *pair) for pair in pairs) if c]


def lines(comparisons: Sequence[dict[str, Any]]) -> list[str]:
    """Comparisons of the first family (`heart` where it is there) as sentences, those left out that tell nothing."""
    told = [c for c in comparisons if c["method"] == comparisons[0]["method"] and ("psnr_gain" in c or "ratio" in c)]
    return [_line(c) for c in told]


def _line(c: dict[str, Any]) -> str:
    what, parts = WORDS[c["axis"]], []
    if c.get("psnr_gain") is not None:
        half = f" ± {c['psnr_gain_ci']:.2f}" if c["psnr_gain_ci"] else ""
        parts.append(f"at its speed or quicker ({what} {c['speed']:.2f}×) {c['psnr_gain']:+.2f}{half} dB")
    else:
        parts.append(f"nowhere as fast ({what} {c['speed']:.2f}×)")
    if c.get("ratio") is not None:
        low, high = c["ratio_ci"]
        spread = f" ({low:.2f}–{high:.2f})" if high > low else ""
        parts.append(
            f"at its PSNR or above ({c['psnr']:.2f} dB) {c['speed_at_psnr']:.2f}× over dense, {c['ratio']:.2f}×{spread} over it"
        )
    else:
        parts.append(f"nowhere as near to dense ({c['psnr']:.2f} dB)")
    return f"{c['method']} against {c['against']}: " + "; ".join(parts)
