"""Backbones: how the mask is predicted. `by_name` and `from_dict` find them."""

from __future__ import annotations

from typing import Any

from ..errors import HeartError
from .base import Backbone
from .svg2 import SVG2
from .xattention import XAttention

BACKBONES: dict[str, type] = {XAttention.name: XAttention, SVG2.name: SVG2}

__all__ = ["BACKBONES", "SVG2", "Backbone", "XAttention", "by_name", "from_dict"]


def _find(name: Any) -> type:
    if name not in BACKBONES:
        raise HeartError(f"there is no backbone {name!r}: choose one of {', '.join(BACKBONES)}")
    return BACKBONES[name]


def by_name(name: str, **settings: Any) -> Any:
    """The backbone of that name, with its default settings unless others are given."""
    return from_dict({"name": name, **settings})


def from_dict(data: dict[str, Any]) -> Any:
    """The backbone that `to_dict` described."""
    if not isinstance(data, dict) or "name" not in data:
        raise HeartError(f"a backbone's settings are a dict with a name, not {data!r}")
    return _find(data["name"]).from_dict(data)  # type: ignore[attr-defined]
