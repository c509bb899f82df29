"""The speed-quality front of methods at several budgets each: `heart frontier`."""

from .measure import frontier

__all__ = ["frontier"]
