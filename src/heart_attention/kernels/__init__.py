"""Kernels: who computes a planned mask."""

from .base import Kernel
from .plan import Plan, make_plan
from .registry import available, check, choose, get, names, plan, prepare, register, run

__all__ = [
    "Kernel", "Plan", "available", "check", "choose", "get", "make_plan", "names", "plan", "prepare", "register", "run",
]  # fmt: skip
