"""Gathers what a results folder holds and fills the page's template; the page needs no network."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

from ...errors import HeartError, named
from ...files import read_json, write_atomic
from .. import results as files
from .. import tables, timing
from . import curves, plots
from .heads import view

BUDGET = (
    6_500_000  # bytes of videos and strips in the page: base64 makes it a third more, and the page stays under 10 MB
)
LARGEST = 1 << 28  # bytes of one case's videos, the first of which the page holds whatever the budget
PARTS = {
    "drift": "deciding which masks are reused",
    "prediction": "predicting masks",
    "planning": "preparing masks for the kernel",
    "attention": "sparse attention itself",
    "dense": "attention of calls that ran dense",
}
# What stands behind a method's name: after "+", or the whole name.
NAMES = {
    "dense": "attention in full, the reference",
    "heart": "every head at an operating point of its own kind, chosen jointly; masks are reused, what they leave out is "
    "approximated",
    "": "as published: a new mask at every sparse step, one threshold for all heads",
    "tmr": "masks are reused while queries and keys drift little",
    "ebc": "every head has its own threshold, calibrated by the paper's protocol",
    "heart of the paper": "mask reuse, and thresholds calibrated by the paper's protocol",
    "joint": "mask reuse, and thresholds calibrated for all heads together",
}
PICTURES = (  # key, title, meaning, lowest, highest value
    ("threshold", "Threshold τ", "share of attention mass that a head must keep", 0.5, 1.0),
    ("density", "Density", "share of query–key pairs computed, mean over sparse steps", 0.0, 1.0),
    ("refresh", "Refreshed", "share of sparse steps with a new mask; the others reuse one", 0.0, 1.0),
)


def _data_uri(path: Path, kind: str) -> str:
    return f"data:{kind};base64," + base64.b64encode(path.read_bytes()).decode()


# ---------------------------------------- videos


def _cases(results: dict, folder: Path) -> tuple[list[dict], int]:
    """Videos by (prompt, seed) until the budget is spent, and how many cases were left out."""
    cases: dict[tuple[str, int], list[dict]] = {}
    for row in results["rows"]:
        cases.setdefault((row["prompt"], row["seed"]), []).append(row)
    shown, spent, left_out = [], 0, 0
    for (prompt, seed), rows in cases.items():
        paths = [folder / row.get("video", "?") for row in rows]
        missing = [p for p in paths if not p.is_file()]
        if missing:
            raise HeartError(f"the video {named(missing[0])!r} is gone: run the comparison again")
        size = sum(p.stat().st_size for p in paths)
        if size > LARGEST:
            raise HeartError(f"the videos beside {named(paths[0])!r} have {size} bytes: a page holds at most {LARGEST}")
        if shown and spent + size > BUDGET:
            left_out += 1
            continue
        spent += size
        videos = [
            {"method": r["method"], "src": _data_uri(p, "video/mp4"), "note": _note(r)} for r, p in zip(rows, paths)
        ]
        shown.append({"prompt": prompt, "seed": seed, "videos": videos, "strip": _strip(rows[0], folder)})
    return shown, left_out


def _strip(row: dict, folder: Path) -> str | None:
    path = folder / (row.get("strip") or "?")
    return _data_uri(path, "image/png") if path.is_file() and path.stat().st_size < BUDGET // 8 else None


def _note(row: dict) -> str:
    if row["method"] == "dense":
        return "the reference"
    quality = f"PSNR {row['psnr']:.1f} dB, " if row.get("psnr") is not None else ""
    return quality + ("all calls dense" if row["density"] is None else f"density {row['density']:.2f}")


# ---------------------------------------- heads


def _heads_section(method: str, stats: dict) -> dict | None:
    """Heat maps heads × layers and the timeline of one method, from the engine's statistics."""
    heads = view(stats)
    if heads is None:
        return None
    maps = []
    for key, title, meaning, low, high in PICTURES:
        values = [[None if v is None else float(v) for v in row] for row in heads[key]]

        def tip(layer: int, head: int, value: float | None, title: str = title) -> str:
            return f"layer {layer}, head {head}: {title} " + ("dense" if value is None else f"{value:.3f}")

        cell = min(40.0, max(14.0, 300 / max(len(row) for row in values)))
        svg = plots.heat_map(values, tip, f"{title} of {method}", "layer", "head", low, high, cell)
        maps.append({"title": title, "meaning": meaning, "svg": svg, "low": low, "high": high})
    rows = [(f"{i}.{j}", states) for i, layer in enumerate(heads["timeline"]) for j, states in enumerate(layer)]
    if not any(value is not None for row in heads["refresh"] for value in row):
        return None  # it never ran sparse, and that is said elsewhere
    return {"method": method, "maps": maps, "timeline": plots.timeline(rows, f"refreshes of {method} over the steps")}


