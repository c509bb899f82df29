"""What a backbone is, and what backbones share: reading thresholds, checking shapes, JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..errors import HeartError
from ..masks import BlockMask, ClusterMask, Text

Thresholds = float | Sequence[Any] | Tensor
Key = tuple[int, str, int]  # layer, guidance branch, number of the first batch item


@runtime_checkable
class Backbone(Protocol):
    """Predicts which attention to compute. Anything with these members can be given to `HeartConfig`."""

    name: ClassVar[str]
    default_threshold: ClassVar[float]

    def predict(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Thresholds,
        state: Any = None,
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
    ) -> BlockMask | ClusterMask:
        """The mask for q, k [B, H, N, D] and thresholds τ (float, [H] or [B, H]); τ ≥ 1 keeps everything.

        Args:
            state: from `new_state()`, what the backbone remembers between calls of one layer and branch.
            text: where joint text tokens lie.
            order: permutation of the tokens for block masks.
            heads: which heads of the model these are, when they are not all.
            key: (layer, branch, first batch item), for private randomness and for `state`.
        """
        ...

    def new_state(self) -> Any:
        """An empty memory for one (layer, branch)."""
        ...

    def scaled_to(self, n_tokens: int) -> Any:
        """A copy with settings that suit `n_tokens`."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Name and settings, for JSON."""
        ...


class NoState:
    """The memory of a backbone that remembers nothing."""

    nbytes = 0

    def clear(self) -> None:
        """Nothing to forget."""


class Settings:
    """JSON for a frozen dataclass of settings with a `name`."""

    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Name and settings, for JSON."""
        return {"name": self.name, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The backbone that `to_dict` described."""
        known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        unknown = set(data) - known - {"name"}
        if unknown:
            raise HeartError(f"{cls.name} has no setting {sorted(unknown)}: it has {sorted(known)}")
        if data.get("name", cls.name) != cls.name:
            raise HeartError(f"these are settings of {data['name']!r}, not of {cls.name!r}")
        return cls(**{name: value for name, value in data.items() if name != "name"})


def check_qk(q: Tensor, k: Tensor) -> None:
    """Raise unless q and k are [B, H, N, D] with equal B, H and D."""
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise HeartError(
            f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)} do not match: give both as [B, H, N, D]"
        )
    if 0 in q.shape or 0 in k.shape:
        raise HeartError(
            f"q of shape {tuple(q.shape)} and k of shape {tuple(k.shape)} hold nothing: every size is at least 1"
        )
    if not (q.is_floating_point() and k.is_floating_point()):
        raise HeartError(f"q is {q.dtype} and k is {k.dtype}: give floating-point numbers")


def check_positive(owner: str, **values: Any) -> None:
    """Raise unless each value is an integer of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise HeartError(f"{owner} got {name}={value!r}: give an integer of at least 1")


def read_thresholds(thresholds: Thresholds, batch: int, heads: int) -> Tensor:
    """Thresholds as float64 [B, H] on the CPU, from a float, [H] or [B, H]."""
    tau = torch.as_tensor(thresholds, dtype=torch.float64).detach().cpu()
    if tuple(tau.shape) not in {(), (heads,), (batch, heads), (1, heads)}:
        raise HeartError(
            f"thresholds of shape {tuple(tau.shape)} do not fit {batch} batch items of {heads} heads: "
            f"give one number, [{heads}] or [{batch}, {heads}]"
        )
    bad = tau[~((tau > 0) & torch.isfinite(tau))]
    if bad.numel():
        raise HeartError(
            f"the threshold {bad.flatten()[0].item()} is not a positive finite number: "
            "give a share of attention between 0 and 1, or 1 for dense"
        )
    return tau.expand(batch, heads)


def read_heads(heads: Sequence[int] | Tensor | None, count: int) -> list[int]:
    """The model's numbers of the `count` heads at hand."""
    if heads is None:
        return list(range(count))
    named = [int(h) for h in heads]
    if len(named) != count:
        raise HeartError(f"{len(named)} head numbers for {count} heads: give one for each")
    return named


def read_text(text: Text | Sequence[Text] | None, n: int) -> Text | None:
    """One text for all batch items, checked against `n` tokens; None if there is none."""
    if text is not None and not isinstance(text, Text):
        different = set(text)
        if len(different) > 1:
            raise HeartError(f"{len(different)} different text layouts in one batch: predict each item on its own")
        text = next(iter(different), None)
    if text is None or text.prompt + text.unused == 0:
        return None
    text.check(n)
    return text
