"""Puts the README's table between its marks, from a results folder, and checks the size of the pictures beside it.

python tools/front_page.py DIR     (the last part of `make front-page`)
"""

from __future__ import annotations

import sys
from pathlib import Path

from heart_attention.errors import HeartError
from heart_attention.evaluation import results, tables, timing
from heart_attention.files import write_atomic

ROOT = Path(__file__).parents[1]
PICTURES = ("demo.webp", "front.svg")
MARKS = ("<!-- made by make front-page -->", "<!-- /made by make front-page -->")
LARGEST = 2_000_000  # bytes of a picture on the front page
HEAD = "| method | PSNR to dense | density | attention | end to end |\n|---|---:|---:|---:|---:|"


def table(made: dict) -> str:
    """The few columns that a front page needs, and where they come from."""
    cases, where = len({(r["prompt"], r["seed"]) for r in made["rows"]}), made.get("provenance", {})
    facts = (
        f"{cases} video{'s' * (cases > 1)} a method, {where.get('threads')} threads of a CPU ({where.get('machine')})."
    )
    lines = [HEAD, *map(_line, tables.summarise(made)), "", f"`{command(made)}`:", facts]
    if doubt := timing.verdict(made["rows"]):
        lines.append(f"{doubt[0].upper()}{doubt[1:]}.")
    return "\n".join(lines)


def _line(entry: dict) -> str:
    half = f" ± {entry['psnr_ci']:.1f}" if entry["n"] > 1 and entry.get("psnr") is not None else ""
    psnr = "–" if entry.get("psnr") is None else f"{entry['psnr']:.1f} dB{half}"
    density = "–" if entry.get("density") is None else f"{entry['density']:.2f}"
    speeds = " | ".join(_speed(entry, key) for key in ("attention", "total"))
    return f"| {entry['method']} | {psnr} | {density} | {speeds} |"


def _speed(entry: dict, key: str) -> str:
    """A speed-up with its 95 % interval; dense is the measure of both."""
    spread = tables.spread(entry, key) if entry["method"] != "dense" else ""
    return f"{entry[f'{key}_speedup']:.2f}×" + (f" ({spread})" if spread else "")


def command(made: dict) -> str:
    """What makes these figures again."""
    where = made.get("provenance", {})
    parts = [f"--limit {len({r['prompt'] for r in made['rows']})}"]
    if steps := where.get("call", {}).get("num_inference_steps"):
        parts.append(f"--steps {steps}")
    if len(where.get("seeds", [])) > 1:
        parts.append("--seeds " + ",".join(map(str, where["seeds"])))
    parts.append("--methods " + ",".join(dict.fromkeys(r["method"] for r in made["rows"])))
    return " ".join(["heart compare", *parts])


def put(page: Path, body: str) -> Path:
    """Replace what stands between the marks of a page."""
    before, start, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (start and end):
        raise HeartError(f"{page} has no lines {MARKS[0]!r} and {MARKS[1]!r}: put them where the table shall stand")
    return write_atomic(page, f"{before}{start}\n\n{body}\n\n{end}{after}")


def too_large(folder: Path) -> list[str]:
    """Pictures that a front page should not ask its readers to load."""
    return [name for name in PICTURES if (folder / name).stat().st_size > LARGEST]


def main() -> None:
    """Check the pictures, write the table."""
    if found := too_large(ROOT / "docs" / "images"):
        raise SystemExit(f"docs/images: {', '.join(found)} is over {LARGEST} bytes: make it smaller")
    print(put(ROOT / "README.md", table(results.load(sys.argv[1]))))


if __name__ == "__main__":
    main()
