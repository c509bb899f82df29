"""What happened: counters, densities, refreshes, drift and time by part; as a table to read and a dict to use.

The engine writes one row for every attention call into a `Recorder`; `Recorder.summary()` makes a `Stats`.
Sums over calls are kept since enabling, single rows only for the last generation, so memory does not grow
with use.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from .warmup import FIRST, LAST, DenseSteps

log = logging.getLogger(__name__)

PARTS = ("drift", "prediction", "planning", "attention", "dense")
ALL_DENSE = "every threshold is 1"
ASKED_DENSE = frozenset((FIRST, LAST, ALL_DENSE, "dense layer"))  # what the config asks to be dense


class Timer:
    """Time of consecutive parts of one call: perf_counter on a CPU, events on CUDA (which nobody waits for)."""

    __slots__ = ("cuda", "marks")

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda
        self.marks: list[tuple[str, Any]] = [("", self._now())]

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, part: str) -> None:
        """What was done since the last mark was this part."""
        self.marks.append((part, self._now()))

    def seconds(self, wait: bool = False) -> dict[str, float] | None:
        """Seconds a part; None while the GPU has not got there yet and nobody wants to wait."""
        if self.cuda:
            if wait:
                self.marks[-1][1].synchronize()
            elif not self.marks[-1][1].query():
                return None
        if len(self.marks) == 2 and not self.cuda:  # the commonest case, quickly
            return {self.marks[1][0]: self.marks[1][1] - self.marks[0][1]}
        spent: dict[str, float] = {}
        for (_, before), (part, after) in zip(self.marks, self.marks[1:]):
            gone = before.elapsed_time(after) / 1e3 if self.cuda else after - before
            spent[part] = spent.get(part, 0.0) + gone
        return spent


DONE = Timer()


@dataclass(slots=True)
class Row:
    """One attention call; lists have one number a head, averaged over batch items."""

    transformer: int
    layer: int
    step: int
    branch: str
    timer: Timer
    reason: str = ""  # why it ran dense; empty if it ran sparse
    heads: list[int] | None = None  # the model's numbers of the heads at hand, None for all
    density: list[float] | None = None  # kept share of token pairs
    refreshed: list[float] | None = None
    drift: list[float] | None = None
    cost: list[float] | None = None  # kept and approximated keys as a share of all
    kernel: str = ""
    rest_mass: list[float] | None = None  # share of softmax mass in the approximated part


@dataclass(slots=True)
class Sums:
    """Sums over calls: everything a mean is made of."""

    calls: int = 0
    dense: int = 0
    heads: int = 0  # head slots of sparse calls
    refreshed: float = 0.0
    density: float = 0.0  # over head slots of sparse calls
    cost: float = 0.0
    fallbacks: int = 0  # dense calls that sparse was asked for
    drifts: int = 0
    drift: float = 0.0
    drift_max: float = 0.0
    time: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, row: Row) -> None:
        """Count one call (its time comes apart, when it is known)."""
        self.calls += 1
        if row.reason:
            self.dense += 1
            self.fallbacks += row.reason not in ASKED_DENSE
            return
        if row.density is not None and row.refreshed is not None:
            self.heads += len(row.density)
            self.density += sum(row.density)
            self.cost += sum(row.density if row.cost is None else row.cost)
            self.refreshed += sum(row.refreshed)
        if row.drift is not None:
            known = [x for x in row.drift if not math.isnan(x)]
            self.drifts += len(known)
            self.drift += sum(known)
            self.drift_max = max([self.drift_max, *known])

    def add_time(self, seconds: dict[str, float]) -> None:
        """Count the time of one call."""
        for part, spent in seconds.items():
            self.time[part] += spent

    def _with_fallbacks(self) -> float | None:
        """Density over all calls that sparse was asked for, a fallback counted as 1."""
        sparse = self.calls - self.dense
        if not sparse + self.fallbacks:
            return None
        density = self.density / self.heads if self.heads else 1.0
        return (density * sparse + self.fallbacks) / (sparse + self.fallbacks)

    def to_dict(self) -> dict[str, Any]:
        """Means and totals; None where nothing was counted."""
        return {
            "calls": self.calls,
            "dense_calls": self.dense,
            "refresh_rate": self.refreshed / self.heads if self.heads else None,
            "density": self.density / self.heads if self.heads else None,
            "cost": self.cost / self.heads if self.heads else None,
            "fallback_share": self.fallbacks / asked if (asked := self.calls - self.dense + self.fallbacks) else None,
            "density_with_fallbacks": self._with_fallbacks(),
            "drift": self.drift / self.drifts if self.drifts else None,
            "drift_max": self.drift_max if self.drifts else None,
            "time": {**self.time, "total": sum(self.time.values())},
        }


class Recorder:
    """Takes rows from the engine; keeps sums since enabling and the rows of the last generation."""

    def __init__(self, layers: int, heads: int) -> None:
        self.layers, self.heads = layers, heads
        self.notes: list[str] = []
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.generations = 0
        self.total = Sums()
        self.by_layer: dict[tuple[int, int], Sums] = {}
        self.by_step: dict[int, Sums] = {}
        self.reasons: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.costs: dict[str, str] = {}  # the table that decided dense or sparse
        self.dense_steps: DenseSteps | None = None  # of the last generation
        self.rows: list[Row] = []
        self.memory: dict[str, int] = {}
        self._pending: list[Row] = []
        self._over = True

    def end_generation(self) -> None:
        """The next row opens a new generation."""
        self._over = True

    def take_dense_steps(self, chosen: DenseSteps) -> None:
        """What was chosen for this generation: said in the log when it is new."""
        if chosen == self.dense_steps:
            return
        self.dense_steps = chosen
        log.info("%s", chosen)
        self.warn(chosen.warning())

    def warn(self, sentence: str) -> None:
        """Log a sentence and keep it as a note, once."""
        if sentence and sentence not in self.notes:
            log.warning("%s", sentence)
            self.notes.append(sentence)

    def warn_if_all_warm_up(self) -> None:
        """Where nothing told how many steps there are, a generation that had none but dense ones is seen at its end."""
        known = self.dense_steps is None or self.dense_steps.steps is not None
        if self._over or known or not all(row.reason == FIRST for row in self.rows):
            return
        steps = 1 + max(row.step for row in self.rows)
        self.warn(f"all {steps} steps ran dense: {self.dense_steps}; give fewer dense_steps")

    def add(self, row: Row) -> None:
        """Take one call."""
        self._begin()
        self.rows.append(row)
        seconds = None
        if row.timer.cuda:
            self._pending.append(row)
        else:
            seconds = row.timer.seconds()
            row.timer = DONE  # the marks are not needed any more
        for sums in self._sums(row):
            sums.add(row)
            if seconds is not None:
                sums.add_time(seconds)
        if row.reason:
            self.reasons[row.reason] += 1
        elif row.kernel:
            self.kernels[row.kernel] += 1

    def _begin(self) -> None:
        """The first row after the end of a generation opens the next one."""
        if self._over:
            self._over = False
            self.generations += 1
            self.rows.clear()
            self.settle()

    def add_dense(self, row: Row, seconds: float) -> None:
        """Take one call that ran dense on a CPU: as `add`, without what only other calls have."""
        self._begin()
        self.rows.append(row)
        asked = row.reason in ASKED_DENSE
        for sums in self._sums(row):
            sums.calls += 1
            sums.dense += 1
            sums.fallbacks += not asked
            sums.time["dense"] += seconds
        self.reasons[row.reason] += 1

    def settle(self, wait: bool = False) -> None:
        """Take in GPU times that have become known; wait for all of them if asked."""
        waiting = []
        for row in self._pending:
            seconds = row.timer.seconds(wait)
            if seconds is None:
                waiting.append(row)
                continue
            for sums in self._sums(row):
                sums.add_time(seconds)
        self._pending = waiting

    def _sums(self, row: Row) -> tuple[Sums, Sums, Sums]:
        place = (row.transformer, row.layer)
        layer, step = self.by_layer.get(place), self.by_step.get(row.step)
        if layer is None:
            layer = self.by_layer[place] = Sums()
        if step is None:
            step = self.by_step[row.step] = Sums()
        return self.total, layer, step

    def summary(self, config: Any = None, memory: dict[str, int] | None = None, wait: bool = False) -> Stats:
        """All of it as data."""
        self.settle(wait)
        layers = [{"transformer": t, "layer": i, **s.to_dict()} for (t, i), s in sorted(self.by_layer.items())]
        data = {
            "schema": 2,
            "config": config,
            "notes": list(self.notes),
            "generations": self.generations,
            **self.total.to_dict(),
            "dense_reasons": dict(self.reasons),
            "fallbacks": {reason: n for reason, n in self.reasons.items() if reason not in ASKED_DENSE},
            "kernels": dict(self.kernels),
            "cost_table": dict(self.costs),
            "dense_steps": None if self.dense_steps is None else self.dense_steps.to_dict(),
            "untimed_calls": len(self._pending),
            "memory": dict(memory or self.memory),
            "layers": layers,
            "steps": [{"step": i, **s.to_dict()} for i, s in sorted(self.by_step.items())],
            "records": self._records(),
        }
        return Stats(data)

    def _records(self) -> list[dict[str, Any]]:
        """The last generation as arrays [layer][step][head], one set for each transformer and branch."""
        groups: dict[tuple[int, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.transformer, row.branch), []).append(row)
        return [self._record(t, branch, rows) for (t, branch), rows in groups.items()]

    def _record(self, transformer: int, branch: str, rows: list[Row]) -> dict[str, Any]:
        steps = sorted({row.step for row in rows})
        place = {step: i for i, step in enumerate(steps)}
        blank = lambda: [[[None] * self.heads for _ in steps] for _ in range(self.layers)]  # noqa: E731
        record: dict[str, Any] = {name: blank() for name in ("density", "cost", "refreshed", "drift", "rest_mass")}
        dense = [[None] * len(steps) for _ in range(self.layers)]
        for row in rows:
            cell = row.layer, place[row.step]
            dense[row.layer][place[row.step]] = bool(row.reason)  # type: ignore[call-overload]
            self._fill(record["density"], cell, row, row.density if not row.reason else 1.0)
            self._fill(record["cost"], cell, row, (row.cost or row.density) if not row.reason else 1.0)
            self._fill(record["refreshed"], cell, row, row.refreshed if not row.reason else 0.0)
            self._fill(record["drift"], cell, row, row.drift)
            self._fill(record["rest_mass"], cell, row, row.rest_mass)
        return {"transformer": transformer, "branch": branch, "steps": steps, "dense": dense, **record}

    def _fill(self, table: list, cell: tuple[int, int], row: Row, values: list[float] | float | None) -> None:
        """Write one number a head; a layer that is called item by item keeps the last item's."""
        if values is None:
            return
        heads = row.heads if row.heads is not None else range(self.heads)
        cells = table[cell[0]][cell[1]]
        for i, head in enumerate(heads):
            value = values if isinstance(values, float) else values[i]
            cells[head] = None if math.isnan(value) else round(value, 6)


