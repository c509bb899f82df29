"""Tables from results: means, paired speed-ups and differences with 95 % intervals, as text, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import printable
from ..files import write_atomic, write_json
from . import timing
from .statistics import student_t

JUDGES = ("vbench", "visionreward")


class Column(NamedTuple):
    """A column of the table: the summary's key, its heading, how a value is written, what it means."""

    key: str
    heading: str
    form: str
    meaning: str


COLUMNS = [
    Column("vbench", "VBench", "{:.2%}", "VBench's six dimensions of the paper, by the official weighting; higher is better"),
    Column("visionreward", "VReward", "{:.4f}", "VisionReward's mean score; higher is better"),
    Column("psnr", "PSNR dB", "{:.2f}", "nearness to the dense video, frame by frame; higher is nearer"),
    Column("psnr_pooled", "PSNR pooled", "{:.2f}", "nearness to the dense video, of the whole video's error; higher is nearer"),
    Column("ssim", "SSIM", "{:.4f}", "likeness of structure to the dense video, at most 1; higher is nearer"),
    Column("ssim_box", "SSIM box", "{:.4f}", "SSIM with a uniform window; higher is nearer"),
    Column("lpips_alex", "LPIPS alex", "{:.4f}", "perceptual distance to the dense video (AlexNet); lower is nearer"),
    Column("lpips_vgg", "LPIPS vgg", "{:.4f}", "perceptual distance to the dense video (VGG16); lower is nearer"),
    Column("lpips_vgg01", "LPIPS vgg01", "{:.4f}", "perceptual distance (VGG16, inputs in 0–1); lower is nearer"),
    Column("vmaf", "VMAF", "{:.1f}", "Netflix's measure of likeness to the dense video, at most 100; higher is nearer"),
    Column("density", "density", "{:.3f}", "share of query–key pairs computed in the sparse phase, 1 for calls that ran dense"),
    Column("cost", "cost", "{:.3f}", "keys computed or approximated for a query, as a share of all keys, at sparse calls"),
    Column("dense_share", "ran dense", "{:.0%}", "share of the sparse phase's attention calls that ran dense all the same"),
    Column("refresh_rate", "refreshed", "{:.0%}", "share of heads whose mask was predicted anew at a sparse call, not reused"),
    Column("attention_s", "attention s", "{:.2f}", "seconds in attention: prediction, reuse decisions, planning, kernels"),
    Column("attention_speedup", "speed-up", "{:.2f}×", "dense attention's seconds over this method's, same prompt and seed"),
    Column("total_s", "end to end s", "{:.2f}", "seconds in the denoising model, without text encoder and decoder"),
    Column("total_speedup", "speed-up", "{:.2f}×", "the dense model's seconds over this method's, same prompt and seed"),
]  # fmt: skip


def columns(conventions: dict[str, str]) -> list[Column]:
    """All columns; a metric that somebody registered gets one of its own, before the density."""
    known = {c.key for c in COLUMNS}
    more = [Column(n, n, "{:.4f}", text) for n, text in conventions.items() if n not in known]
    place = next(i for i, c in enumerate(COLUMNS) if c.key == "density")
    return COLUMNS[:place] + more + COLUMNS[place:]


