"""Fills docs/reproduction.md: the paper's values, ours on the embedded model, the control's, and the commands."""

from __future__ import annotations

from pathlib import Path

from ...files import read_json, write_atomic

START, END = "<!-- figures: made by heart study all and heart ablate all -->", "<!-- /figures -->"


def _f(value, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _study_rows(found: dict[str, dict]) -> list[tuple[str, str, str, str, str]]:
    """(what, paper, ours, control, command) for each study that was run."""
    rows = []

    def row(study: str, what: str, paper: str, key: str, digits: int = 3) -> None:
        if study in found:
            sides = [found[study][side] for side in ("trained", "control")]
            rows.append((what, paper, *(_f(s[key], digits) for s in sides), f"heart study {study}"))

    row("iou", "adjacent-step token IoU, mean", "figure", "token_iou_mean")
    row("iou", "… lowest head", "figure", "token_iou_head_min")
    row("iou", "… highest head", "figure", "token_iou_head_max")
    row("iou", "adjacent-step block-mask IoU, mean", "not given", "block_iou_mean")
    row("drift", "Spearman, token IoU and full-token drift", "−0.791", "full")
    row("drift", "Spearman, token IoU and mean-pooled drift", "−0.757", "mean")
    row("drift", "… inside single heads, mean-pooled", "not given", "mean_within_head")
    row("timesteps", "swing of a head's sparsity over steps, mean", "figure", "swing_mean")
    row("response", "lowest sparsity of a head at τ=0.9", "figure", "sparsity_min")
    row("response", "highest sparsity of a head at τ=0.9", "figure", "sparsity_max")
    row("response", "velocity error, worst head / median head", "figure", "error_ratio_max_to_median", 1)
    if "frequency" in found:
        for band, paper in found["frequency"]["paper"].items():
            sides = [_f(found["frequency"][s][band]["psnr"], 2) for s in ("trained", "control")]
            rows.append((f"PSNR with noise in {band}, dB", f"{paper}", *sides, "heart study frequency"))
    return rows


def _table(rows: list[tuple[str, str, str, str, str]]) -> list[str]:
    head = ["| what | paper, Wan2.1-1.3B | embedded model | random weights | command |", "|---|---|---|---|---|"]
    return head + [f"| {a} | {b} | {c} | {d} | `{e}` |" for a, b, c, d, e in rows]


def _paragraphs(found: dict[str, dict]) -> list[str]:
    return [f"**{name}.** {finding['finding']}\n" for name, finding in found.items()]


def _ablations(folder: Path) -> list[str]:
    lines = []
    for name in ("components", "policy", "delta", "objective"):
        table, finding = folder / f"{name}.md", folder / f"{name}.finding.txt"
        if table.is_file():
            lines += [f"### {name}\n", table.read_text(), f"`heart ablate {name}`\n"]
            lines += [finding.read_text() + "\n"] if finding.is_file() else []
    return lines


def fill(page: str | Path, studies: str | Path, ablations: str | Path) -> Path:
    """Rewrite the part of the page between its marks from what lies in the two results folders."""
    page, studies = Path(page), Path(studies)
    names = ("iou", "drift", "timesteps", "response", "frequency", "interactions")
    found = {n: read_json(studies / f"{n}.json") for n in names if (studies / f"{n}.json").is_file()}
    body = ["## Observations\n", *_table(_study_rows(found)), "", *_paragraphs(found)]
    tables = _ablations(Path(ablations))
    if tables:
        body += ["## Ablations\n", *tables]
    text = page.read_text()
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    return write_atomic(page, f"{before}{START}\n\n" + "\n".join(body) + f"\n{END}{after}")
