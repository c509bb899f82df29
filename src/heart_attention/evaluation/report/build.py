"""Gathers what a results folder holds and fills the page's template; the page needs no network."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from ...errors import HeartError
from ...files import read_json, write_atomic
from .. import run
from . import plots
from .heads import view

VIDEO_BUDGET = 6_500_000  # bytes of mp4 in the page: base64 makes it a third more, and the page stays under 10 MB
PART_NAMES = ("drift", "prediction", "planning", "attention", "dense")


def _data_uri(path: Path) -> str:
    return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()


def _cases(results: dict, folder: Path) -> tuple[list[dict], int]:
    """Videos by (prompt, seed) until the budget is spent, and how many cases were left out."""
    cases: dict[tuple[str, int], list[dict]] = {}
    for row in results["rows"]:
        cases.setdefault((row["prompt"], row["seed"]), []).append(row)
    shown, spent, left_out = [], 0, 0
    for (prompt, seed), rows in cases.items():
        paths = [folder / row["video"] for row in rows]
        missing = [p for p in paths if not p.is_file()]
        if missing:
            raise HeartError(f"the video {str(missing[0])!r} is gone: run the comparison again")
        size = sum(p.stat().st_size for p in paths)
        if shown and spent + size > VIDEO_BUDGET:
            left_out += 1
            continue
        spent += size
        videos = [{"method": r["method"], "src": _data_uri(p), "note": _note(r)} for r, p in zip(rows, paths)]
        shown.append({"prompt": prompt, "seed": seed, "videos": videos})
    return shown, left_out


def _note(row: dict) -> str:
    if row.get("psnr") is None:
        return "the reference"
    density = "all calls dense" if row["density"] is None else f"density {row['density']:.2f}"
    return f"PSNR {row['psnr']:.1f} dB, {density}"


def _grid(values: Any) -> list[list[float | None]]:
    return [[None if v is None else float(v) for v in row] for row in values]


def _heads_section(method: str, stats: dict) -> dict | None:
    """Heat maps heads × layers and the timeline of one method, from the engine's statistics."""
    heads = view(stats)
    if heads is None:
        return None
    maps = []
    pictures = (
        ("threshold", "Threshold τ", "share of attention mass that a head must keep", 0.5, 1.0),
        ("density", "Density", "share of token pairs computed, mean over sparse steps", 0.0, 1.0),
        ("refresh", "Refreshes", "share of sparse steps with a new mask", 0.0, 1.0),
    )
    for key, title, meaning, low, high in pictures:
        values = _grid(heads[key])

        def tip(layer: int, head: int, value: float | None, title: str = title) -> str:
            return f"layer {layer}, head {head}: {title} " + ("dense" if value is None else f"{value:.3f}")

        svg = plots.heat_map(values, tip, f"{title} of {method}", "layer", "head", low, high)
        maps.append({"title": title, "meaning": meaning, "svg": svg})
    rows = [(f"{i}.{j}", states) for i, layer in enumerate(heads["timeline"]) for j, states in enumerate(layer)]
    return {"method": method, "maps": maps, "timeline": plots.timeline(rows, f"refreshes of {method} over the steps")}


def _sections(results: dict, folder: Path) -> list[dict]:
    found = []
    for method in dict.fromkeys(r["method"] for r in results["rows"]):
        row = next(r for r in results["rows"] if r["method"] == method)
        path = folder / row.get("stats", "?")
        if method != "dense" and path.is_file():
            found.append(_heads_section(method, read_json(path)))
    return [s for s in found if s]


def _headline(summary: list[dict]) -> str:
    """One sentence computed from the table: speed and quality of each `+heart`, the closest to dense first."""
    best = [e for e in summary if e["method"].endswith("+heart")] or [e for e in summary if e["method"] != "dense"]
    if not best:
        return "Only dense attention was run."
    best.sort(key=lambda e: -(e.get("psnr") or 0))
    return "; ".join(_verdict(e) for e in best[:3]) + "."


def _verdict(e: dict) -> str:
    speed = (
        f"attention {e['attention_speedup']:.2f}× and the denoising model {e['total_speedup']:.2f}× as fast as dense"
    )
    return f"{e['method']}: {speed}" + (f", at {e['psnr']:.1f} dB PSNR against it" if e.get("psnr") else "")


def _scatter(summary: list[dict]) -> str | None:
    points = [
        {"name": e["method"], "x": e["total_speedup"], "y": e["psnr"]} for e in summary if e.get("psnr") is not None
    ]
    return (
        plots.scatter(points, "end-to-end speed-up over dense", "PSNR dB", "speed against quality") if points else None
    )


def _bars(summary: list[dict]) -> str:
    rows = [(e["method"], [(p, e["parts_s"].get(p) or 0.0) for p in PART_NAMES]) for e in summary]
    return plots.stacked_bars(rows, "s", "attention time by part")


def context(folder: str | Path) -> dict[str, Any]:
    """Everything the template shows."""
    folder = Path(folder)
    results = run.load_results(folder)
    summary = run.summarise(results)
    cases, left_out = _cases(results, folder)
    head, body = run.cells(summary)
    return {
        "headline": _headline(summary),
        "cases": cases,
        "left_out": left_out,
        "head": head,
        "body": body,
        "intervals": [_interval_note(e) for e in summary],
        "conventions": results.get("conventions", {}),
        "scatter": _scatter(summary),
        "bars": _bars(summary),
        "parts": PART_NAMES,
        "sections": _sections(results, folder),
        "provenance": _flat(results["provenance"]),
    }


def _interval_note(entry: dict) -> str:
    if entry["n"] < 2 or entry["method"] == "dense":
        return f"{entry['n']} video(s)"
    a, b = entry["attention_speedup_ci"], entry["total_speedup_ci"]
    return f"{entry['n']} videos; 95 % intervals: attention {a[0]:.2f}–{a[1]:.2f}×, end to end {b[0]:.2f}–{b[1]:.2f}×"


def _flat(provenance: dict) -> list[tuple[str, str]]:
    return [(k, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for k, v in provenance.items()]


def build(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a results folder (default: `report.html` inside it) and return its path."""
    import jinja2

    template = (Path(__file__).parent / "template.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template).render(**context(folder))
    return write_atomic(Path(out) if out else Path(folder) / "report.html", page)
