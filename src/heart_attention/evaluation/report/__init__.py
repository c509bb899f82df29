"""One HTML file from a results folder: videos side by side, table, scatter, heads, steps, provenance."""

from .build import build

__all__ = ["build"]
