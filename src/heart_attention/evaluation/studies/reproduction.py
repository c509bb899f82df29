"""Fills docs/reproduction.md: the paper's values, ours on the embedded model, the control's, and the commands."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from ...errors import HeartError
from ...files import read_json, write_atomic
from .. import results as files
from .. import tables
from . import ABLATIONS, STUDIES
from .common import PAPER_BACKBONES
from .frequency import PAPER_MORE

STUDIES_MARKS = ("<!-- figures: made by heart study all -->", "<!-- /figures of studies -->")
COMPARED_MARKS = ("<!-- figures: made by heart compare -->", "<!-- /figures of compare -->")
ABLATIONS_MARKS = ("<!-- figures: made by heart ablate all -->", "<!-- /figures of ablations -->")
MARKS = {"studies": STUDIES_MARKS, "ablations": ABLATIONS_MARKS, "compare": COMPARED_MARKS}
MAIN_MODEL = "tiny"  # comparisons of other models stand between marks that name them


def _f(value, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


# Study, what is shown, the paper's value, where it lies in the finding ("*": once for every backbone), digits.
ROWS = (
    ("iou", "adjacent-step token IoU, mean", "figure", "token_iou_mean", 3),
    ("iou", "… lowest head", "figure", "token_iou_head_min", 3),
    ("iou", "… highest head", "figure", "token_iou_head_max", 3),
    ("iou", "adjacent-step IoU of predicted masks, *", "not given", "mask_iou/*", 3),
    ("drift", "Spearman, token IoU and full-token drift", "−0.791", "full", 3),
    ("drift", "Spearman, token IoU and mean-pooled drift", "−0.757", "mean", 3),
    ("drift", "… inside single heads, mean-pooled", "not given", "mean_within_head", 3),
    ("timesteps", "swing of a head's sparsity over steps, mean, *", "figure", "*/swing_mean", 3),
    ("response", "lowest sparsity of a head at τ=0.9, *", "figure", "*/sparsity_min", 3),
    ("response", "highest sparsity of a head at τ=0.9, *", "figure", "*/sparsity_max", 3),
    ("response", "velocity error, worst head / median head, *", "figure", "*/error_ratio_max_to_median", 1),
)


def _study_rows(found: dict[str, dict]) -> list[tuple[str, ...]]:
    """(what, paper, ours, control, command) for each study that was run."""
    rows = []
    for study, what, paper, path, digits in ROWS:
        if study not in found:
            continue
        for backbone in PAPER_BACKBONES if "*" in path else ("",):
            sides = [_at(found[study].get(side), path.replace("*", backbone)) for side in ("trained", "control")]
            values = (_f(value, digits) for value in sides)
            rows.append((what.replace("*", backbone), paper, *values, f"heart study {study}"))
    if "frequency" in found:
        for band, paper in found["frequency"]["paper"].items():
            rows.append(_frequency_row(found["frequency"], band, paper))
    return rows


def _frequency_row(found: dict, band: str, paper: float) -> tuple[str, ...]:
    """PSNR, SSIM and LPIPS with noise in one band, as the paper's Table 1 has them; LPIPS where its weights were at hand."""
    measures = (("psnr", 2), ("ssim", 4), ("lpips_alex", 4))
    sides = [
        ", ".join(_f(_at(found[side], f"{band}/{name}"), digits) for name, digits in measures)
        if found.get(side)
        else "–"
        for side in ("trained", "control")
    ]
    theirs = ", ".join([f"{paper:.2f}", *(f"{x:.4f}" for x in PAPER_MORE[band])])
    return f"PSNR dB, SSIM, LPIPS with noise in {band}", theirs, *sides, "heart study frequency"


def _at(values: dict | None, path: str) -> float | None:
    """What lies at a path of nested dicts; None if it is not there."""
    here: Any = values
    for name in path.split("/"):
        here = here.get(name) if isinstance(here, dict) else None
    return here


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    head = ["| what | paper, Wan2.1-1.3B | embedded model | random weights | command |", "|---|---|---|---|---|"]
    return head + [f"| {a} | {b} | {c} | {d} | `{e}` |" for a, b, c, d, e in rows]


