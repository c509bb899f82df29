"""Calibration files, `*.heart.json`: thresholds of all heads with everything they were made from.

Plain JSON, never pickle. Saving is atomic and the bytes depend on the content alone. Loading is strict: an
unknown schema or field, a number that is not finite or out of range, or tables that do not fit together are
refused with one sentence. A file is bound to its model by a fingerprint, which `check` compares.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import token_order
from ..errors import HeartError
from ..files import read_json, write_atomic
from .measure.velocity_error import check_weights
from .solve.solver import Budget, solve_budget

SCHEMA = "heart-calibration/1"
LIMIT = 256 << 20  # bytes; 1,600 heads × 100 candidates with band energies take about 25 MB
METHODS = ("joint", "isolated", "probes", "imported")
_FINGERPRINT = {
    "class": str,
    "config_hash": str,
    "layers": int,
    "heads": int,
    "head_dim": int,
    "weights_digest": str,
}
_NOT_THE_MODEL = ("sparse_attention_config", "quantization_config")  # may be added to a config without changing it
_ADDED = re.compile(r"(^|\.)(lora_|to_qkv|to_kv|to_added_qkv)")  # weights that LoRA and fused projections add


# ---------------------------------------- the model's fingerprint


def fingerprint(transformer: Any) -> dict[str, Any]:
    """What makes this model this model: class, config, attention layers, heads, head size and weight shapes.

    LoRA, fused projections, quantisation, offload and compilation leave it as it is; weights' values do not
    count.
    """
    from ..models import inspect

    transformer = inspect.unwrapped(transformer)
    layers, heads = inspect.layers_and_heads(transformer)
    return {
        "class": _public_class(transformer),
        "config_hash": _sha(_plain_config(transformer.config)),
        "layers": layers,
        "heads": heads,
        "head_dim": inspect.head_size(transformer),
        "weights_digest": _sha(sorted(_weight_shapes(transformer))),
    }


def _public_class(transformer: Any) -> str:
    """The diffusers class; hooks and quantisers may have put a subclass of their own on top."""
    for cls in type(transformer).__mro__:
        if cls.__module__.startswith("diffusers."):
            return cls.__name__
    return type(transformer).__name__


def _plain_config(config: Any) -> dict[str, Any]:
    return {k: v for k, v in dict(config).items() if not k.startswith("_") and k not in _NOT_THE_MODEL}


def _weight_shapes(transformer: Any) -> list[list[Any]]:
    found = []
    for name, weight in transformer.named_parameters():
        if not _ADDED.search(name):
            packed = getattr(weight, "quant_state", None)  # 4-bit weights are stored in another shape
            shape = getattr(packed, "shape", None) or weight.shape
            found.append([name.replace(".base_layer.", ".").replace("_orig_mod.", ""), [int(n) for n in shape]])
    return found


def _sha(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def prompts_hash(prompts: Sequence[str]) -> str:
    """SHA-256 over the prompts in their order."""
    return _sha(list(prompts))


def versions() -> dict[str, str]:
    """Versions of what has a say in the figures."""
    import diffusers
    import torch

    from .. import __version__

    return {
        "heart_attention": __version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


# ---------------------------------------- the calibration


@dataclass(frozen=True, eq=False)
class Calibration:
    """Thresholds [L, H] of a model's heads, and how they came about.

    Args:
        thresholds: top-p thresholds, [layers, heads], in (0, 1]; 1 means dense.
        backbone: the backbone's `to_dict()`: name and settings.
        method: "joint", "isolated", "probes", or "imported" (a table from elsewhere).
        model: `fingerprint(transformer)`; None if the table came without one.
        candidates: the thresholds that were measured, [K], ascending.
        E, S: error and realised sparsity of every head and candidate, [L, H, K].
        bands: unweighted relative band energies (LL, LH, HL, HH), [L, H, K, 4].
        error: name and settings of the error measure.
        solver: `solver.Result.to_dict()`, with what the method adds.
        verification: joint error and sparsity of the shared threshold and of these, by set of contexts.
        height, width, frames, steps: of the generations it was measured on.
        scheduler: class name.  prompts: {"count", "hash"}.  seed: of all draws.  versions: of the libraries.
        settings: the rest of the plan (guidance, strata, velocity, order, dense steps …).
        extra: further measurements (null probes, search history …).
        forced: not saved; set by `load(force=True)`, then `check` passes a foreign fingerprint.
    """

    thresholds: Any
    backbone: dict[str, Any]
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
    forced: bool = False

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("thresholds", _array(self.thresholds, "thresholds", 2, 0.0, 1.0, open_low=True))
        if self.method not in METHODS:
            raise HeartError(f"the calibration's method is {self.method!r}: it must be one of {', '.join(METHODS)}")
        put("model", _check_fingerprint(self.model, self.thresholds.shape))
        self._check_tables(put)
        for name in ("backbone", "error", "solver", "verification", "prompts", "versions", "settings", "extra"):
            put(name, _plain(getattr(self, name), name, kind=dict))
        if not isinstance(self.backbone.get("name"), str):
            raise HeartError("the calibration's backbone has no name")
        for name in ("height", "width", "frames", "steps"):
            _check_int(getattr(self, name), name, 1, 1_000_000)
        _check_int(self.seed, "seed", 0, (1 << 64) - 1)
        if not isinstance(self.scheduler, str | None):
            raise HeartError(f"the calibration's scheduler is {self.scheduler!r}: it must be a class name")

    def _check_tables(self, put: Any) -> None:
        given = [self.candidates is not None, self.E is not None, self.S is not None]
        if not any(given) and self.bands is None:
            return
        if not all(given):
            raise HeartError("the calibration has some of candidates, E and S: it needs all of them or none")
        put("candidates", _array(self.candidates, "candidates", 1, 0.0, 1.0, open_low=True))
        if (np.diff(self.candidates) <= 0).any():
            raise HeartError(f"the calibration's candidates must ascend, not {self.candidates.tolist()[:20]}")
        shape = (*self.thresholds.shape, len(self.candidates))
        put("E", _array(self.E, "E", 3, 0.0, math.inf, shape=shape))
        put("S", _array(self.S, "S", 3, 0.0, 1.0, shape=shape))
        if self.bands is not None:
            put("bands", _array(self.bands, "bands", 4, 0.0, math.inf, shape=(*shape, 4)))
        if not np.isin(self.thresholds, self.candidates).all():
            raise HeartError("the calibration's thresholds are not all among its candidates")

    # ------------------------------ what is in it

    @property
    def layers(self) -> int:
        """Attention layers."""
        return self.thresholds.shape[0]

    @property
    def heads(self) -> int:
        """Heads of a layer."""
        return self.thresholds.shape[1]

    @property
    def choice(self) -> np.ndarray | None:
        """Index of each head's candidate, [L, H]; None without tables."""
        return None if self.candidates is None else np.searchsorted(self.candidates, self.thresholds)

    @property
    def sparsity(self) -> float | None:
        """Mean sparsity of the thresholds by the table."""
        if self.S is None:
            return None
        return math.fsum(np.take_along_axis(self.S, self.choice[..., None], 2).ravel()) / self.thresholds.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calibration) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __repr__(self) -> str:
        name = self.model["class"] if self.model else "unknown model"
        return (
            f"Calibration({name}, {self.backbone['name']}, {self.layers}×{self.heads} heads, {self.method}, "
            f"mean τ {self.thresholds.mean():.4f})"
        )

    # ------------------------------ in and out

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; absent parts are left out."""
        out: dict[str, Any] = {"schema": SCHEMA}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "forced" and value is not None:
                out[f.name] = value.tolist() if isinstance(value, np.ndarray) else value
        return out

    def to_bytes(self) -> bytes:
        """The file's bytes: equal for equal content; a layer of a table is a line."""
        return ("{\n" + ",\n".join(f' "{k}": {_lines(v)}' for k, v in self.to_dict().items()) + "\n}\n").encode()

    def save(self, path: str | os.PathLike) -> Path:
        """Write the file: whole or not at all."""
        return write_atomic(path, self.to_bytes())

    @classmethod
    def from_dict(cls, data: Any, force: bool = False) -> Calibration:
        """From what `to_dict` gave; whatever is unknown or does not fit is refused."""
        if not isinstance(data, dict) or "schema" not in data:
            raise HeartError("this is no calibration: it must be a JSON object with a schema")
        if data["schema"] != SCHEMA:
            raise HeartError(
                f"the calibration's schema is {data['schema']!r}, this HEART reads {SCHEMA!r}: make it anew"
            )
        known = {f.name for f in fields(cls)} - {"forced"}
        if unknown := sorted(set(data) - known - {"schema"}):
            raise HeartError(f"the calibration has unknown fields {unknown[:5]}: it is damaged or of another version")
        if missing := sorted({"thresholds", "backbone", "method"} - set(data)):
            raise HeartError(f"the calibration lacks {', '.join(missing)}: it is damaged")
        return cls(**{k: v for k, v in data.items() if k != "schema"}, forced=force)

    @classmethod
    def load(cls, path: str | os.PathLike, transformer: Any = None, force: bool = False) -> Calibration:
        """Read a file strictly; with a transformer its fingerprint is checked. `force` overrides only that."""
        try:
            made = cls.from_dict(read_json(path, LIMIT), force)
        except HeartError as error:
            named = str(error).startswith(("there is no file", str(path)))
            raise error if named else HeartError(f"{path}: {error}") from None
        if transformer is not None:
            made.check(transformer, force)
        return made

    # ------------------------------ does it fit?

    def check(self, transformer: Any, force: bool = False) -> None:
        """Raise unless this was made for this model; `force` (here or at `load`) passes what has as many heads."""
        here = fingerprint(transformer)
        if (here["layers"], here["heads"]) != self.thresholds.shape:
            raise HeartError(
                f"the calibration is for {self.layers} layers of {self.heads} heads but this {here['class']} has "
                f"{here['layers']} of {here['heads']}: calibrate this model"
            )
        if self.model is None or force or self.forced:
            return
        if different := [name for name in _FINGERPRINT if self.model[name] != here[name]]:
            told = ", ".join(f"{n.replace('_', ' ')} {_short(self.model[n])} ≠ {_short(here[n])}" for n in different)
            raise HeartError(
                f"the calibration was made for another model ({told}): calibrate this one, or load it with force=True"
            )

    def warnings_for(
        self,
        steps: int | None = None,
        height: int | None = None,
        width: int | None = None,
        frames: int | None = None,
        grid: Sequence[int] | None = None,
        order: Any = None,
        backbone: dict[str, Any] | None = None,
    ) -> list[str]:
        """What differs from the generations this was measured on, one sentence each; empty if nothing does.

        The size is told in pixels, or by `grid`, the video tokens (frames, rows, columns) a transformer sees.
        """
        out = []
        size, mine = (height, width, frames), (self.height, self.width, self.frames)
        carries = (
            "thresholds carry over, but the sparsity they give changes: calibrate at this size for an exact budget"
        )
        if any(a is not None and b is not None and a != b for a, b in zip(size, mine)):
            now = [b if a is None else a for a, b in zip(size, mine)]
            out.append(f"calibrated at {_size(*mine)}, used at {_size(*now)}: {carries}")
        measured = self.settings.get("grid")
        if grid is not None and isinstance(measured, list) and list(grid) != measured:
            was, now = ("×".join(map(str, g)) for g in (measured, grid))
            at = f" ({_size(*mine)})" if self.height else ""
            out.append(f"calibrated at {was} video tokens{at}, used at {now}: {carries}")
        if steps is not None and self.steps is not None and steps != self.steps:
            out.append(
                f"calibrated with {self.steps} steps, used with {steps}: thresholds carry over, errors were "
                "measured on the other schedule"
            )
        was = self.settings.get("order")
        if order is not None and was is not None and token_order.read(order) != token_order.read(was):
            then, now = (o if isinstance(o, str) else "one for every head" for o in (was, order))
            out.append(
                f"calibrated in token order {then!r}, used in {now!r}: use the calibration's order, or calibrate again"
            )
        if backbone is not None and backbone != self.backbone:
            mine, now = ({k: d.get(k) for k in {**self.backbone, **backbone}} for d in (self.backbone, backbone))
            told = ", ".join(f"{k} {mine[k]}, used {now[k]}" for k in mine if mine[k] != now[k])
            out.append(f"calibrated for another backbone ({told}): use the calibration's, or calibrate again")
        return out

    # ------------------------------ other thresholds from the same tables

    def resolve(self, budget: Budget | str | float, method: str = "exact") -> Calibration:
        """New thresholds for another budget from the stored tables; figures that belong to the old ones go."""
        if self.E is None:
            raise HeartError("the calibration has no error and sparsity tables: there is nothing to solve again")
        found = solve_budget(self.E, self.S, self.candidates, budget, method)
        return replace(self, thresholds=found.thresholds, solver=found.to_dict(), verification={})

    def reweighted(self, weights: Sequence[float]) -> Calibration:
        """The error table for other band weights, from the stored band energies; solve again after it."""
        weights = check_weights(weights)
        if self.bands is None:
            raise HeartError("the calibration has no band energies: other weights need a new calibration")
        error = {"name": "spectral", "weights": list(weights)}
        return replace(self, E=self.bands @ np.array(weights), error=error, solver={}, verification={})

    def with_sparsity(self, S: Any, **size: int) -> Calibration:
        """The sparsity table measured at another size (height=, width=, frames=); solve again after it."""
        return replace(self, S=S, solver={}, verification={}, **size)


