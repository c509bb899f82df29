"""One HTML file from a results folder: videos side by side, table, scatter, heads, steps, provenance."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from .build import build

__all__ = ["build", "report"]


def report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a results folder and return its path.

    Args:
        folder: what `heart.compare` or `heart demo` wrote.
        out: the page's name; None: `report.html` in the folder.
    """
    return build(folder, out)


def _old_build(*args: Any, **kwargs: Any) -> Path:
    """The old name of `heart.report`."""
    warnings.warn("heart.report.build(...) is called heart.report(...) now", DeprecationWarning, stacklevel=2)
    return build(*args, **kwargs)


report.build = _old_build  # type: ignore[attr-defined]