def _paragraphs(found: dict[str, dict]) -> list[str]:
    return [_wrapped(f"**{name}.** {finding['finding']}") for name, finding in found.items()]


def _wrapped(text: str) -> str:
    """A paragraph in lines that an editor shows whole."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _ablations(folder: Path) -> list[str]:
    lines = []
    for name in ABLATIONS:
        table, finding = folder / f"{name}.md", folder / f"{name}.finding.txt"
        if table.is_file():
            lines += [f"### {name}\n", table.read_text(), f"`heart ablate {name}`\n"]
            lines += [_wrapped(finding.read_text())] if finding.is_file() else []
    return lines


def _compared(folder: Path) -> list[str]:
    """The main table with what must be known of it."""
    if not (folder / "table.md").is_file():
        return []
    made = files.load(folder)
    cases, facts = {(r["prompt"], r["seed"]) for r in made["rows"]}, made["provenance"]
    call = facts.get("call", {})
    size = f"{call.get('width')}×{call.get('height')}, {call.get('num_frames')} frames, {call.get('num_inference_steps')} steps"
    head = f"{len(cases)} prompts and seeds, {size}, version {facts.get('heart')}:\n"
    return [head, (folder / "table.md").read_text(), *(f"{line}.\n" for line in tables.reuse_lines(made))]


def fill(
    page: str | Path, studies: str | Path | None = None, ablations: str | Path | None = None,
    compared: str | Path | None = None,
) -> Path:  # fmt: skip
    """Rewrite the parts of the page between its marks for which a folder is given and has data; the rest stays."""
    page = Path(page)
    text = page.read_text()
    if studies is not None:
        found = _findings(Path(studies))
        body = ["## Observations\n", *_table(_study_rows(found)), "", *_paragraphs(found)] if found else []
        text = _between(text, STUDIES_MARKS, body)
    if ablations is not None:
        lines = _ablations(Path(ablations))
        text = _between(text, ABLATIONS_MARKS, ["## Ablations\n", *lines] if lines else [])
    if compared is not None:
        made = (Path(compared) / "table.md").is_file()
        model = files.load(compared)["provenance"].get("model") if made else MAIN_MODEL
        text = _between(text, marks_of("compare", model), _compared(Path(compared)))
    return write_atomic(page, text)


def _findings(folder: Path) -> dict[str, dict]:
    """What each study found, as far as it was run."""
    return {n: read_json(folder / f"{n}.json") for n in STUDIES if (folder / f"{n}.json").is_file()}


def marks_of(part: str, model: str | None = MAIN_MODEL) -> tuple[str, str]:
    """The lines between which "studies", "ablations" or "compare" stands, the last of this model."""
    begin, end = MARKS[part]
    if part != "compare" or model in (None, MAIN_MODEL):
        return begin, end
    return begin.replace("compare", f"compare --model {model}"), end.replace("compare", f"compare --model {model}")


def check_page(page: str | Path, part: str, model: str | None = MAIN_MODEL) -> None:
    """Raise unless the page has the marks of that part."""
    _check_marks(Path(page).read_text(encoding="utf-8", errors="replace"), marks_of(part, model))


def _check_marks(text: str, marks: tuple[str, str]) -> None:
    start, end = marks
    if start not in text or end not in text.partition(start)[2]:
        raise HeartError(f"the page has no lines {start!r} and {end!r}: put them where the figures shall stand")


def _between(text: str, marks: tuple[str, str], body: list[str]) -> str:
    """The text with what stands between two marks replaced; unchanged if there is nothing to put there."""
    start, end = marks
    if not body:
        return text
    _check_marks(text, marks)
    before, _, rest = text.partition(start)
    return f"{before}{start}\n\n" + "\n".join(body) + f"\n{end}{rest.partition(end)[2]}"