# ---------------------------------------- strict values


def _array(
    value: Any,
    name: str,
    ndim: int,
    low: float,
    high: float,
    open_low: bool = False,
    shape: tuple[int, ...] | None = None,
) -> np.ndarray:
    """A read-only float64 array of finite numbers within [low, high]."""
    try:
        raw = value if isinstance(value, np.ndarray) else np.array(value)
        if raw.dtype.kind not in "fiu":
            raise TypeError
        out = raw.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise HeartError(f"the calibration's {name} is not a rectangular table of numbers") from None
    if out.ndim != ndim or out.size == 0 or (shape is not None and out.shape != shape):
        want = list(shape) if shape else f"{ndim} axes"
        raise HeartError(f"the calibration's {name} has shape {list(out.shape)}, not {want}")
    if not np.isfinite(out).all():
        raise HeartError(f"the calibration's {name} holds a number that is not finite: it is damaged")
    if (out < low).any() or (out > high).any() or (open_low and (out <= low).any()):
        raise HeartError(
            f"the calibration's {name} runs from {out.min():g} to {out.max():g}: it must lie "
            f"{'above' if open_low else 'from'} {low:g}{f' and up to {high:g}' if math.isfinite(high) else ' up'}"
        )
    out.setflags(write=False)
    return out


