"""Backbones: how the mask is predicted. `registry` finds them by name."""

from __future__ import annotations

from .base import Backbone, adapt
from .ear import EAR
from .registry import by_name, find, from_dict, names, register
from .svg2 import SVG2
from .xattention import XAttention

__all__ = ["EAR", "SVG2", "Backbone", "XAttention", "adapt", "by_name", "find", "from_dict", "names", "register"]
