"""`Stats` in a notebook: the summary, a picture of how dense each head was, the table of layers."""

from __future__ import annotations

from html import escape
from typing import Any

CELL = 14  # pixels a head
DENSE, SPARSE = (32, 70, 130), (240, 244, 250)  # colours of density 1 and 0
COLUMNS = ("layer", "calls", "dense", "density", "refresh", "drift", "attention ms", "all ms")


def html(data: dict[str, Any], summary: list[str]) -> str:
    """The page part that a notebook shows."""
    lines = "<br>".join(escape(line) for line in summary)
    pictures = "".join(_picture(data, transformer) for transformer in _transformers(data))
    rows = "".join(_row(layer) for layer in data["layers"])
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    return f"<div><p>{lines}</p>{pictures}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _transformers(data: dict[str, Any]) -> list[int]:
    return sorted({record["transformer"] for record in data["records"]})


def head_densities(data: dict[str, Any], transformer: int) -> list[list[float | None]]:
    """Density [layer][head] of the last generation, mean over steps and branches; None for a head that was never seen."""
    records = [record["density"] for record in data["records"] if record["transformer"] == transformer]
    layers, heads = len(records[0]), len(records[0][0][0]) if records[0] and records[0][0] else 0
    table: list[list[float | None]] = []
    for layer in range(layers):
        seen = [[step[head] for record in records for step in record[layer]] for head in range(heads)]
        table.append([_mean(values) for values in seen])
    return table


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _picture(data: dict[str, Any], transformer: int) -> str:
    """One square a head, a row a layer: the darker, the denser; the number shows under the pointer."""
    table = head_densities(data, transformer)
    width, height = CELL * max((len(row) for row in table), default=0), CELL * len(table)
    squares = "".join(_square(x, y, value) for y, row in enumerate(table) for x, value in enumerate(row))
    name = f"transformer {transformer}: " if transformer else ""
    title = f"{name}density of every head in the last generation, a row a layer, dense steps counted as 1"
    return f'<p>{title}</p><svg width="{width}" height="{height}" role="img" aria-label="{title}">{squares}</svg>'


def _square(x: int, y: int, value: float | None) -> str:
    shown = "never seen" if value is None else f"{value:.2f}"
    mixed = [round(a + (value or 0.0) * (b - a)) for a, b in zip(SPARSE, DENSE)]
    colour = "none" if value is None else f"rgb({mixed[0]},{mixed[1]},{mixed[2]})"
    size = CELL - 1
    place = f'x="{x * CELL}" y="{y * CELL}" width="{size}" height="{size}"'
    return f'<rect {place} fill="{colour}" stroke="#ccc"><title>layer {y}, head {x}: {shown}</title></rect>'


def _row(layer: dict[str, Any]) -> str:
    name = f"{layer['transformer']}.{layer['layer']}" if layer["transformer"] else str(layer["layer"])
    means = [_number(layer[key]) for key in ("density", "refresh_rate", "drift")]
    times = [f"{layer['time'][part] * 1e3:.2f}" for part in ("attention", "total")]
    cells = [name, str(layer["calls"]), str(layer["dense_calls"]), *means, *times]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