class Stats:
    """What HEART did since it was enabled; `print` it, or take `to_dict()`."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: totals, means by layer and by step, and records of the last generation.

        `records` has, for every transformer and guidance branch, arrays [layer][step][head] of density,
        refreshed and drift (None where there was nothing to measure), and `dense` [layer][step].
        """
        return self._data

    def __getitem__(self, name: str) -> Any:
        return self._data[name]

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """For notebooks: the summary, how dense each head was, and the table of layers."""
        from .stats_html import html

        return html(self._data, self._summary_lines())

    def __str__(self) -> str:
        return "\n".join([*self._summary_lines(), "", *self._layer_lines()])

    def _summary_lines(self) -> list[str]:
        d = self._data
        lines = [f"note: {note}" for note in d["notes"]]
        lines.append(
            f"{d['generations']} generation(s), {d['calls']} attention calls: density {_number(d['density'])}, "
            f"cost {_number(d['cost'])}, "
            f"refresh rate {_number(d['refresh_rate'])}, drift mean {_number(d['drift'])} max {_number(d['drift_max'])}"
        )
        reasons = ", ".join(f"{count} {reason}" for reason, count in d["dense_reasons"].items())
        lines.append(f"dense: {d['dense_calls']} calls" + (f" ({reasons})" if reasons else ""))
        if d["dense_steps"]:
            lines.append(f"steps: {DenseSteps(**d['dense_steps'])}")
        total = d["time"]["total"]
        shares = ", ".join(f"{part} {d['time'][part]:.3f}" for part in PARTS)
        lines.append(f"time: {total:.3f} s ({shares})")
        if d["kernels"]:
            served = ", ".join(f"{name} ({count})" for name, count in d["kernels"].items())
            table = d["cost_table"]
            costs = f"; dense or sparse by the costs of {table['kind']} [{table['digest']}]" if table else ""
            lines.append(f"kernels: {served}{costs}")
        if d["memory"]:
            sizes = ", ".join(f"{name} {size / 2**20:.2f} MB" for name, size in d["memory"].items())
            lines.append(f"cache: {sizes}")
        if d["untimed_calls"]:
            lines.append(
                f"{d['untimed_calls']} calls not timed yet: the GPU is still busy (stats(pipe, wait=True) waits)"
            )
        return lines

    def _layer_lines(self) -> list[str]:
        head = f"{'layer':>7} {'calls':>6} {'dense':>6} {'density':>8} {'refresh':>8} {'drift':>8}"
        lines = [head + "".join(f"{part + ' ms':>14}" for part in PARTS)]
        for row in self._data["layers"]:
            name = f"{row['transformer']}.{row['layer']}" if row["transformer"] else str(row["layer"])
            cells = f"{name:>7} {row['calls']:>6} {row['dense_calls']:>6} {_number(row['density']):>8} "
            cells += f"{_number(row['refresh_rate']):>8} {_number(row['drift']):>8}"
            lines.append(cells + "".join(f"{row['time'][part] * 1e3:>14.2f}" for part in PARTS))
        return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
