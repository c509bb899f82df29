"""What the engine's statistics say of single heads: threshold, density, refreshes, and the states over steps."""

from __future__ import annotations

from typing import Any

Grid = list[list[float | None]]


def thresholds(stats: dict, layers: int, heads: int) -> Grid:
    """The thresholds in force as [layer][head], whatever form the config has them in."""
    config = (stats.get("config") or {}).get("_data", stats.get("config") or {})
    value: Any = config.get("thresholds")
    if isinstance(value, dict):  # a calibration, written out
        value = value.get("thresholds")
    while isinstance(value, list) and value and isinstance(value[0], list) and isinstance(value[0][0], list):
        value = value[0]  # several transformers: show the first
    if isinstance(value, int | float):
        return [[float(value)] * heads for _ in range(layers)]
    if isinstance(value, list) and value and not isinstance(value[0], list):
        return [[float(v) for v in value] for _ in range(layers)]
    return value if isinstance(value, list) else [[None] * heads for _ in range(layers)]


def _sparse_mean(record: dict, key: str) -> Grid:
    """Mean over the steps that ran sparse, [layer][head]; None for a layer that never did."""
    grid: Grid = []
    for values, dense in zip(record[key], record["dense"]):
        kept = [step for step, was_dense in zip(values, dense) if was_dense is False]
        grid.append([_mean([step[h] for step in kept]) for h in range(len(values[0]))])
    return grid


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _states(record: dict) -> list[list[str]]:
    """For each layer and head one letter a step: d dense, n new mask, r reused."""
    table = []
    for values, dense in zip(record["refreshed"], record["dense"]):
        heads = len(values[0])
        table.append(
            ["".join(_letter(step[h], was_dense) for step, was_dense in zip(values, dense)) for h in range(heads)]
        )
    return table


def _letter(refreshed: float | None, dense: bool | None) -> str:
    if dense is not False or refreshed is None:
        return "d"
    return "n" if refreshed > 0 else "r"


def view(stats: dict) -> dict[str, Any] | None:
    """Threshold, density and refresh share by [layer][head] and the timeline, of the first branch recorded."""
    records = [r for r in stats.get("records") or [] if r.get("density") and r["density"][0]]
    if not records:
        return None
    record = records[0]
    layers, heads = len(record["density"]), len(record["density"][0][0])
    return {
        "branch": record["branch"],
        "threshold": thresholds(stats, layers, heads),
        "density": _sparse_mean(record, "density"),
        "refresh": _sparse_mean(record, "refreshed"),
        "timeline": _states(record),
    }