def _sections(results: dict, folder: Path) -> list[dict]:
    made = []
    for method in dict.fromkeys(r["method"] for r in results["rows"]):
        row = next(r for r in results["rows"] if r["method"] == method)
        path = folder / row.get("stats", "?")
        if method == "dense" or not path.is_file():
            continue
        try:
            made.append(_heads_section(method, read_json(path)))
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
            raise HeartError(f"{named(path)} is not a statistics file of HEART: run the comparison again") from None
    return [s for s in made if s]


# ---------------------------------------- figures


def _headline(summary: list[dict]) -> str:
    """One sentence computed from the table: speed with its spread and quality of each calibrated method, nearest first."""
    best = [
        e for e in summary if e["method"].endswith(("+heart", "+joint")) or e["method"].partition("@")[0] == "heart"
    ]
    best = best or [e for e in summary if e["method"] != "dense"]
    if not best:
        return "Only dense attention was run."
    best = [e for e in best if e.get("dense_share") != 1]  # what ran dense all the time is no method of its own
    if not best:
        return "Every attention call ran dense: sparsity does not pay at this size on this machine."
    best.sort(key=lambda e: -(e.get("psnr") or 0))
    return "; ".join(_verdict(e) for e in best[:3]) + "."


def _verdict(e: dict) -> str:
    quality = f", {e['psnr']:.1f} dB PSNR" if e.get("psnr") else ""
    if not math.isfinite(e["attention_speedup"]):
        return f"{e['method']}: times not measured{quality}"
    if not tables.spread(e, "attention") or not tables.spread(e, "total"):
        return f"{e['method']}: too few steps to tell how sure its speed is{quality}"
    speeds = " and ".join(
        f"{what} {_speed(e, key)}" for what, key in (("attention", "attention"), ("the model", "total"))
    )
    return f"{e['method']}: {speeds} as fast as dense" + (f", at {e['psnr']:.1f} dB PSNR" if e.get("psnr") else "")


def _speed(e: dict, key: str) -> str:
    spread = tables.spread(e, key)
    return f"{e[f'{key}_speedup']:.2f}×" + (f" ({spread})" if spread else "")


def _scatter(summary: list[dict]) -> str | None:
    """What ran dense all the time is no point of it: as good as dense at the speed of dense."""
    points = [
        {"name": e["method"], "x": e["attention_speedup"], "y": e["psnr"]}
        for e in summary
        if e.get("psnr") is not None and e.get("dense_share") != 1
    ]
    label = "speed against quality"
    return plots.scatter(points, "attention speed-up over dense", "PSNR dB", label) if points else None


def _front(results: dict) -> dict | None:
    """Curves and comparisons where methods come with several budgets."""
    from ..frontier import front, plot

    if not any("@" in row["method"] for row in results["rows"]):
        return None
    plots_ = [(title, plot.svg(results, axis)) for axis, title in plot.TITLES.items()]
    return {"plots": plots_, "lines": front.lines(front.front(results)["comparisons"]), "css": curves.CSS}


def _bars(summary: list[dict]) -> str:
    rows = [(e["method"], [(p, max(e["parts_s"].get(p) or 0.0, 0.0)) for p in PARTS]) for e in summary]
    return plots.stacked_bars(rows, "s", "attention time by part")


def _interval_note(entry: dict) -> str:
    count = f"{entry['n']} video{'s' if entry['n'] > 1 else ''}"
    if entry["method"] == "dense" or not math.isfinite(entry["attention_speedup"]):
        return count
    how = "over prompts and seeds" if entry["n"] > 1 else "over steps"
    return f"{count}; 95 % intervals {how}: attention {_speed(entry, 'attention')}, end to end {_speed(entry, 'total')}"


