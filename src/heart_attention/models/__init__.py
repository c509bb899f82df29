"""How HEART gets into diffusers transformers: families by class name, and the interception itself."""

from __future__ import annotations

import copy
import warnings

from .families.base import Family
from .families.registry import FAMILIES, REFUSED, family_of, register_family

__all__ = ["FAMILIES", "REFUSED", "Family", "family_of", "register", "register_family"]


def register(class_name: str, family: Family) -> None:
    """The old form of `register_family`: a family for transformers of this class name."""
    warnings.warn("models.register is models.register_family now", DeprecationWarning, stacklevel=2)
    family = copy.copy(family)
    family.classes = (class_name,)
    register_family(family)
