"""Backbones: how the mask is predicted. `registry` finds them by name."""

from __future__ import annotations

from .base import Backbone, adapt
from .ear import EAR
from .pisa import PISA
from .registry import by_name, find, from_dict, names, register
from .sparge import Sparge
from .svg2 import SVG2
from .xattention import XAttention

__all__ = [
    "EAR", "PISA", "SVG2", "Backbone", "Sparge", "XAttention", "adapt", "by_name", "find", "from_dict", "names", "register",
]  # fmt: skip