# ---------------------------------------- statistics


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % confidence interval (Student's t); half-width 0 for a single value."""
    array = np.asarray([v for v in values if v is not None and math.isfinite(v)], float)
    if array.size == 0:
        return math.nan, 0.0
    if array.size == 1:
        return float(array[0]), 0.0
    return float(array.mean()), float(student_t(array.size - 1) * array.std(ddof=1) / math.sqrt(array.size))


def speedup(rows: Sequence[dict], base: Sequence[dict], key: str) -> tuple[float, float, float]:
    """Geometric mean of dense over row, with the ends of its 95 % interval.

    A row knows what dense took beside it, in turns with it; without that, the dense row of the same (prompt, seed) serves.
    One row alone has the interval of its steps (`timing.step_interval`). Rows without times do not count.
    """
    rows, base = timed(rows), timed(base)
    by_case = {(r["prompt"], r["seed"]): r[key] for r in base}
    logs = []
    for row in rows:
        dense = (row.get("reference_s") or {}).get(key) or by_case.get((row["prompt"], row["seed"]))
        if dense and min(dense, row[key]) > 0:
            logs.append(math.log(dense / row[key]))
    middle, half = interval(logs)
    if len(logs) == 1:
        half = timing.step_interval(rows[0].get("reference_steps_s") or [], rows[0].get("steps_s") or [])
    low, mean, high = np.exp(np.clip([middle - half, middle, middle + half], -99, 99))
    return float(mean), float(low), float(high)


def timed(rows: Sequence[dict]) -> list[dict]:
    """The rows whose times were measured."""
    return [r for r in rows if r.get("timed", True)]


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
    """One entry a method: means over prompts and seeds, speed-ups over dense with confidence intervals."""
    rows = results["rows"]
    dense = [r for r in rows if r["method"] == "dense"]
    names = dict.fromkeys(r["method"] for r in rows)
    return [_summary([r for r in rows if r["method"] == n], dense, results.get("conventions", {})) for n in names]


def _summary(mine: list[dict], dense: list[dict], conventions: dict) -> dict[str, Any]:
    entry: dict[str, Any] = {"method": mine[0]["method"], "n": len(mine)}
    for key in (*JUDGES, *conventions):
        values = [r[key] for r in mine if r.get(key) is not None]
        if values:
            entry[key], entry[f"{key}_ci"] = interval(values)
    for key in ("attention_s", "total_s"):
        entry[key] = interval([r[key] for r in timed(mine)])[0]
        name = key.replace("_s", "_speedup")
        entry[name], *entry[f"{name}_ci"] = speedup(mine, dense, key)
    for key in ("density", "cost", "dense_share", "refresh_rate"):
        values = [r[key] for r in mine if r.get(key) is not None]
        entry[key] = interval(values)[0] if values and mine[0]["method"] != "dense" else None
    parts = [r["parts_s"] for r in timed(mine) if r.get("parts_s")]
    entry["parts_s"] = {k: float(np.mean([p.get(k) or 0.0 for p in parts])) for k in parts[0]} if parts else {}
    entry["dense_reasons"] = _reasons(mine)
    return entry


def _reasons(rows: Sequence[dict]) -> dict[str, int]:
    """Why calls ran dense, most frequent first, summed over rows."""
    total: dict[str, int] = {}
    for row in rows:
        for reason, count in (row.get("dense_reasons") or {}).items():
            total[reason] = total.get(reason, 0) + int(count or 0)
    return dict(sorted(total.items(), key=lambda item: -item[1]))


# ---------------------------------------- as text


def spread(entry: dict, key: str) -> str:
    """The 95 % interval of a method's "attention" or "total" speed-up; empty where one video has too few steps for it."""
    ends = entry.get(f"{key}_speedup_ci") or ()
    if not ends or not all(_number(end) for end in ends):
        return ""
    low, high = ends
    return f"{low:.2f}–{high:.2f}" if low < high or entry.get("n", 1) > 1 else ""


def spread_lines(summary: Sequence[dict]) -> list[str]:
    """How sure the speed-ups are, a line a method."""
    lines = []
    for e in summary:
        known = [
            f"{what} {e[f'{key}_speedup']:.2f}× ({spread(e, key)})"
            for key, what in (("attention", "attention"), ("total", "end to end"))
            if spread(e, key)
        ]
        if known and e["method"] != "dense":
            over = "prompts and seeds" if e["n"] > 1 else "steps"
            lines.append(f"{e['method']}: {', '.join(known)}; 95 % intervals over {over}")
    return lines


def cells(summary: Sequence[dict], conventions: dict[str, str] | None = None) -> tuple[list[Column], list[list[str]]]:
    """The columns that some method fills, and each method's text cells (the first is its name)."""
    used = [c for c in columns(conventions or {}) if any(_number(e.get(c.key)) for e in summary)]
    body = [[e["method"], *(_cell(e.get(c.key), c.form) for c in used)] for e in summary]
    return [Column("method", "method", "{}", "how attention was computed"), *used], body


def empty_cells(summary: Sequence[dict], results: dict) -> list[str]:
    """Why cells of the table are empty, a sentence for each method or judge that has some."""
    conventions = results.get("conventions", {})
    head, body = cells(summary, conventions)
    given = results.get("empty")
    judged: dict = given if isinstance(given, dict) else {}
    sentences = []
    for entry, texts in zip(summary, body):
        reasons: dict[str, list[str]] = {}
        for column, text in zip(head, texts):
            if text == "–" and column.key not in judged:
                reasons.setdefault(_why_empty(column.key, entry, conventions), []).append(column.heading)
        told = "; ".join(f"{', '.join(dict.fromkeys(names))} ({reason})" for reason, names in reasons.items())
        sentences += [f"Empty for {entry['method']}: {told}."] if told else []
    return [*sentences, *(str(reason) for reason in judged.values())]


def _why_empty(key: str, entry: dict, conventions: dict) -> str:
    if key in JUDGES:
        return "the judge has not been run there"
    if entry["method"] == "dense":
        return "it is the reference" if key in conventions else "it has no masks"
    if entry.get("dense_share") == 1.0 and key in ("cost", "refresh_rate"):
        return "every call ran dense"
    if key in ("attention_s", "attention_speedup", "total_s", "total_speedup"):
        return "its times were not measured"
    return "not in the records: run the comparison again"


def _cell(value: Any, form: str) -> str:
    return form.format(value) if _number(value) else "–"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def markdown(summary: Sequence[dict], results: dict | None = None) -> str:
    """The table as Markdown, with how sure its speed-ups are and the conventions of its metrics underneath."""
    conventions = (results or {}).get("conventions", {})
    head, body = cells(summary, conventions)
    lines = [
        "| " + " | ".join(c.heading for c in head) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    lines += [f"\n{line}." for line in spread_lines(summary)]
    lines += [f"\n{name}: {text}." for name, text in conventions.items()]
    lines += [f"\n{reason}" for reason in empty_cells(summary, results or {})]
    for line in (devices_line(results), timing.verdict(results.get("rows", []))) if results else ():
        lines += [f"\n{line[0].upper()}{line[1:]}."] if line else []
    return printable("\n".join(lines) + "\n", keep="\n")


def text_table(summary: Sequence[dict], conventions: dict[str, str] | None = None) -> str:
    """The table for a terminal, columns aligned; no text of a results file can steer it."""
    head, body = cells(summary, conventions)
    lines = [[c.heading for c in head], *body]
    widths = [max(len(row[i]) for row in lines) for i in range(len(head))]
    texts = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in lines
    ]
    return "\n".join(map(printable, [texts[0], "-" * len(texts[0]), *texts[1:]]))


def reuse_lines(results: dict) -> list[str]:
    """For each backbone that also ran with mask reuse: what that took off, one line each."""
    rows, lines = {e["method"]: e for e in summarise(results)}, []
    for name, entry in rows.items():
        backbone, _, part = name.partition("+")
        if part not in ("tmr", "heart", "joint") or backbone not in rows:
            continue
        base = rows[backbone]
        before, after = (sum(e["parts_s"].get(k, 0.0) for k in ("prediction", "planning")) for e in (base, entry))
        if not before or not _number(entry["attention_s"]):
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


def devices_line(results: dict) -> str:
    """How many devices of which kind took part, in one line; empty for results that do not say."""
    kinds = results.get("provenance", {}).get("devices")
    if not isinstance(kinds, dict) or not kinds:
        return ""
    listed = " and ".join(f"{count} × {kind}" for kind, count in kinds.items())
    return f"made on {listed}; a speed-up is always over dense on the same device"


def notes(summary: Sequence[dict], results: dict) -> list[str]:
    """What must be known of a table, a sentence each: spreads, empty cells, doubts about times, devices."""
    rows = results["rows"]
    doubts = (timing.verdict(rows), timing.untimed(rows), devices_line(results))
    return [*spread_lines(summary), *empty_cells(summary, results), *(text for text in doubts if text)]


def write_tables(results: dict, out: str | Path) -> list[dict]:
    """`table.md`, `table.csv` and `table.json` beside the results; returns the summary."""
    summary = summarise(results)
    write_atomic(Path(out) / "table.md", markdown(summary, results))
    write_json(Path(out) / "table.json", finite(summary))
    buffer = io.StringIO()
    head, body = cells(summary, results.get("conventions", {}))
    csv.writer(buffer).writerows([[c.heading for c in head], *body])
    write_atomic(Path(out) / "table.csv", buffer.getvalue())
    return summary


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: None in their place, in lists and dicts too."""
    if isinstance(value, list):
        return [finite(v) for v in value]
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
