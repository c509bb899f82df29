"""Operations besides attention itself, each in Triton, C or PyTorch: block scores, means, k-means, backward."""

from __future__ import annotations

import importlib

from .chooser import OPS

_MODULES = ("scores", "means", "kmeans", "rank", "backward")


def available() -> dict[str, dict[str, list[str]]]:
    """Every operation with its ways, and why each cannot serve on this machine; no reasons: it can."""
    for name in _MODULES:
        importlib.import_module(f".{name}", __name__)
    return {name: op.available() for name, op in OPS.items()}
