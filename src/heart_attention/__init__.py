"""HEART: faster video diffusion without retraining. This file holds the public names and nothing else."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from . import moved

__version__ = "0.1.0"

# Public name -> module that defines it. Loaded on first use, so that `import heart_attention` stays quick.
_PUBLIC = {
    "enable": "api",
    "enabled": "api",
    "disable": "api",
    "stats": "api",
    "record": "api",
    "attention": "api",
    "Engine": "online.engine",
    "HeartConfig": "config",
    "PRESETS": "config",
    "XAttention": "backbones",
    "SVG2": "backbones",
    "BlockMask": "masks",
    "ClusterMask": "masks",
    "Text": "masks",
    "TMR": "online.reuse",
    "Interval": "online.reuse",
    "Warmup": "online.reuse",
    "Always": "online.reuse",
    "Calibration": "calibration.file",
    "register_family": "models",
    "HeartError": "errors",
    "register_kernel": "kernels.registry",
}
_MODULES = ("kernels", "calibration", "tiny", "backbones", "models", "masks")

__all__ = ["__version__", *_PUBLIC, "kernels"]


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
    """A verb and the file behind it may share a name (`stats`, `record`): the package shows the verb."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
moved.install()
