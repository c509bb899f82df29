"""Speed against quality with several budgets a method, as SVG text: curves with intervals, named beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .plots import _mark, _nice, _svg, _text, escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760.0, 440.0, 52.0, 20.0, 16.0, 44.0
COLOURS = ("#c2314a", "#3a6ea8", "#d98a1f", "#2f8f6b", "#7a4fb5", "#8a6d3b", "#4a4a52", "#1f9fb5", "#b5447a", "#7f8c2d")
CSS = "".join(
    f"svg .f{i} {{ --family: {colour} }} " for i, colour in enumerate(COLOURS)
) + (
    "svg .curve { fill: none; stroke: var(--family); stroke-width: 2 } svg .spot { fill: var(--family) } "
    "svg .whisker { stroke: var(--family); stroke-opacity: .45; stroke-width: 1.2 } "
    "svg .family { font: 600 12px system-ui, sans-serif; fill: var(--family) } "
    "svg .budget { font: 9px system-ui, sans-serif; fill: var(--family) } "
)  # fmt: skip


class Spot(NamedTuple):
    """A method in the plane: name, what its budget is called, speed-up, quality and half of its 95 % interval."""

    name: str
    budget: str
    x: float
    y: float
    half: float


class _Box(NamedTuple):
    """A rectangle that something stands in."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: _Box) -> float:
        """The area that both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(across, 0.0) * max(down, 0.0)


class _Frame:
    """The plane: from values to pixels, and what stands where already."""

    def __init__(self, spots: Sequence[Spot]) -> None:
        xs = [s.x for s in spots]
        ys = [y for s in spots for y in (s.y - s.half, s.y + s.half)]
        pad_x, pad_y = (max(xs) - min(xs)) * 0.08 or 0.2, (max(ys) - min(ys)) * 0.06 or 0.5
        self.x0, self.x1, self.y0, self.y1 = min(xs) - pad_x, max(xs) + pad_x, min(ys) - pad_y, max(ys) + pad_y
        self.taken: list[_Box] = []

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        across = LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (HEIGHT - BOTTOM - TOP)

    def occupy(self, x: float, y: float, radius: float) -> None:
        """Something round stands here."""
        self.taken.append(_Box(x - radius, y - radius, x + radius, y + radius))

    def label(self, text: str, spots: Sequence[tuple[float, float]], css: str, size: float) -> str:
        """A text beside one of these pixels, where it covers least."""
        wide = 0.58 * size * len(text)
        beside = [(x, y) for y in (4, -7, 15) for x in (8, -8 - wide)]
        offsets = [*beside[:2], (-wide / 2, -8), (-wide / 2, 8 + size), *beside[2:]]
        boxes = [_Box(x + dx, y + dy - size, x + dx + wide, y + dy + 2) for x, y in spots for dx, dy in offsets]
        best = min(boxes, key=self._covered)
        self.taken.append(best)
        return _text(best.left, best.bottom - 2, text, "start", css)

    def _covered(self, box: _Box) -> float:
        inside = _Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
        area = (box.right - box.left) * (box.bottom - box.top)
        return sum(box.overlap(other) for other in self.taken) + 4 * (area - box.overlap(inside))

    def grid(self) -> list[str]:
        """Lines at round numbers with their values."""
        body = []
        for x in _nice(self.x0, self.x1):
            px, _ = self.place(x, self.y0)
            body.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            body.append(_text(px, HEIGHT - BOTTOM + 16, f"{x:g}×"))
        for y in _nice(self.y0, self.y1):
            _, py = self.place(self.x0, y)
            body.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>')
            body.append(_text(LEFT - 8, py + 4, f"{y:g}", "end"))
        return body


def curves(families: Mapping[str, Sequence[Spot]], ahead: Sequence[str], x_name: str, y_name: str, label: str) -> str:
    """One curve a family, a dot a budget with its 95 % interval; the dashed line joins the names in `ahead`."""
    families = {name: [s for s in spots if math.isfinite(s.x + s.y)] for name, spots in families.items()}
    spots = {s.name: s for family in families.values() for s in family}
    if not spots:
        return _svg(WIDTH, 40, [_text(WIDTH / 2, 24, "no method has both times and a PSNR")], label)
    frame = _Frame(list(spots.values()))
    body = frame.grid()
    joined = [frame.place(spots[n].x, spots[n].y) for n in ahead if n in spots]
    if len(joined) > 1:
        body.append(f'<polyline class="front" points="{_path(joined)}"/>')
    for i, family in enumerate(families.values()):
        body += _curve(frame, family, f"f{i % len(COLOURS)}", x_name, y_name)
    for i, (name, family) in enumerate(families.items()):
        body += _names(frame, name, family, f"f{i % len(COLOURS)}")
    body.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_name))
    turned = f'transform="translate(13 {HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
    body.append(f'<text class="label" {turned}>{escape(y_name)}</text>')
    return _svg(WIDTH, HEIGHT, body, label)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _curve(frame: _Frame, family: Sequence[Spot], css: str, x_name: str, y_name: str) -> list[str]:
    """The line, intervals and dots of one family."""
    pixels = [frame.place(s.x, s.y) for s in family]
    body = [f'<polyline class="curve {css}" points="{_path(pixels)}"/>'] if len(pixels) > 1 else []
    for spot, (x, y) in zip(family, pixels):
        high, low = frame.place(spot.x, spot.y + spot.half)[1], frame.place(spot.x, spot.y - spot.half)[1]
        if spot.half:
            body.append(f'<line class="whisker {css}" x1="{x:.1f}" x2="{x:.1f}" y1="{high:.1f}" y2="{low:.1f}"/>')
        half = f" ± {spot.half:.2f}" if spot.half else ""
        tip = f"{spot.name}: {x_name} {spot.x:.2f}×, {y_name} {spot.y:.2f}{half}"
        body.append(_mark("circle", tip, class_=f"spot {css}", tabindex="0", cx=f"{x:.1f}", cy=f"{y:.1f}", r=5))
        frame.occupy(x, y, 6)
    return body


def _names(frame: _Frame, name: str, family: Sequence[Spot], css: str) -> list[str]:
    """The family's name at one end of its curve, and the budgets at its dots."""
    pixels = [frame.place(s.x, s.y) for s in family]
    if not pixels:
        return []
    body = [frame.label(name, [pixels[-1], pixels[0]], f"family {css}", 12)]
    if len(family) > 1:
        body += [frame.label(s.budget, [p], f"budget {css}", 9) for s, p in zip(family, pixels) if s.budget]
    return body
