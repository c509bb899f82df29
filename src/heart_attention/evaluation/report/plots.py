"""Pictures of the report as SVG text: no plotting library, colours from the page's CSS, values on hover and focus."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape as escaped

from ...errors import printable


def escape(text: str) -> str:
    """A text inside SVG: characters that XML cannot hold are shown as "?"."""
    return escaped(printable(text))


def _mark(tag: str, tip: str, **attributes) -> str:
    """One SVG element with a tooltip; `class_` becomes class, other underscores become dashes."""
    parts = " ".join(f'{k.rstrip("_").replace("_", "-")}="{escape(str(v))}"' for k, v in attributes.items())
    return f'<{tag} {parts} data-tip="{escape(tip)}"><title>{escape(tip)}</title></{tag}>'


def _text(x: float, y: float, text: str, anchor: str = "middle", css: str = "label") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


def _svg(width: float, height: float, body: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}" '
        f'style="max-width:{width:.0f}px">{"".join(body)}</svg>'
    )


def heat_map(
    values: Sequence[Sequence[float | None]],
    tip: Callable[[int, int, float | None], str],
    label: str,
    row_name: str,
    column_name: str,
    low: float = 0.0,
    high: float = 1.0,
    cell: float = 22,
) -> str:
    """Rows × columns of cells; the stronger the colour, the nearer to `high`; None is an empty cell."""
    rows, columns = len(values), max((len(r) for r in values), default=0)
    left, top = 46.0, 20.0
    width, height = left + columns * cell + 8, top + rows * cell + 24
    body = [_text(left + columns * cell / 2, 12, column_name), _text(4, top + rows * cell + 16, row_name, "start")]
    every = max(1, math.ceil(columns * 1.0 / max(1, int(columns * cell / 26))))
    for i, row in enumerate(values):
        if rows * cell <= 400 or i % 5 == 0:
            body.append(_text(left - 6, top + (i + 0.68) * cell, str(i), "end"))
        for j, value in enumerate(row):
            share = 0.0 if value is None else min(1.0, max(0.0, (value - low) / ((high - low) or 1.0)))
            style = "fill:var(--none)" if value is None else f"fill:var(--heat);fill-opacity:{0.06 + 0.94 * share:.3f}"
            body.append(
                _mark(
                    "rect", tip(i, j, value), class_="cell", tabindex="-1", x=f"{left + j * cell:.1f}",
                    y=f"{top + i * cell:.1f}", width=f"{cell - 1.5:.1f}", height=f"{cell - 1.5:.1f}", rx=2, style=style,
                )
            )  # fmt: skip
    body += [_text(left + (j + 0.45) * cell, top + rows * cell + 12, str(j)) for j in range(0, columns, every)]
    return _svg(max(width, 150), height, body, label)


STATES = {"d": ("dense", "var(--none)"), "n": ("new mask", "var(--accent)"), "r": ("mask reused", "var(--soft)")}


def timeline(rows: Sequence[tuple[str, str]], label: str) -> str:
    """One line a head, one cell a step: dense, new mask, or mask reused; `rows` are (name, one letter a step)."""
    steps = max((len(states) for _, states in rows), default=1)
    cell, line, left = max(5.0, min(28.0, 900 / steps)), 11.0, 64.0
    body = []
    for i, (name, states) in enumerate(rows):
        if i % max(1, len(rows) // 24) == 0:
            body.append(_text(left - 6, 10 + (i + 0.9) * line, name, "end", "label small"))
        for step, state in enumerate(states):
            what, colour = STATES[state]
            body.append(
                _mark(
                    "rect", f"{name}, step {step}: {what}", class_="cell", tabindex="-1", x=f"{left + step * cell:.1f}",
                    y=f"{10 + i * line:.1f}", width=f"{cell - 1:.1f}", height=f"{line - 1:.1f}", style=f"fill:{colour}",
                )
            )  # fmt: skip
    bottom = 10 + len(rows) * line
    body += [_text(left + (s + 0.5) * cell, bottom + 14, str(s)) for s in range(0, steps, 5 if steps > 12 else 1)]
    body.append(_text(left - 6, bottom + 14, "step", "end"))
    return _svg(left + steps * cell + 10, bottom + 22, body, label)


def _nice(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(s for s in (step / 5, step / 2, step, step * 2) if (high - low) / s <= 6)
    return [round(step * k, 10) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in both coordinates (higher is better), by rising x."""
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1]))
    front, best = [], -math.inf
    for i in order:
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front[::-1]


