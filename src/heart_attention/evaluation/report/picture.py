"""Pictures for a front page from a results folder: videos side by side as one animation, and speed against quality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...errors import HeartError, named
from ...files import write_atomic
from .. import results as files
from .. import tables, video
from . import plots

STYLE = """
svg { background: #fff } .label { font: 11px system-ui, sans-serif; fill: #66666f } .name { font-size: 12px; fill: #1d1d22 }
.grid { stroke: #e3e1dc } .front { fill: none; stroke: #c2314a; stroke-dasharray: 5 4; stroke-width: 1.5 }
.dot { fill: #3a6ea8 } .dot.heart { fill: #c2314a }
"""


SLOW = 8  # frames a second where a results folder does not tell


def animation(folder: str | Path, out: str | Path, width: int = 200) -> Path:
    """The first prompt's videos side by side, names above them, as an animated GIF or WebP."""
    folder, out = Path(folder), Path(out)
    if out.suffix.lower() not in (".gif", ".webp"):
        raise HeartError(f"an animation cannot be written to {str(out)!r}: give a name that ends in .gif or .webp")
    results = files.load(folder)
    rows, fps = results["rows"], results["provenance"].get("fps")
    case = [r for r in rows if (r["prompt"], r["seed"]) == (rows[0]["prompt"], rows[0]["seed"])]
    clips = [(_caption(r), video.read(folder / r.get("lossless", "?"))) for r in case]
    if len(lengths := dict.fromkeys(len(clip) for _, clip in clips)) > 1:
        counts = ", ".join(map(str, lengths))
        raise HeartError(
            f"the first prompt's videos in {named(folder)!r} have {counts} frames: run the comparison again"
        )
    frames = [_side_by_side([(text, clip[i]) for text, clip in clips], width) for i in range(len(clips[0][1]))]
    return video.write_animation(out, np.stack(frames), fps if isinstance(fps, int) and 0 < fps <= 100 else SLOW)


def _caption(row: dict) -> str:
    return row["method"] + (f"  {row['psnr']:.1f} dB" if row.get("psnr") is not None else "")


def _side_by_side(pictures: list[tuple[str, np.ndarray]], width: int) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont

    height = round(width * pictures[0][1].shape[0] / pictures[0][1].shape[1])
    canvas = Image.new("RGB", (len(pictures) * (width + 6) - 6, height + 24), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=14)
    for i, (text, pixels) in enumerate(pictures):
        draw.text((i * (width + 6) + 2, 3), text, fill="black", font=font)
        canvas.paste(Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST), (i * (width + 6), 24))
    return np.asarray(canvas)


def front(folder: str | Path, out: str | Path) -> Path:
    """Speed against quality as a picture of its own (.svg)."""
    if Path(out).suffix.lower() != ".svg":
        raise HeartError(f"the plot cannot be written to {str(out)!r}: give a name that ends in .svg")
    summary = tables.summarise(files.load(folder))
    points: list[dict[str, Any]] = [
        {"name": e["method"], "x": e["attention_speedup"], "y": e["psnr"]}
        for e in summary
        if e.get("psnr") is not None and e.get("dense_share") != 1
    ]
    if not points:
        raise HeartError(f"{named(folder)} has no sparse method with a PSNR: compare one with dense first")
    drawn = plots.scatter(points, "attention speed-up over dense", "PSNR dB", "speed against quality")
    opened = drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return write_atomic(out, opened.replace(">", f"><style>{STYLE}</style>", 1))
