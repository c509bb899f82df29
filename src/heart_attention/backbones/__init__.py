"""Backbones: how the mask is predicted. `registry` finds them by name."""

from __future__ import annotations

from .band import Band
from .base import Backbone, adapt
from .ear import EAR
from .exact_mass import ExactMass
from .lite import Lite
from .pisa import PISA
from .radial import Radial
from .registry import by_name, find, from_dict, names, register
from .sparge import Sparge
from .svg import SVG
from .svg2 import SVG2
from .xattention import XAttention

__all__ = [
    "EAR", "PISA", "SVG", "SVG2", "Backbone", "Band", "ExactMass", "Lite", "Radial", "Sparge", "XAttention",
    "adapt", "by_name", "find", "from_dict", "names", "register",
]  # fmt: skip
