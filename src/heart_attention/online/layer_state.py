"""What one (transformer, layer, guidance branch, first batch item) remembers of a generation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..backbones.base import EXPECTED_DENSITY, Backbone
from ..kernels.ops.transfer import Reading
from ..masks import Packed
from .points import GroupSpec


@dataclass
class HeadGroup:
    """Heads of a layer that share a backbone and a rest: their masks, plan and warm start.

    Args:
        spec: backbone, rest, orders, the model's numbers of the heads and their thresholds.
        backbone: the backbone fitted to the sequence.
        places: positions of these heads among those of the call.
        memory: the backbone's own state.
    """

    spec: GroupSpec
    backbone: Backbone
    places: list[int]
    memory: Any
    packed: Packed | None = None
    learnt: Packed | None = None  # for the next call, from a backbone that learns
    plan: Any = None
    kernel: Any = None
    density: Tensor | None = None  # float64 [B, h]
    cost: Tensor | None = None  # float64 [B, h]: kept and approximated keys
    reading: Reading | None = None  # both of the present mask, on their way from a GPU
    rest_mass: Reading | None = None  # fp32 [B, h]: share of softmax mass in the approximated part, of the last call

    def settle(self) -> None:
        """Take over densities and costs that were under way."""
        if self.reading is not None:
            self.density, self.cost = self.reading.values()
            self.reading = None

    def nbytes(self) -> dict[str, int]:
        """Bytes held, by kind."""
        held = {"masks": sum(mask.nbytes for mask in (self.packed, self.learnt) if mask is not None)}
        held["plans"] = 0 if self.plan is None else self.plan.nbytes
        return held | self.backbone.state_bytes(self.memory)


@dataclass
class LayerState:
    """All groups of a layer, and what decides refresh and fallback; bool and integer tensors are on the CPU."""

    signature: tuple
    groups: list[HeadGroup]
    cached: Tensor  # bool [B, H]: this head has a mask
    refreshed_at: Tensor  # int64 [B, H]: step of its last refresh
    anchor: Tensor | None = None  # features of that step, [2, B, H, (n,) D]
    norm: Tensor | None = None  # L1 norm of the anchor, fp32 [B, H], where the policy wants it
    calls: int = 0
    refreshed: float = 0.0  # heads refreshed after the first call, as shares of all
    reason: str = ""  # why this layer runs dense at present
    wait: int = 0  # calls until it is looked at again
    patience: int = 1  # how long the next wait is
    late: Any = None  # the Row of the last call, while its densities are under way
    decision: Reading | None = (
        None  # fp32 [2, B, H]: drift and refresh of that call, where they were decided on the device
    )

    def nbytes(self) -> Counter[str]:
        """Bytes held, by kind."""
        total: Counter[str] = Counter(anchors=0 if self.anchor is None else self.anchor.nbytes)
        for group in self.groups:
            total.update(group.nbytes())
        return total

    @property
    def ready(self) -> bool:
        """Whether nothing is under way from a GPU any more."""
        under_way = [reading for group in self.groups for reading in (group.reading, group.rest_mass)] + [self.decision]
        return all(reading is None or reading.ready for reading in under_way)

    def refresh_rate(self, expected: float) -> float:
        """Share of masks to be predicted at a coming step: what was seen, leaning on an expectation at first."""
        seen = max(self.calls - 1, 0)
        return (self.refreshed + 2 * expected) / (seen + 2)

    def rest_mass(self) -> list[float] | None:
        """Share of softmax mass that approximated groups held, for each head; None where no kernel tells."""
        if all(group.rest_mass is None for group in self.groups):
            return None
        out = torch.zeros(self.cached.shape[1])
        for group in self.groups:
            if group.rest_mass is not None:
                out[group.places] = group.rest_mass.values().mean(0)
        return out.tolist()

    def per_head(self, values: str) -> Tensor:
        """`density` or `cost` of all heads, float64 [B, H]."""
        out = torch.ones(self.cached.shape, dtype=torch.float64)
        for group in self.groups:
            part = getattr(group, values)
            if part is not None:
                out[:, group.places] = part
            elif group.packed is not None:
                out[:, group.places] = EXPECTED_DENSITY
        return out


@dataclass
class Request:
    """One attention call on its way through the engine."""

    call: Any  # CallContext
    q: Tensor
    k: Tensor
    v: Tensor
    timer: Any  # Timer
    text: Any  # Text | None
    heads: list[int]  # the model's numbers of the heads at hand
    step: int = 0
    phase: int = 0
    drift: Tensor | None = None
    refresh: Tensor | None = field(default=None, repr=False)  # bool [B, H] on the CPU: heads to predict
    chosen: Tensor | None = field(default=None, repr=False)  # where the device decides: which of them take the new mask