def _with_spreads(texts: list[str], head: list[tables.Column], entry: dict) -> list[tuple[str, str]]:
    """A row's cells, speed-ups with their intervals."""
    keys = {"attention_speedup": "attention", "total_speedup": "total"}
    told = entry["method"] != "dense"
    return [
        (text, tables.spread(entry, keys[column.key]) if told and column.key in keys else "")
        for text, column in zip(texts, head)
    ]


def _ran_dense(summary: list[dict]) -> list[dict]:
    """What ran dense in the methods that are not dense, and why."""
    return [
        {"method": e["method"], "share": e.get("dense_share"), "reasons": e["dense_reasons"]}
        for e in summary
        if e["method"] != "dense" and e["dense_reasons"]
    ]


# ---------------------------------------- the page


def _what(results: dict) -> str:
    """What was run, in a line: model, size, steps, videos, version, machine, day."""
    facts, call = results["provenance"], _call(results)
    size = f"{call['width']}×{call['height']}" if {"width", "height"} <= call.keys() else ""
    counted = [
        f"{call[key]} {name}"
        for key, name in (("num_frames", "frames"), ("num_inference_steps", "steps"))
        if key in call
    ]
    cases = len({(row["prompt"], row["seed"]) for row in results["rows"]})
    version = f"version {facts['heart']}" if "heart" in facts else ""
    more = [facts.get("gpu") or facts.get("machine", ""), str(facts.get("date", ""))[:10]]
    parts = [facts.get("model", ""), size, *counted, f"{cases} video{'s' * (cases > 1)} a method", version, *more]
    return ", ".join(str(part) for part in parts if part)


def _call(results: dict) -> dict:
    call = results["provenance"].get("call")
    return call if isinstance(call, dict) else {}


def _is_wide(results: dict) -> bool:
    """Whether the videos are much wider than high; then two beside each other are too small on a phone."""
    width, height = (_call(results).get(key) for key in ("width", "height"))
    return not (isinstance(width, int | float) and isinstance(height, int | float) and width <= 1.3 * height)


def _names(methods: list[str]) -> list[tuple[str, str]]:
    """What the methods' names mean, as far as they are made of known parts."""
    known = []
    for method in methods:
        backbone, plus, part = method.partition("@")[0].partition("+")
        key = {"heart": "heart of the paper"}.get(part, part) if plus else backbone if backbone in NAMES else ""
        if key in NAMES and backbone.isidentifier() and backbone.islower():
            known.append((method, NAMES[key]))
    return known


def context(folder: str | Path) -> dict[str, Any]:
    """Everything the template shows."""
    folder = Path(folder)
    results = files.load(folder)
    summary = tables.summarise(results)
    cases, left_out = _cases(results, folder)
    head, body = tables.cells(summary, results["conventions"])
    plain, folded = _provenance(results["provenance"])
    return {
        "headline": _headline(summary),
        "what": _what(results),
        "names": _names([e["method"] for e in summary]),
        "wide": _is_wide(results),
        "doubt": timing.verdict(results["rows"]) or timing.untimed(results["rows"]),
        "front": _front(results),
        "cases": cases,
        "left_out": left_out,
        "head": head,
        "body": [_with_spreads(*row) for row in zip(body, [head] * len(body), summary)],
        "empty": tables.empty_cells(summary, results),
        "devices": tables.devices_line(results),
        "intervals": [_interval_note(e) for e in summary],
        "conventions": results["conventions"],
        "scatter": _scatter(summary),
        "bars": _bars(summary),
        "parts": PARTS,
        "ran_dense": _ran_dense(summary),
        "wholly_dense": [e["method"] for e in summary if e.get("dense_share") == 1 and e["method"] != "dense"],
        "sections": _sections(results, folder),
        "provenance": plain,
        "folded": folded,
    }


def _provenance(facts: dict) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Short facts as they are, and long ones (configs) to be folded away."""
    plain, folded = [], []
    for name, value in facts.items():
        if name == "configs" and isinstance(value, dict):
            folded += [(str(k), json.dumps(v, ensure_ascii=False, indent=1)) for k, v in value.items()]
        else:
            plain.append((name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return plain, folded


def build(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a results folder (default: `report.html` inside it) and return its path."""
    import jinja2

    template = (Path(__file__).parent / "template.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template).render(**context(folder)).encode("utf-8", "replace")
    return write_atomic(Path(out) if out else Path(folder) / "report.html", page)
