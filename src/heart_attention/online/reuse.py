"""When a cached mask still serves: drift against the anchor, the layer gate, and the policies that decide.

Everything here is a pure function of tensors or a frozen dataclass; the engine keeps the state. Notation as
in the paper's section "Temporal Mask Reuse": an anchor holds the features of the step at which a head was
last refreshed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import HeartError, shown
from ..kernels.ops.means import token_means

STEP_LIMIT = 1_000_000

# ---------------------------------------- drift


def pool(x: Tensor, seen: slice | Tensor | None = None) -> Tensor:
    """Mean over the tokens the predictor sees, in fp32: [B, H, N, D] -> [B, H, D]."""
    return token_means(_seen(x, seen))


def features(q: Tensor, k: Tensor, kind: str, seen: slice | Tensor | None = None) -> Tensor:
    """What an anchor keeps: token means [2, B, H, D] (kind "mean") or all tokens [2, B, H, n, D] (kind "tokens").

    Means are computed in fp32. For two-byte models they are then rounded to two bytes, which is what the
    paper's 0.35 MB counts; both sides of a comparison are rounded alike, so equal inputs still give a drift
    of exactly 0.
    """
    if kind == "tokens":
        return torch.stack((_seen(q, seen), _seen(k, seen)))
    means = torch.stack((pool(q, seen), pool(k, seen)))
    return means if q.dtype in (torch.float32, torch.float64) else means.to(torch.float16)


def drift(anchor: Tensor, now: Tensor) -> Tensor:
    """L1 distance of query plus key features, in fp32, averaged over tokens if they have any: -> [B, H]."""
    if anchor.dim() == 4:
        return (now.float() - anchor.float()).abs().sum((0, -1))
    parts = [(now[i].float() - anchor[i].float()).abs().sum(-1).mean(-1) for i in range(2)]
    return parts[0] + parts[1]


def norm(anchor: Tensor) -> Tensor:
    """The anchor's own L1 norm, the scale of a relative drift: [2, B, H, (n,) D] -> [B, H]."""
    return anchor.float().abs().sum((0, -1)) if anchor.dim() == 4 else drift(anchor, torch.zeros_like(anchor))


def _seen(x: Tensor, seen: slice | Tensor | None) -> Tensor:
    if seen is None:
        return x
    return x[:, :, seen] if isinstance(seen, slice) else x.index_select(2, seen)


# ---------------------------------------- layer gate