def _plain(value: Any, name: str, depth: int = 0, kind: type | None = None) -> Any:
    """A copy made of JSON types with finite numbers only."""
    if depth > 12 or (kind is not None and not isinstance(value, kind)):
        raise HeartError(f"the calibration's {name} is {type(value).__name__}, or nested too deeply")
    if isinstance(value, dict):
        if not all(isinstance(k, str) for k in value):
            raise HeartError(f"the calibration's {name} has a key that is not text")
        return {k: _plain(v, name, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, name, depth + 1) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), name, depth)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and abs(value) < 1 << 64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise HeartError(f"the calibration's {name} holds {str(value)[:40]!r}, which is no finite number or text")


def _check_int(value: Any, name: str, low: int, high: int) -> None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        return
    raise HeartError(f"the calibration's {name} is {str(value)[:40]}: it must be a whole number from {low} to {high}")


def _check_fingerprint(model: Any, shape: tuple[int, ...]) -> dict[str, Any] | None:
    if model is None:
        return None
    good = isinstance(model, dict) and set(model) == set(_FINGERPRINT)
    if not good or any(type(model[name]) is not kind for name, kind in _FINGERPRINT.items()):
        raise HeartError(f"the calibration's model is not a fingerprint with {', '.join(_FINGERPRINT)}")
    if (model["layers"], model["heads"]) != shape or model["head_dim"] < 1:
        raise HeartError(
            f"the calibration's thresholds are {shape[0]}×{shape[1]} but its model has "
            f"{model['layers']}×{model['heads']} heads: it is damaged"
        )
    return dict(model)


def _lines(value: Any) -> str:
    """JSON on one line, but a table with a line for each of its first axis."""
    dump = lambda v: json.dumps(v, separators=(",", ":"), allow_nan=False)  # noqa: E731
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n  " + ",\n  ".join(map(dump, value)) + "\n ]"
    return dump(value)


def _short(value: Any) -> str:
    return f"{value[:8]}…" if isinstance(value, str) and len(value) == 64 else str(value)


def _size(height: int | None, width: int | None, frames: int | None) -> str:
    return f"{width or '?'}×{height or '?'}, {frames or '?'} frames"
