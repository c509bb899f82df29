"""Names of methods, as in the paper's tables, turned into configs: `dense`, `xattention`, `svg2+heart`, …"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..errors import HeartError
from .run import Method

DEFAULT = ("dense", "xattention", "xattention+heart", "svg2", "svg2+heart")
FULL = ("dense", "xattention", "xattention+tmr", "xattention+heart", "svg2", "svg2+tmr", "svg2+heart")
# What a suffix switches on: (temporal mask reuse, calibrated thresholds).
PARTS = {"": (False, False), "tmr": (True, False), "ebc": (False, True), "heart": (True, True)}


def shipped_calibration(backbone: str, model: str) -> str | None:
    """The calibration that the package carries for its embedded model, if there is one."""
    if model != "tiny":
        return None
    from .. import tiny

    path = Path(tiny.path()).parent / "calibrations" / f"{backbone}.heart.json"
    return str(path) if path.is_file() else None


def build(name: str, pipe, model: str, calibrations: dict[str, list[str]] | None = None, **changes: Any) -> Method:
    """The method of that name for this pipeline; `changes` replace fields of its config."""
    from ..config import HeartConfig, preset
    from ..online.reuse import Always

    if name == "dense":
        return Method("dense", HeartConfig(thresholds=1.0, reuse=Always(), dense_steps=0))
    backbone, _, part = name.partition("+")
    if backbone not in ("xattention", "svg2") or part not in PARTS:
        raise HeartError(
            f"unknown method {name!r}: use dense, or xattention or svg2, alone or with +tmr, +ebc or +heart"
        )
    reuse, calibrated = PARTS[part]
    config = preset(backbone, pipe)
    if not part:  # the backbone as published knows no way back to dense
        config = dataclasses.replace(config, force_sparse=True)
    if not reuse:
        config = dataclasses.replace(config, reuse=Always())
    if calibrated:
        path = (calibrations or {}).get(backbone) or shipped_calibration(backbone, model)
        if path is None and part == "ebc":
            raise HeartError(
                f"method {name!r} needs a calibration: make one with `heart calibrate --backbone {backbone}`"
            )
        if path is not None:
            from ..calibration import experts

            config = dataclasses.replace(config, thresholds=experts.load(path))
    return Method(name, dataclasses.replace(config, **changes) if changes else config)
