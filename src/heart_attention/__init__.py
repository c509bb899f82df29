"""HEART: faster video diffusion without retraining. This file holds the public names and nothing else."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from . import moved
from .errors import HeartError

__version__ = "0.2.0"

if TYPE_CHECKING:  # what type checkers and editors see; at run time names are loaded on first use, below
    from . import backbones, calibration, kernels, masks, tiny
    from .api import (
        attention,
        disable,
        enable,
        enabled,
        record,
        register_backbone,
        register_error,
        register_policy,
        stats,
    )
    from .backbones import EAR, PISA, SVG, SVG2, Backbone, Band, ExactMass, Lite, Radial, Sparge, XAttention
    from .calibration.file import Calibration
    from .calibration.workflow.calibrate import calibrate
    from .config import HeartConfig, Point, PointTable
    from .evaluation.compare import compare
    from .evaluation.metrics import register_metric
    from .evaluation.report import report
    from .kernels.registry import register_kernel
    from .masks import BlockMask, ClusterMask, Text
    from .models import register_family
    from .online.engine import Engine
    from .online.reuse import TMR, Always, Interval, Policy, Warmup
    from .presets import PRESETS

# Public name -> module that defines it.
_PUBLIC = {
    "Always": "online.reuse",
    "Backbone": "backbones",
    "Band": "backbones",
    "BlockMask": "masks",
    "Calibration": "calibration.file",
    "ClusterMask": "masks",
    "EAR": "backbones",
    "Engine": "online.engine",
    "ExactMass": "backbones",
    "HeartConfig": "config",
    "Lite": "backbones",
    "Interval": "online.reuse",
    "PISA": "backbones",
    "PRESETS": "presets",
    "Point": "config",
    "PointTable": "config",
    "Policy": "online.reuse",
    "Radial": "backbones",
    "SVG": "backbones",
    "SVG2": "backbones",
    "Sparge": "backbones",
    "TMR": "online.reuse",
    "Text": "masks",
    "Warmup": "online.reuse",
    "XAttention": "backbones",
    "attention": "api",
    "calibrate": "calibration.workflow.calibrate",
    "compare": "evaluation.compare",
    "disable": "api",
    "enable": "api",
    "enabled": "api",
    "record": "api",
    "register_backbone": "api",
    "register_error": "api",
    "register_family": "models",
    "register_kernel": "kernels.registry",
    "register_metric": "evaluation.metrics",
    "register_policy": "api",
    "report": "evaluation.report",
    "stats": "api",
}
_MODULES = ("backbones", "calibration", "kernels", "masks", "models", "tiny")

__all__ = [
    "EAR",
    "PISA",
    "PRESETS",
    "SVG",
    "SVG2",
    "TMR",
    "Always",
    "Backbone",
    "Band",
    "BlockMask",
    "Calibration",
    "ClusterMask",
    "Engine",
    "ExactMass",
    "HeartConfig",
    "HeartError",
    "Interval",
    "Lite",
    "Point",
    "PointTable",
    "Policy",
    "Radial",
    "Sparge",
    "Text",
    "Warmup",
    "XAttention",
    "__version__",
    "attention",
    "backbones",
    "calibrate",
    "calibration",
    "compare",
    "disable",
    "enable",
    "enabled",
    "kernels",
    "masks",
    "record",
    "register_backbone",
    "register_error",
    "register_family",
    "register_kernel",
    "register_metric",
    "register_policy",
    "report",
    "stats",
    "tiny",
]

if not TYPE_CHECKING:  # a visible __getattr__ would hide typos from type checkers

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
            globals()[name] = value
            return value
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if (module := moved.attribute(name)) is not None:
            return module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__) | set(_MODULES))


class _Package(types.ModuleType):
    """A verb and the file behind it may share a name: the package shows the verb."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
moved.install()
