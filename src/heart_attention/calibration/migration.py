"""Older calibration files in the form of the present version."""

from __future__ import annotations

from typing import Any

from ..errors import HeartError, shown
from .values import array

SCHEMA = "heart-calibration/2"
_OLD = "heart-calibration/1"
_BY_PHASE = ("E", "S", "bands")


def migrated(data: Any) -> dict[str, Any]:
    """A file's content in the present version; another schema is refused."""
    if not isinstance(data, dict) or "schema" not in data:
        raise HeartError("this is no calibration: it must be a JSON object with a schema")
    if data["schema"] == _OLD:
        return _from_version_1(data)
    if data["schema"] != SCHEMA:
        raise HeartError(
            f"the calibration's schema is {shown(data['schema'])}, this HEART reads {SCHEMA!r}: make it anew"
        )
    return data


def _from_version_1(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had thresholds of one backbone: K points that differ in the threshold, one phase."""
    if missing := sorted({"thresholds", "backbone", "method"} - set(data)):
        raise HeartError(f"the calibration lacks {', '.join(missing)}: it is damaged")
    out = {k: v for k, v in data.items() if k not in ("thresholds", "backbone", "candidates")}
    thresholds = array(data["thresholds"], "thresholds", 2, 0.0, 1.0, open_low=True)
    known = data.get("candidates", sorted(set(thresholds.ravel().tolist())))
    taus = array(known, "candidates", 1, 0.0, 1.0, open_low=True).tolist()
    if any(a >= b for a, b in zip(taus, taus[1:])):
        raise HeartError(f"the calibration's candidates must ascend, not {shown(taus)}")
    place = {tau: k for k, tau in enumerate(taus)}
    if not set(thresholds.ravel().tolist()) <= set(taus):
        raise HeartError("the calibration's thresholds are not all among its candidates")
    settings = data.get("settings")
    order = settings.get("order", "raster") if isinstance(settings, dict) else "raster"
    shared = {"backbone": data["backbone"], "rest": "drop", "order": order}
    out |= {"schema": SCHEMA, "points": [{**shared, "threshold": tau} for tau in taus]}
    out["choice"] = [[[place[tau] for tau in row] for row in thresholds.tolist()]]
    out |= {name: [out[name]] for name in _BY_PHASE if name in out}
    if isinstance(out.get("model"), dict):
        out["model"] = {**out["model"], "values_digest": None}
    return out
