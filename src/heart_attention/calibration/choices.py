"""What heads chose: how many took which kind of operating point in which phase, as a table and as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import printable
from .file import Calibration

# One hue a kind; thresholds go from pale (low) to full (high).
HUES = ((194, 49, 74), (58, 110, 168), (217, 138, 31), (47, 143, 107), (122, 79, 181), (138, 109, 59), (31, 159, 181))


class Kind(NamedTuple):
    """Points that differ in nothing but the threshold."""

    backbone: str
    rest: str
    order: str

    def words(self) -> str:
        """For a legend."""
        return f"{self.backbone}, {self.order}, rest {self.rest}"


def kind_of(point: dict[str, Any]) -> Kind:
    """The kind of a point; a backbone with other settings than its namesakes counts as theirs."""
    order = point["order"] if isinstance(point["order"], str) else "by head"
    return Kind(point["backbone"]["name"], point["rest"], order)


def choices(calibration: Calibration) -> list[dict[str, Any]]:
    """How many heads took each point in each phase, points that nobody took left out."""
    rows = []
    for k, point in enumerate(calibration.points):
        heads = [int((table == k).sum()) for table in by_phase(calibration)]
        if sum(heads):
            rows.append({**kind_of(point)._asdict(), "threshold": point["threshold"], "heads": heads})
    return rows


def by_phase(calibration: Calibration) -> np.ndarray:
    """The choice as [phases, layers, heads]."""
    return calibration.choice if calibration.phase_count > 1 else calibration.choice[None]


def markdown(calibration: Calibration) -> str:
    """The table of choices: a line a point, a column a phase, and the sum of each kind."""
    phases = range(calibration.phase_count)
    head = ["backbone", "order", "rest", "threshold", *(f"phase {p}" for p in phases)]
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|---:|" + "---:|" * len(phases)]
    rows = choices(calibration)
    for kind in dict.fromkeys(Kind(r["backbone"], r["rest"], r["order"]) for r in rows):
        mine = [r for r in rows if (r["backbone"], r["rest"], r["order"]) == tuple(kind)]
        for r in mine:
            lines.append(_line(kind, f"{r['threshold']:g}", r["heads"]))
        if len(mine) > 1:
            lines.append(_line(kind, "all", np.sum([r["heads"] for r in mine], axis=0).tolist()))
    return "\n".join(lines) + "\n"


def _line(kind: Kind, threshold: str, heads: list[int]) -> str:
    return printable("| " + " | ".join([kind.backbone, kind.order, kind.rest, threshold, *map(str, heads)]) + " |")


# ---------------------------------------- a picture


def colours(calibration: Calibration) -> np.ndarray:
    """RGB of every point, [K, 3]: the hue of its kind, the stronger the higher its threshold."""
    kinds = list(dict.fromkeys(map(kind_of, calibration.points)))
    out = []
    for point in calibration.points:
        alike = sorted({p["threshold"] for p in calibration.points if kind_of(p) == kind_of(point)})
        share = (alike.index(point["threshold"]) + 1) / len(alike)
        hue = np.array(HUES[kinds.index(kind_of(point)) % len(HUES)], float)
        out.append(255 - (0.25 + 0.75 * share) * (255 - hue))
    return np.rint(out).astype(np.uint8)


def picture(calibration: Calibration, path: str | os.PathLike) -> Path:
    """Which point every head takes, a grid of layers and heads for each phase, as a PNG."""
    from PIL import Image, ImageDraw, ImageFont

    font, c = ImageFont.load_default(size=12), calibration
    cell = max(6, min(26, 900 // max(c.heads * c.phase_count, c.layers)))
    legend = _legend(c)
    width = 40 + c.phase_count * (c.heads * cell + 24)
    top, bottom = 44, 44 + c.layers * cell + 30
    canvas = Image.new("RGB", (max(width, 560), bottom + 18 * len(legend) + 8), "white")
    draw, palette = ImageDraw.Draw(canvas), colours(c)
    draw.text(
        (8, 6), f"{c.layers} layers of {c.heads} heads: which operating point each takes", fill="black", font=font
    )
    for phase, table in enumerate(by_phase(c)):
        left = 40 + phase * (c.heads * cell + 24)
        tiles = np.kron(palette[table], np.ones((cell, cell, 1), np.uint8))
        tiles[cell - 1 :: cell], tiles[:, cell - 1 :: cell] = 255, 255
        canvas.paste(Image.fromarray(tiles), (left, top))
        draw.text((left, top - 18), f"phase {phase}" if c.phase_count > 1 else "heads", fill="black", font=font)
    for layer in range(0, c.layers, max(1, 16 // cell)):
        draw.text((14, top + layer * cell + (cell - 14) / 2), str(layer), fill="black", font=font)
    for i, (words, shades) in enumerate(legend):
        y = bottom + 18 * i
        for j, (threshold, colour) in enumerate(shades):
            x = 40 + 40 * j
            draw.rectangle((x, y, x + 12, y + 12), fill=tuple(int(v) for v in colour))
            draw.text((x + 15, y - 1), f"{threshold:g}", fill="black", font=font)
        draw.text((50 + 40 * max(len(s) for _, s in legend), y - 1), words, fill="black", font=font)
    canvas.save(path, format="PNG")
    return Path(path)


def _legend(calibration: Calibration) -> list[tuple[str, list[tuple[float, np.ndarray]]]]:
    """For each kind that somebody took: words with the number of heads by phase, and its thresholds' colours."""
    palette, out = colours(calibration), []
    rows = choices(calibration)
    for kind in dict.fromkeys(Kind(r["backbone"], r["rest"], r["order"]) for r in rows):
        shades = {p["threshold"]: palette[k] for k, p in enumerate(calibration.points) if kind_of(p) == kind}
        mine = [r["heads"] for r in rows if (r["backbone"], r["rest"], r["order"]) == tuple(kind)]
        heads = ", ".join(map(str, np.sum(mine, axis=0).tolist()))
        out.append((f"{kind.words()}: {heads} heads", sorted(shades.items())))
    return out
