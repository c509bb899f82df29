"""Kernels: who computes a planned mask. Each says why it cannot serve; the first of the list that can is taken."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Protocol

from torch import Tensor

from ..errors import HeartError
from .plan import Plan, make_plan

__all__ = ["Kernel", "Plan", "available", "choose", "get", "make_plan", "names", "plan", "register", "run"]

# Name -> module with the object KERNEL, quickest first. Imported on first use: some need packages of their own.
_MODULES = {
    "flashinfer": "flashinfer",
    "triton": "triton_attention",
    "cpu": "cpu",
    "gather": "gather",
    "eager": "eager",
}


class Kernel(Protocol):
    """What a kernel offers."""

    name: str

    def reasons_not(self, mask: Any = None, q: Tensor | None = None) -> list[str]:
        """Why it cannot serve here, or not for this mask and these queries; empty if it can."""
        ...

    def plan(self, mask: Any) -> Plan:
        """Prepare a mask once."""
        ...

    def run(
        self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Compute it as often as wanted, [B, H, N, D]."""
        ...


class _Missing:
    """Stands for a kernel whose module cannot be imported."""

    def __init__(self, name: str, reason: str):
        self.name, self.reason = name, reason

    def reasons_not(self, mask: Any = None, q: Tensor | None = None) -> list[str]:
        return [self.reason]

    def plan(self, mask: Any) -> Plan:
        raise HeartError(f"kernel {self.name!r} cannot serve: {self.reason}")

    def run(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, scale: float | None = None):
        raise HeartError(f"kernel {self.name!r} cannot serve: {self.reason}")


_REGISTERED: dict[str, Kernel] = {}  # kernels of users' own, asked before ours


def register(kernel: Kernel) -> None:
    """Make a kernel of your own known; `auto` asks it before the built-in ones."""
    if kernel.name in names() or kernel.name == "auto":
        raise HeartError(f"a kernel named {kernel.name!r} is known already: choose another name")
    _REGISTERED[kernel.name] = kernel


def names() -> list[str]:
    """All kernel names, in the order in which `auto` asks them."""
    return [*_REGISTERED, *_MODULES]


def get(name: str) -> Kernel:
    """The kernel of that name, whether or not it can serve."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _MODULES:
        raise HeartError(f"there is no kernel {name!r}: choose one of auto, {', '.join(names())}")
    try:
        return _imported(_MODULES[name])
    except (ImportError, OSError) as error:
        return _Missing(name, f"it cannot be imported ({error})")


@functools.cache
def _imported(module: str) -> Kernel:
    return importlib.import_module(f".{module}", __name__).KERNEL


def available() -> dict[str, list[str]]:
    """Every kernel with the reasons why it cannot serve on this machine; no reasons: it can."""
    return {name: get(name).reasons_not() for name in names()}


def choose(mask: Any = None, q: Tensor | None = None, name: str = "auto") -> Kernel:
    """The named kernel, or with "auto" the first that can serve this mask and these queries."""
    candidates = [get(name)] if name != "auto" else [get(each) for each in names()]
    refusals = []
    for kernel in candidates:
        reasons = kernel.reasons_not(mask, q)
        if not reasons:
            return kernel
        refusals.append(f"{kernel.name} ({'; '.join(reasons)})")
    if name != "auto":
        raise HeartError(f"kernel {refusals[0]} cannot serve: choose another, or 'auto'")
    raise HeartError(f"no kernel can serve: {', '.join(refusals)}")


def plan(name: str, mask: Any) -> Plan:
    """Plan a mask for the named kernel ("auto": the first that serves), once; then `run` it as often as wanted."""
    return choose(mask, None, name).plan(mask)


def run(plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Attention of q, k, v [B, H, N, D] over what the plan keeps; `scale` defaults to 1/√D."""
    check(plan, q, k, v, out)
    return get(plan.kernel).run(plan, q, k, v, out=out, scale=scale)


def check(plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> None:
    """Refuse tensors that the plan was not made for."""
    of_q = (*plan.shape, plan.n_q + plan.tail, q.shape[-1])
    of_k = (*of_q[:2], plan.n_k + plan.tail, q.shape[-1])
    dtype, device = q.dtype, q.device
    for name, x, expected in (("q", q, of_q), ("k", k, of_k), ("v", v, of_k), ("out", out, of_q)):
        if x is None:
            continue
        if x.shape != expected:
            raise HeartError(f"{name} has shape {tuple(x.shape)} but the plan and q need {expected} [B, H, N, D]")
        if x.dtype != dtype or x.device != device:
            raise HeartError(
                f"{name} is {x.dtype} on {x.device} but q is {dtype} on {device}: give all in one type and place"
            )
    if plan.device != device:
        raise HeartError(f"the plan lives on {plan.device} and q on {device}: move it with plan.to({str(device)!r})")
