"""Strict reading of what stands in a calibration file: every number finite and in range, every message one sentence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import token_order
from ..errors import HeartError, shown
from ..masks.base import RESTS

DEPTH = 12  # of nested objects in a file


def array(
    value: Any, name: str, ndim: int, low: float, high: float, *, open_low: bool = False,
    shape: tuple[int, ...] | None = None,
) -> np.ndarray:  # fmt: skip
    """A read-only float64 array of finite numbers within [low, high]."""
    out = _numbers(value, name)
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


def _numbers(value: Any, name: str) -> np.ndarray:
    try:
        if _has_other_than_numbers(value):
            raise TypeError
        raw = value if isinstance(value, np.ndarray) else np.array(value)
        if raw.dtype.kind not in "fiu":
            raise TypeError
        return raw.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise HeartError(f"the calibration's {name} is not a rectangular table of numbers") from None


def _has_other_than_numbers(value: Any) -> bool:
    """Whether text or truth values stand in nested lists: of one long text NumPy makes every number as wide as it."""
    level = [value]
    while level:
        if any(isinstance(x, str | bytes | bool) for x in level):
            return True
        level = [x for part in level if isinstance(part, list | tuple) for x in part]
    return False


def indices(value: Any, name: str, axes: tuple[int, ...], count: int) -> np.ndarray:
    """A read-only array of whole numbers in [0, count) with one of these numbers of axes."""
    ndim = _numbers(value, name).ndim
    out = array(value, name, ndim if ndim in axes else axes[-1], 0, count - 1)
    if (out != np.floor(out)).any():
        raise HeartError(f"the calibration's {name} holds a number that is not whole: it is damaged")
    whole = out.astype(np.int64)
    whole.setflags(write=False)
    return whole


def plain(value: Any, name: str, kind: type | None = None, depth: int = 0) -> Any:
    """A copy made of JSON types with finite numbers only."""
    if depth > DEPTH or (kind is not None and not isinstance(value, kind)):
        raise HeartError(f"the calibration's {name} is {type(value).__name__}, or nested too deeply")
    if isinstance(value, dict):
        if not all(isinstance(k, str) for k in value):
            raise HeartError(f"the calibration's {name} has a key that is not text")
        return {k: plain(v, name, None, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, name, None, depth + 1) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist(), name, None, depth)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and abs(value) < 1 << 64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise HeartError(f"the calibration's {name} holds {shown(value)}, which is no finite number or text")


def check_int(value: Any, name: str, low: int, high: int) -> None:
    """Raise unless this is None or a whole number within [low, high]."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        return
    raise HeartError(f"the calibration's {name} is {shown(value)}: it must be a whole number from {low} to {high}")


def point(value: Any) -> dict[str, Any]:
    """One operating point as plain JSON: backbone, threshold, rest, order (a name, or one for every head)."""
    if not isinstance(value, dict) or set(value) != {"backbone", "threshold", "rest", "order"}:
        raise HeartError(
            f"an operating point is an object with backbone, threshold, rest and order, not {shown(value)}"
        )
    threshold = array([value["threshold"]], "threshold of a point", 1, 0.0, 1.0, open_low=True)
    if not isinstance(value["rest"], str) or value["rest"] not in RESTS:
        raise HeartError(f"a point's rest is {shown(value['rest'])}: it must be one of {', '.join(RESTS)}")
    return {
        "backbone": backbone(value["backbone"]),
        "threshold": float(threshold[0]),
        "rest": value["rest"],
        "order": order(value["order"]),
    }


def backbone(value: Any) -> dict[str, Any]:
    """A backbone's name and settings; whether the name is known is asked where it is used."""
    settings = plain(value, "backbone", dict)
    if not isinstance(settings.get("name"), str):
        raise HeartError("the calibration's backbone has no name")
    return settings


def order(value: Any) -> Any:
    """A token order: raster, tiles, one tile for all heads, or names for every head as lists."""
    if isinstance(value, str) and value not in (token_order.RASTER, token_order.TILES):
        token_order.shape_of(value)
        return value
    return plain(token_order.read(value), "order")


_SETTINGS = {
    "dense_steps": lambda v: v == "auto" or (type(v) is int and 0 <= v <= 1_000_000),
    "scale_clusters": lambda v: isinstance(v, bool),
    "grid": lambda v: v is None or (isinstance(v, list) and len(v) == 3 and all(type(n) is int and n > 0 for n in v)),
    "transformer": lambda v: v in (None, "transformer", "transformer_2"),
}


def settings(value: Any) -> dict[str, Any]:
    """The settings of a calibration; those that inference takes from it are checked by type and range."""
    out = plain(value, "settings", dict)
    for name, good in _SETTINGS.items():
        if name in out and not good(out[name]):
            raise HeartError(f"the calibration's setting {name} is {shown(out[name])}: it is damaged")
    if "order" in out:
        out["order"] = order(out["order"])
    return out


def phases(value: Any, count: int) -> dict[str, Any]:
    """Boundaries, weights and steps of so many phases; nothing for one."""
    found = plain(value, "phases", dict)
    if count == 1 and not found:
        return found
    if set(found) != {"sigmas", "weights", "steps"}:
        raise HeartError("the calibration's phases are an object with sigmas, weights and steps")
    array(found["weights"], "weights of phases", 1, 0.0, math.inf, shape=(count,))
    array(found["steps"], "steps of phases", 1, 1, 1_000_000, shape=(count,))
    if count == 1 and found["sigmas"] == []:
        return found
    sigmas = array(found["sigmas"], "sigmas", 1, 0.0, math.inf, open_low=True, shape=(count - 1,))
    if (np.diff(sigmas) >= 0).any():
        raise HeartError(f"the calibration's sigmas must descend, not {shown(sigmas.tolist())}")
    return found
