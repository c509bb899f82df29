"""Old module paths, importable for one more version: each gives the module's new home and a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

_OFFLINE = {
    name: f"calibration.{folder}.{name}"
    for folder, names in (
        ("measure", ("draws", "gradient", "probes", "replay", "trajectory")),
        ("solve", ("assignment", "cbc", "search", "solver")),
        ("workflow", ("settings", "store")),
    )
    for name in names
}
# Old path -> new path, both below heart_attention. What has the same name inside another folder comes first.
MOVED = {
    **{f"calibration.{name}": path for name, path in _OFFLINE.items()},
    "calibration.error": "calibration.measure.velocity_error",
    "calibration.heads": "calibration.measure.candidates",
    "calibration.methods": "calibration.solve.strategies",
    "calibration.run": "calibration.workflow.calibrate",
    "calibration.ray": "execution.ray",
    "clock": "online.clock",
    "compare": "evaluation.run",
    "engine": "online.engine",
    "kernels.backward": "kernels.ops.backward",
    "kernels.build": "kernels.ops.build",
    "methods": "evaluation.methods",
    "metrics": "evaluation.metrics",
    **{f"models.{name}": f"models.families.{name}" for name in ("base", "wan", "cogvideox", "hunyuan", "ltx", "mochi")},
    "models.intercept": "models.attachment",
    "models.parallel": "models.ulysses",
    "orders": "token_order",
    "pipelines": "evaluation.pipelines",
    "project": "evaluation.projection",
    "report": "evaluation.report",
    "reuse": "online.reuse",
    "studies": "evaluation.studies",
    "video": "evaluation.video",
    "worth": "online.cost_model",
}
_PACKAGE = __package__ or "heart_attention"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under their old paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for an old path, None for anything else."""
        old = fullname.removeprefix(f"{_PACKAGE}.")
        return importlib.machinery.ModuleSpec(fullname, self) if old != fullname and old in MOVED else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Put the real module in the place of the stand-in."""
        new = f"{_PACKAGE}.{MOVED[module.__name__.removeprefix(f'{_PACKAGE}.')]}"
        warnings.warn(f"{module.__name__} has moved to {new}", DeprecationWarning, stacklevel=6)
        sys.modules[module.__name__] = importlib.import_module(new)


def install() -> None:
    """Make the old paths importable."""
    if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def attribute(name: str) -> Any:
    """A module that users reach as an attribute of the package by its old name, or None."""
    return importlib.import_module(f"{_PACKAGE}.{name}") if name in MOVED else None
