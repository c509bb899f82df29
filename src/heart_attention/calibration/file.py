"""Calibration files, `*.heart.json`: the operating point of every head with everything it was made from.

Plain JSON, never pickle. Saving is atomic and the bytes depend on the content alone. Loading is strict: an
unknown version or field, a number that is not finite or out of range, or tables that do not fit together are
refused with one sentence. A file is bound to its model by a fingerprint, which `check` compares.

Version 2 has a list of operating points, the `choice` of every head [phases][layers][heads] and tables by point;
version 1 (thresholds of one backbone) is migrated on loading.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import token_order
from ..errors import LONGEST, HeartError, named, printable, shown
from ..files import read_json, write_atomic
from ..online.thresholds import ThresholdSource
from . import document, fit, resolve, values
from .fingerprint import check_fingerprint, fingerprint, prompts_hash, versions
from .measure.velocity_error import check_weights
from .migration import SCHEMA, migrated
from .solve.solver import Budget

if TYPE_CHECKING:
    from ..online.points import PointTable

__all__ = ["Calibration", "fingerprint", "prompts_hash", "versions"]

LIMIT = 256 << 20  # bytes; 1,600 heads × 100 candidates with band energies take about 25 MB
METHODS = ("joint", "isolated", "probes", "imported")
PACKAGE = Path(__file__).resolve().parents[1]
_INCOMPLETE = "the calibration has some of candidates, E and S: it needs all of them or none"
LARGEST_ERROR = 1e30  # a relative error never comes near it, and sums of such are still finite
_OBJECTS = ("error", "solver", "verification", "prompts", "versions", "extra")
_DERIVED = ("thresholds", "backbone", "candidates")  # not saved: points and choice say the same
_NOT_SAVED = (*_DERIVED, "forced", "shipped")


@dataclass(frozen=True, eq=False)
class Calibration(ThresholdSource):
    """The operating point of every head of a model, and how the choice came about.

    The simple case, thresholds of one backbone, is made from `thresholds`, `backbone` and `candidates`; the general
    one from `points` and `choice`, and then the former are derived. With several phases all tables have one axis more,
    the phases, in front.

    Args:
        thresholds: top-p thresholds, [layers, heads], in (0, 1]; 1 means dense.
        backbone: the backbone's `to_dict()`, name and settings; None where points have several.
        method: "joint", "isolated", "probes", or "imported" (a table from elsewhere).
        model: `fingerprint(transformer)`; None if the table came without one.
        candidates: the thresholds that were measured, [K], ascending; None without tables or with several backbones.
        E, S: error and realised sparsity of every head and point, [L, H, K].
        bands: unweighted relative band energies (LL, LH, HL, HH), [L, H, K, 4].
        error: name and settings of the error measure.
        solver: `solver.Result.to_dict()`, with what the method adds.
        verification: joint error and sparsity of the shared threshold and of these, by set of contexts.
        height, width, frames, steps: of the generations it was measured on.
        scheduler: class name.  prompts: {"count", "hash"}.  seed: of all draws.  versions: of the libraries.
        settings: the rest of the plan (guidance, strata, velocity, order, dense steps …).
        extra: further measurements (null probes, search history …).
        points: operating points as plain JSON, each {"backbone", "threshold", "rest", "order"}.
        choice: index of every head's point, [L, H].
        cost: computed keys (kept and approximated) of every head and point as a share of all, [L, H, K].
        phases: {"sigmas": boundaries by noise level, descending, "weights": of each phase's error (E is weighed by them),
            "steps": how many it has}; empty for one phase.
        forced: not saved; set by `load(force=True)`, then `check` passes a foreign fingerprint.
        shipped: not saved; set for files of this package, whose weights must be the very ones.
    """

    thresholds: Any = None
    backbone: Any = None
    method: str = "imported"
    model: dict[str, Any] | None = None
    candidates: Any = None
    E: Any = None
    S: Any = None
    bands: Any = None
    error: dict[str, Any] = field(default_factory=dict)
    solver: dict[str, Any] = field(default_factory=dict)
    verification: dict[str, Any] = field(default_factory=dict)
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    scheduler: str | None = None
    prompts: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    points: Any = None
    choice: Any = None
    cost: Any = None
    phases: dict[str, Any] = field(default_factory=dict)
    forced: bool = False
    shipped: bool = False

    def __post_init__(self) -> None:
        self._put("settings", values.settings(self.settings))
        if self.points is None:
            self._points_from_thresholds()
        else:
            self._thresholds_from_points()
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise HeartError(
                f"the calibration's method is {shown(self.method)}: it must be one of {', '.join(METHODS)}"
            )
        self._put("model", check_fingerprint(self.model, (self.layers, self.heads)))
        self._check_tables()
        self._put("phases", values.phases(self.phases, self.phase_count))
        for name in _OBJECTS:
            self._put(name, values.plain(getattr(self, name), name, dict))
        for name in ("height", "width", "frames", "steps"):
            values.check_int(getattr(self, name), name, 1, 1_000_000)
        values.check_int(self.seed, "seed", 0, (1 << 64) - 1)
        if not isinstance(self.scheduler, str | None):
            raise HeartError(f"the calibration's scheduler is {shown(self.scheduler)}: it must be a class name")

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    # ---------------------------------------- points and thresholds

    def _points_from_thresholds(self) -> None:
        """The simple form: one backbone, one order, one phase."""
        self._put("thresholds", values.array(self.thresholds, "thresholds", 2, 0.0, 1.0, open_low=True))
        self._put("backbone", values.backbone(self.backbone))
        taus = np.unique(self.thresholds)
        if self.candidates is None and not (self.E is None and self.S is None):
            raise HeartError(_INCOMPLETE)
        if self.candidates is not None:
            taus = values.array(self.candidates, "candidates", 1, 0.0, 1.0, open_low=True)
            if (np.diff(taus) <= 0).any():
                raise HeartError(f"the calibration's candidates must ascend, not {shown(taus.tolist())}")
            if not np.isin(self.thresholds, taus).all():
                raise HeartError("the calibration's thresholds are not all among its candidates")
            self._put("candidates", taus)
        shared = {"rest": "drop", "order": self.settings.get("order", token_order.RASTER)}
        points = tuple({"backbone": self.backbone, "threshold": float(t), **shared} for t in taus)
        self._put("points", points)
        self._put("choice", np.searchsorted(taus, self.thresholds))

    def _thresholds_from_points(self) -> None:
        if not isinstance(self.points, list | tuple) or not self.points:
            raise HeartError("the calibration's points are no list, or an empty one: it needs operating points")
        points = tuple(map(values.point, self.points))
        choice = values.indices(self.choice, "choice", (2, 3), len(points))
        if choice.ndim == 3 and len(choice) == 1:
            raise HeartError("the calibration's choice is of one phase in three dimensions: give [layers][heads]")
        taus = np.array([point["threshold"] for point in points])
        alike = all(_shared(points, name) for name in ("backbone", "rest", "order"))
        simple = alike and bool((np.diff(taus) > 0).all())
        self._put("points", points)
        self._put("choice", choice)
        self._put("thresholds", values.array(taus[choice], "thresholds", choice.ndim, 0.0, 1.0))
        self._put("backbone", points[0]["backbone"] if _shared(points, "backbone") else None)
        self._put("candidates", taus if simple and self.E is not None else None)

    def _check_tables(self) -> None:
        tables = [self.E, self.S, self.bands, self.cost]
        if self.candidates is None and all(table is None for table in tables):
            return
        if self.E is None or self.S is None:
            raise HeartError(_INCOMPLETE)
        shape = (*self.choice.shape, len(self.points))
        self._put("E", values.array(self.E, "E", len(shape), 0.0, LARGEST_ERROR, shape=shape))
        self._put("S", values.array(self.S, "S", len(shape), 0.0, 1.0, shape=shape))
        if self.cost is not None:
            self._put("cost", values.array(self.cost, "cost", len(shape), 0.0, 2.0, shape=shape))
        if self.bands is not None:
            self._put("bands", values.array(self.bands, "bands", len(shape) + 1, 0.0, math.inf, shape=(*shape, 4)))

    # ---------------------------------------- what is in it

    @property
    def layers(self) -> int:
        """The number of attention layers."""
        return self.choice.shape[-2]

    @property
    def heads(self) -> int:
        """The number of heads of a layer."""
        return self.choice.shape[-1]

    @property
    def phase_count(self) -> int:
        """The number of phases."""
        return 1 if self.choice.ndim == 2 else self.choice.shape[0]

    @property
    def shares(self) -> np.ndarray | None:
        """How much the heads of each phase count in a mean over steps, [P, 1, 1]; None for one phase."""
        return np.array(self.phases["steps"], float)[:, None, None] if self.phase_count > 1 else None

    @property
    def simple(self) -> bool:
        """Whether one backbone, token order and rest serve all heads in one phase: a config's simple form."""
        return self.phase_count == 1 and all(_shared(self.points, name) for name in ("backbone", "rest", "order"))

    def point_table(self) -> PointTable:
        """The choice as a config holds it, for one transformer."""
        from .points import point_table

        return point_table([self])

    @property
    def rest(self) -> str | None:
        """What becomes of the rest; None where points differ in it."""
        rests = {point["rest"] for point in self.points}
        return rests.pop() if len(rests) == 1 else None

    @property
    def sparsity(self) -> float | None:
        """Mean sparsity of the choice by the table."""
        return self._mean(self.S)

    @property
    def density_cost(self) -> float | None:
        """Mean share of computed keys of the choice by the table."""
        return self._mean(self.cost)

    def head_costs(self) -> list[list[float]] | None:
        """What each head computes [L, H], as a share of dense and a mean over phases; None where nothing was measured."""
        if self.S is None:
            return None
        table = 1 - self.S if self.cost is None else self.cost
        chosen = np.take_along_axis(table, self.choice[..., None], -1)[..., 0]
        return (chosen if chosen.ndim == 2 else chosen.mean(0)).tolist()

    def _mean(self, table: np.ndarray | None) -> float | None:
        """Of the choice over heads and sparse steps, which phases have different numbers of."""
        if table is None:
            return None
        chosen = np.take_along_axis(table, self.choice[..., None], -1)[..., 0]
        shares = self.shares
        weighed = chosen if shares is None else chosen * (shares / shares.mean())
        return math.fsum(weighed.ravel()) / self.choice.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calibration) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __repr__(self) -> str:
        name = self.model["class"] if self.model else "unknown model"
        return printable(
            f"Calibration({name}, {self.backbone_names}, {self.layers}×{self.heads} heads, {self.method}, "
            f"mean τ {self.thresholds.mean():.4f})"
        )

    @property
    def backbone_names(self) -> str:
        """Names of the backbones that heads may take, joined by "+"."""
        return "+".join(dict.fromkeys(point["backbone"]["name"] for point in self.points))

    # ---------------------------------------- in and out

    def to_dict(self) -> dict[str, Any]:
        """The calibration as plain JSON types; absent parts are left out."""
        out: dict[str, Any] = {"schema": SCHEMA}
        out |= {"points": list(self.points), "choice": self._saved("choice")}
        for f in fields(self):
            value = self._saved(f.name)
            if f.name not in (*_NOT_SAVED, *out) and value is not None and not (f.name == "phases" and not value):
                out[f.name] = value
        return out

    def _saved(self, name: str) -> Any:
        return document.saved(name, getattr(self, name), self.phase_count == 1)

    def to_bytes(self) -> bytes:
        """The file's bytes: equal for equal content; a layer of a table is a line."""
        return document.text(self.to_dict()).encode()

    def save(self, path: str | os.PathLike) -> Path:
        """Write the file: whole or not at all."""
        return write_atomic(path, self.to_bytes())

    @classmethod
    def from_dict(cls, data: Any, force: bool = False, shipped: bool = False) -> Calibration:
        """A calibration from what `to_dict` gave; whatever is unknown or does not fit is refused."""
        data = migrated(data)
        known = {f.name for f in fields(cls)} - set(_NOT_SAVED)
        if unknown := sorted(map(str, set(data) - known - {"schema"})):
            raise HeartError(
                f"the calibration has unknown fields {shown(unknown)}: it is damaged or of another version"
            )
        if missing := sorted({"points", "choice", "method"} - set(data)):
            raise HeartError(f"the calibration lacks {', '.join(missing)}: it is damaged")
        given = {k: v for k, v in data.items() if k != "schema"}
        return cls(**document.without_phase(given), forced=force, shipped=shipped)

    @classmethod
    def load(cls, path: str | os.PathLike, transformer: Any = None, force: bool = False) -> Calibration:
        """Read a file strictly; with a transformer its fingerprint is checked. `force` overrides only that."""
        try:
            data = read_json(path, LIMIT)
            calibration = cls.from_dict(data, force, shipped=PACKAGE in Path(path).resolve().parents)
        except HeartError as error:
            told = str(error).startswith(("there is no file", named(path)))
            raise error if told else HeartError(f"{named(path)}: {error}"[:LONGEST]) from None
        if transformer is not None:
            calibration.check(transformer, force)
        return calibration

    # ---------------------------------------- does it fit?

    def check(self, transformer: Any, force: bool = False) -> None:
        """Raise unless this was made for this model; `force` (here or at `load`) passes what has as many heads.

        Other values of the weights (a fine-tune, say) are a warning, and an error for a file that ships with HEART.
        """
        fit.check(self, fingerprint(transformer), force)

    def of_transformers(self, count: int) -> list[ThresholdSource]:
        """Itself for each transformer; a calibration of one of two is refused."""
        name = self.settings.get("transformer")
        if name and count > 1:
            raise HeartError(
                f"this calibration is of {name} alone: give both, enable(pipe, ['a.heart.json', 'b.heart.json'])"
            )
        return [self] * count

    def warnings_for(  # type: ignore[override]
        self,
        steps: int | None = None,
        height: int | None = None,
        width: int | None = None,
        frames: int | None = None,
        grid: Sequence[int] | None = None,
        order: Any = None,
        backbone: dict[str, Any] | None = None,
        rest: str | None = None,
    ) -> list[str]:
        """What differs from the generations this was measured on, one sentence each; empty if nothing does.

        The size is told in pixels, or by `grid`, the video tokens (frames, rows, columns) a transformer sees.
        """
        return [
            *fit.size_differences(self, (height, width, frames), grid),
            *fit.step_differences(self, steps),
            *fit.point_differences(self, order, backbone, rest),
        ]

    # ---------------------------------------- other choices from the same tables

    def with_choice(self, choice: np.ndarray, solver: dict[str, Any], budget: Budget) -> Calibration:
        """The same measurements with another choice of points; figures that belong to the old one go."""
        return replace(
            self, choice=choice, solver=solver, verification={}, thresholds=None, backbone=None, candidates=None,
            settings={**self.settings, "budget": str(budget)},
        )  # fmt: skip

    def at_budget(self, text: str) -> Calibration:
        """For a budget as names tell it after "@": itself where it was made for that one, else solved again.

        A bare number is a budget of time, or for thresholds of one backbone the shared threshold to be as sparse as.
        """
        asked = Budget.named(text, "shared" if self.simple else "time")
        return self if self.settings.get("budget") == str(asked) else self.resolve(asked)

    def resolve(
        self, budget: Budget | str | float, method: str = "exact", cost_table: str | os.PathLike | None = None
    ) -> Calibration:
        """The best choice for another budget from the stored tables.

        A budget of time takes the table of costs in a file of `heart tune-costs`, or the one that ships for the kind of
        device that the calibration was made on.
        """
        return resolve.solved(self, Budget.parse(budget), method, cost_table)

    def reweighted(self, weights: Sequence[float]) -> Calibration:
        """The error table for other band weights, from the stored band energies; solve again after it."""
        checked = check_weights(weights)
        if self.bands is None:
            raise HeartError("the calibration has no band energies: other weights need a new calibration")
        error = {"name": "spectral", "weights": list(checked)}
        return replace(self, E=self.bands @ np.array(checked), error=error, solver={}, verification={})


def _shared(points: Sequence[dict[str, Any]], name: str) -> bool:
    """Whether all points have the same backbone, order or rest."""
    return all(point[name] == points[0][name] for point in points)
