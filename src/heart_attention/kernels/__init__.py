"""Kernels: who computes a planned mask."""

from .base import Kernel, Visit
from .plan import Plan, make_plan
from .registry import available, check, choose, get, names, plan, prepare, register, run

__all__ = [
    "Kernel", "Plan", "Visit", "available", "check", "choose", "get", "make_plan", "names", "plan", "prepare", "register",
    "run",
]  # fmt: skip