def _free_height(labels: Sequence[tuple[float, float]], x: float, y: float) -> float:
    """Where a label can stand without lying on one of those that are there already."""
    while any(abs(x - lx) < 150 and abs(y - ly) < 13 for lx, ly in labels):
        y += 13
    return y


def scatter(points: Sequence[dict], x_name: str, y_name: str, label: str) -> str:
    """Speed against quality: `points` have name, x, y; the Pareto front is drawn through the unbeaten ones."""
    width, height, left, bottom, top, right = 760.0, 380.0, 52.0, 44.0, 16.0, 24.0
    points = [p for p in points if math.isfinite(p["x"]) and math.isfinite(p["y"])] or [
        {"name": "", "x": 1.0, "y": 0.0}
    ]
    xs, ys = [p["x"] for p in points], [p["y"] for p in points]
    pad_x, pad_y = (max(xs) - min(xs)) * 0.2 or 0.2, (max(ys) - min(ys)) * 0.25 or 0.5
    x0, x1, y0, y1 = min(xs) - pad_x, max(xs) + pad_x, min(ys) - pad_y, max(ys) + pad_y

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (x - x0) / (x1 - x0) * (width - left - right)
        return across, height - bottom - (y - y0) / (y1 - y0) * (height - bottom - top)

    body = []
    for x in _nice(x0, x1):
        px, _ = place(x, y0)
        body.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{top}" y2="{height - bottom}"/>')
        body.append(_text(px, height - bottom + 16, f"{x:g}"))
    for y in _nice(y0, y1):
        _, py = place(x0, y)
        body.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{py:.1f}" y2="{py:.1f}"/>')
        body.append(_text(left - 8, py + 4, f"{y:g}", "end"))
    front = [place(xs[i], ys[i]) for i in pareto(list(zip(xs, ys)))]
    if len(front) > 1:
        body.append('<polyline class="front" points="' + " ".join(f"{x:.1f},{y:.1f}" for x, y in front) + '"/>')
    labels: list[tuple[float, float]] = []
    for p in points:
        px, py = place(p["x"], p["y"])
        tip = f"{p['name']}: {x_name} {p['x']:.2f}, {y_name} {p['y']:.2f}"
        css = "dot heart" if "+" in p["name"] or p["name"].partition("@")[0] == "heart" else "dot"
        body.append(_mark("circle", tip, class_=css, tabindex="0", cx=f"{px:.1f}", cy=f"{py:.1f}", r=7))
        flip = px > width * 0.7
        height_of_label = _free_height(labels, px, py + 4)
        labels.append((px, height_of_label))
        body.append(
            _text(px + (-11 if flip else 11), height_of_label, p["name"], "end" if flip else "start", "label name")
        )
    body.append(_text((left + width - right) / 2, height - 6, x_name))
    turned = f'transform="translate(13 {height / 2}) rotate(-90)" text-anchor="middle"'
    body.append(f'<text class="label" {turned}>{escape(y_name)}</text>')
    return _svg(width, height, body, label)


def stacked_bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, label: str) -> str:
    """Where the time goes: one bar a method, one colour a part."""
    longest = max((sum(v for _, v in parts) for _, parts in rows), default=1.0) or 1.0
    width, left, line = 640.0, 140.0, 30.0
    body = []
    for i, (name, parts) in enumerate(rows):
        x = left
        body.append(_text(left - 8, i * line + 20, name, "end", "label name"))
        for k, (part, value) in enumerate(parts):
            w = value / longest * (width - left - 70)
            if w > 0:
                body.append(
                    _mark(
                        "rect", f"{name}, {part}: {value:.2f} {unit}", class_=f"bar part{k}", tabindex="0",
                        x=f"{x:.1f}", y=f"{i * line + 5:.1f}", width=f"{w:.1f}", height=20,
                    )
                )  # fmt: skip
            x += w
        body.append(_text(x + 6, i * line + 20, f"{sum(v for _, v in parts):.1f} {unit}", "start"))
    return _svg(width, len(rows) * line + 6, body, label)
