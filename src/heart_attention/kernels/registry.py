"""Which kernels there are, and which one serves: each says why it cannot; the first of the list that can is taken."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError, shown
from .base import Kernel, Missing, Visit, adapted
from .ops import build
from .plan import Plan

# Name -> module with the object KERNEL, quickest first. Imported on first use: some need packages of their own.
MODULES = {
    "cudnn": "cudnn",
    "flashinfer_blocks": "flashinfer_blocks",
    "flashinfer": "flashinfer",
    "triton": "triton_attention",
    "flex": "flex",
    "cudnn_fp8": "cudnn_fp8",
    "flashinfer_rest": "flashinfer_rest",
    "cpu": "cpu",
    "gather": "gather",
    "eager": "eager",
}
REGISTERED: dict[str, Kernel] = {}  # kernels of users' own, asked before ours


def register_kernel(kernel: Any) -> None:
    """Make a kernel of your own known; `auto` asks it before the built-in ones.

    It is a `Kernel`, or anything with its `name`, `reasons_not`, `plan` and `run`. Without `rest` in the signatures of
    the first two it serves whenever the rest is dropped.
    """
    if kernel.name in names() or kernel.name == "auto":
        raise HeartError(f"a kernel named {kernel.name!r} is known already: choose another name")
    REGISTERED[kernel.name] = adapted(kernel)


register = register_kernel  # as `kernels.register`


def names() -> list[str]:
    """All kernel names, in the order in which `auto` asks them."""
    return [*REGISTERED, *MODULES]


def get(name: str) -> Kernel:
    """The kernel of that name, whether or not it can serve."""
    if name in REGISTERED:
        return REGISTERED[name]
    if name not in MODULES:
        raise HeartError(f"there is no kernel {shown(name)}: choose one of auto, {', '.join(names())}")
    try:
        return _imported(MODULES[name])
    except (ImportError, OSError) as error:
        return Missing(name, f"it cannot be imported ({error})")


@functools.cache
def _imported(module: str) -> Kernel:
    return importlib.import_module(f".{module}", __package__).KERNEL


def available() -> dict[str, list[str]]:
    """Every kernel with the reasons why it cannot serve on this machine; no reasons: it can."""
    return {name: get(name).reasons_not() for name in names()}


def prepare(device: torch.device) -> None:
    """Build what kernels need on this device, before anything is timed."""
    if device.type == "cpu":
        build.reasons_not()


def choose(
    mask: Any = None, q: Tensor | None = None, name: str = "auto", rest: str = "drop", visits: bool = False
) -> Kernel:
    """The named kernel, or with "auto" the first that can serve this mask, these queries and this rest.

    `visits`: it must take a `Visit`, for backbones that want to know what tiles gain, or leave out those that gain little.
    """
    candidates = [get(name)] if name != "auto" else [get(each) for each in names()]
    refusals = []
    for kernel in candidates:
        reasons = kernel.reasons_not_auto(mask, q) if name == "auto" else []
        if rest not in kernel.rests:
            reasons = [*reasons, f"it does not know rest={rest!r}"]
        if visits and not kernel.visits:
            reasons = [*reasons, "it does not say which tiles could be skipped"]
        if visits and rest != "drop":
            reasons = [*reasons, f"tiles that could be skipped are known with the rest dropped only, not with {rest!r}"]
        reasons = reasons or kernel.reasons_not(mask, q, rest)
        if not reasons:
            return kernel
        refusals.append(f"{kernel.name} ({'; '.join(reasons)})")
    if name != "auto":
        raise HeartError(f"kernel {refusals[0]} cannot serve: choose another, or 'auto'")
    raise HeartError(f"no kernel can serve: {', '.join(refusals)}")


def plan(name: str, mask: Any, rest: str = "drop") -> Plan:
    """Plan a mask for the named kernel ("auto": the first that serves), once; then `run` it as often as wanted."""
    return choose(mask, None, name, rest).plan(mask, rest)


def run(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None = None,
    scale: float | None = None,
    mass: Tensor | None = None,
    visit: Visit | None = None,
) -> Tensor:
    """Attention of q, k, v [B, H, N, D] over what the plan keeps and approximates; `scale` defaults to 1/√D.

    `mass`, fp32 [B, H], takes the mean share of softmax mass in the approximated part, NaN if the kernel cannot say.
    `visit` says how to go through the kept groups; a kernel that cannot refuses.
    """
    check(plan, q, k, v, out)
    kernel = get(plan.kernel)
    if mass is not None and not kernel.rest_mass:
        mass.fill_(0.0 if plan.rest == "drop" else float("nan"))
        mass = None
    if visit is not None:
        _check_visit(plan, visit)
        return kernel.run_visit(plan, q, k, v, visit, out, scale)
    return kernel.run(plan, q, k, v, out=out, scale=scale, **({} if mass is None else {"mass": mass}))


def _check_visit(plan: Plan, visit: Visit) -> None:
    """Refuse a visit that does not fit the plan."""
    if plan.rest != "drop":
        raise HeartError(f"a visit of tiles needs the rest dropped, not {plan.rest!r}: plan with rest='drop'")
    if any(x is not None and tuple(x.shape) != plan.shape for x in (visit.descending, visit.skip)):
        raise HeartError(
            f"a visit says something for each head, [B, H] = {list(plan.shape)}: give tensors of that shape"
        )
    groups = (*plan.shape, plan.q_starts.shape[-1] - 1, plan.k_starts.shape[-1] - 1)
    if visit.gains is not None and tuple(visit.gains.shape) != groups:
        raise HeartError(f"gains have shape {tuple(visit.gains.shape)}: give {groups}, one for each pair of groups")
    if visit.skip is not None and not bool((visit.skip >= 0).all()):
        raise HeartError(
            "a visit leaves out what gains little: its `skip` holds numbers of 0 or more, in units of log2"
        )


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