def gate(
    want: Tensor,
    low: float,
    high: float,
    cached: Tensor,
    heads: int | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The layer-level gate on per-head wishes, batch item by batch item.

    Args:
        want: bool [B, H], heads marked for refresh.
        low, high: below `low` of the heads nobody refreshes, above `high` everybody does, between them as
            wished.
        cached: bool [B, H]; a head without a cache refreshes whatever the gate says.
        heads: heads of the whole layer when this process holds only some of them (context parallel).
        reduce: adds a tensor up over the processes that hold the other heads.
    """
    count = want.sum(-1, keepdim=True).double()  # [B, 1]
    if reduce is not None:
        count = reduce(count)
    ratio = count / (heads or want.shape[-1])
    return ((want & ~(ratio < low)) | (ratio > high)) | ~cached


# ---------------------------------------- policies


@dataclass
class ReuseState:
    """What a policy may look at besides the drift: one call of one layer, tensors [B, H]."""

    cached: Tensor  # bool: this head has a mask
    age: Tensor  # int64: denoising steps since its last refresh
    layer: int = 0
    step: int = 0  # the denoising step, warm-up included
    norm: Tensor | None = None  # fp32: L1 norm of the anchor
    heads: int | None = None  # heads of the layer over all processes
    reduce: Callable[[Tensor], Tensor] | None = None  # sum over those processes


class Policy:
    """Decides which heads get a new mask; a subclass writes `refresh`, everything else has a default.

    `features` says what drift it wants: "mean" (token means), "tokens" (every token), or None for no drift at all.
    """

    features: str | None = None
    wants_norm: bool = True  # whether `refresh` reads the anchor's norm
    expected_refresh: float = 0.3  # share of masks predicted anew, as long as a layer has shown nothing of its own
    decide: str = "host"  # where the decision is read: see `TMR`

    def refresh(self, drift: Tensor | None, state: ReuseState) -> Tensor:
        """Heads to refresh, bool [B, H]; `drift` is fp32 [B, H] against the anchor, 0 for heads without a cache."""
        return torch.ones_like(state.cached)

    @property
    def name(self) -> str:
        """How configs call it."""
        return type(self).__name__

    def check(self, layers: int) -> None:
        """Raise if the policy does not fit a model of so many layers."""

    def oddities(self) -> list[str]:
        """A sentence for each setting that is allowed and may have been meant otherwise."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Settings as JSON types."""
        return {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}


class AdaptedPolicy(Policy):
    """A user's object with `refresh` that does not derive from `Policy`, made one at the door."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.features = getattr(inner, "features", None)

    @property
    def name(self) -> str:
        """The user's own class."""
        return type(self.inner).__name__

    def refresh(self, drift: Tensor | None, state: ReuseState) -> Tensor:
        """As the user's object does."""
        return self.inner.refresh(drift, state)


def adapt(policy: Any) -> Policy:
    """A policy from anything that decides; refuses what does not."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) or not callable(getattr(policy, "refresh", None)):
        raise HeartError(f"reuse is {shown(policy)}: give TMR(...), Interval(n), Warmup(n) or Always()")
    return AdaptedPolicy(policy)


@dataclass(frozen=True)
class TMR(Policy):
    """Temporal Mask Reuse: refresh a head iff its drift from the anchor exceeds `delta`, then the layer gate.

    Args:
        delta: absolute L1 distance (the paper: 30 for XAttention, 8 for SVG2 on Wan), one number or one a
            layer.
            0 reuses only on equal features, a negative number never reuses. 30 if neither form is given.
        gate: (low, high) with 0 <= low <= high <= 1; shares of refreshing heads below/above which all
            reuse/refresh.
        relative: the scale-free form: drift divided by the anchor's own L1 norm, one number or one a layer.
        drift: "mean" (the paper's online rule) or "tokens" (its Eq. 3, for studies: keeps every token of q
            and k).
        decide: "host" waits for the decision and predicts only the heads that refresh; "device" predicts all heads and
            chooses between old and new masks where they lie: the same masks without a wait, and no prediction saved.
    """

    delta: float | tuple[float, ...] | None = None
    gate: tuple[float, float] = (0.4, 0.8)
    relative: float | tuple[float, ...] | None = None
    drift: str = "mean"
    decide: str = "host"

    def __post_init__(self) -> None:
        if self.delta is not None and self.relative is not None:
            raise HeartError(
                f"TMR got delta={shown(self.delta)} and relative={shown(self.relative)}: give one of the two"
            )
        if self.delta is None and self.relative is None:
            object.__setattr__(self, "delta", 30.0)
        for name in ("delta", "relative"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _limit(name, getattr(self, name)))
        object.__setattr__(self, "gate", _gate_bounds(self.gate))
        if not isinstance(self.drift, str) or self.drift not in ("mean", "tokens"):
            raise HeartError(f"TMR's drift is {shown(self.drift)}: it must be 'mean' or 'tokens'")
        if not isinstance(self.decide, str) or self.decide not in ("host", "device"):
            raise HeartError(f"TMR's decide is {shown(self.decide)}: it must be 'host' or 'device'")

    @property
    def features(self) -> str:  # type: ignore[override]
        """Which features the anchor keeps."""
        return self.drift

    @property
    def wants_norm(self) -> bool:  # type: ignore[override]
        """Only a relative bound is a share of the anchor's norm."""
        return self.relative is not None

    @property
    def expected_refresh(self) -> float:  # type: ignore[override]
        """Decided on the device, every mask is predicted."""
        return 1.0 if self.decide == "device" else Policy.expected_refresh

    def oddities(self) -> list[str]:
        """Bounds that make the policy another one."""
        name = "delta" if self.relative is None else "relative"
        value = getattr(self, name)
        if isinstance(value, tuple):
            return []
        if value < 0:
            return [f"TMR's {name} is {value:g}: below 0 no mask is ever reused, as with Always()"]
        return (
            [f"TMR's {name} is inf: masks of the first sparse step are never predicted anew"]
            if value == math.inf
            else []
        )

    def limit(self, layer: int) -> float:
        """The bound on the drift (absolute or relative) that holds in this layer."""
        limit = self.delta if self.relative is None else self.relative
        assert limit is not None  # __post_init__ gives delta its default
        return limit[layer] if isinstance(limit, tuple) else limit

    def check(self, layers: int) -> None:
        """Raise unless a per-layer bound has one number for each of the model's layers."""
        limit = self.delta if self.relative is None else self.relative
        if isinstance(limit, tuple) and len(limit) != layers:
            raise HeartError(f"TMR has {len(limit)} per-layer bounds but the model has {layers} layers: give one each")

    def refresh(self, drift: Tensor | None, state: ReuseState) -> Tensor:
        """Refresh iff drift > bound (NaN counts as beyond any bound), then the gate."""
        bound: Any = self.limit(state.layer)
        if self.relative is not None and not math.isinf(bound):
            bound = bound * state.norm  # comparing products needs no division by a norm that may be 0
        want = ~(drift <= bound) | ~state.cached
        return gate(want, *self.gate, state.cached, state.heads, state.reduce)


@dataclass(frozen=True)
class Interval(Policy):
    """Refresh every head at every n-th step after its last refresh (AdaSpa's rule)."""

    n: int
    features: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        _whole("Interval", self.n, 1)

    def refresh(self, drift: Tensor | None, state: ReuseState) -> Tensor:
        """Refresh heads whose mask is n steps old."""
        return (state.age >= self.n) | ~state.cached


@dataclass(frozen=True)
class Warmup(Policy):
    """Refresh at every step before step n, then reuse for ever (PAROAttention's rule)."""

    n: int
    features: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        _whole("Warmup", self.n, 0)

    def refresh(self, drift: Tensor | None, state: ReuseState) -> Tensor:
        """Refresh all before step n, afterwards only heads that have no mask."""
        return torch.ones_like(state.cached) if state.step < self.n else ~state.cached


@dataclass(frozen=True)
class Always(Policy):
    """Predict a new mask at every step: the backbone as it is without HEART."""

    features: ClassVar[str | None] = None
    expected_refresh: ClassVar[float] = 1.0

    def refresh(self, drift: Tensor | None, state: ReuseState) -> Tensor:
        """Refresh all."""
        return torch.ones_like(state.cached)


POLICIES: dict[str, type] = {"TMR": TMR, "Interval": Interval, "Warmup": Warmup, "Always": Always}


def register(cls: type) -> type:
    """Make a policy of your own known by its class's name, so that configs with it can be saved and loaded."""
    if not isinstance(cls, type) or not issubclass(cls, Policy) or not is_dataclass(cls):
        raise HeartError(f"cannot register {cls!r}: give a frozen dataclass derived from heart.Policy")
    if POLICIES.get(cls.__name__, cls).__qualname__ != cls.__qualname__:
        raise HeartError(f"a policy named {cls.__name__!r} is known already: choose another name")
    POLICIES[cls.__name__] = cls
    return cls


# ---------------------------------------- checks


def _limit(name: str, value: Any) -> float | tuple[float, ...]:
    if isinstance(value, Tensor) or hasattr(value, "tolist"):
        value = value.tolist()
    numbers = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not numbers or not all(map(_is_number, numbers)):
        raise HeartError(f"TMR's {name} is {shown(value)}: it must be a number, or one number a layer")
    if any(math.isnan(x) for x in numbers):
        raise HeartError(f"TMR's {name} is {shown(value)}: NaN compares with nothing, give a number")
    return tuple(map(float, numbers)) if isinstance(value, Sequence) else float(value)


def _is_number(value: Any) -> bool:
    """Whether this is a number that a float can hold; infinity and NaN are floats."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)


def _gate_bounds(value: Any) -> tuple[float, float]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_is_number, value)):
        raise HeartError(f"TMR's gate is {shown(value)}: it must be two numbers (low, high)")
    low, high = map(float, value)
    if not 0 <= low <= high <= 1:
        raise HeartError(f"TMR's gate is ({low:g}, {high:g}): it must hold 0 <= low <= high <= 1")
    return low, high


def _whole(name: str, n: Any, least: int) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or not least <= n <= STEP_LIMIT:
        raise HeartError(f"{name}(n) got n={shown(n)}: it must be a whole number of steps, at least {least}")
