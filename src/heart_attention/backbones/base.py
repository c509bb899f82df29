"""What a backbone is: the base class with defaults that the engine asks, and what backbones share."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import LONGEST, HeartError, shown
from ..kernels.base import Visit
from ..masks import Mask, Text

EXPECTED_DENSITY = 0.5  # what a mask keeps, as long as nobody knows

Thresholds: TypeAlias = float | Sequence[Any] | Tensor
Key = tuple[int, str, int]  # layer, guidance branch, number of the first batch item
Shape = tuple[int, ...]  # of q: [B, H, N, D]
Grid = tuple[int, int, int]  # video tokens as frames, rows, columns


class State:
    """What a backbone remembers between calls of one layer and branch; this one remembers nothing."""

    def clear(self) -> None:
        """Forget everything."""

    def forget(self, heads: Sequence[int]) -> None:
        """Forget these heads of the model."""

    def copy(self) -> Any:
        """What is remembered now, for `keep`."""

    def keep(self, before: Any, chosen: Tensor, heads: Sequence[int], first: int) -> None:
        """Go back to `before` for heads not in `chosen`, bool [B, H] on the device of the model; items count from `first`."""

    def nbytes(self) -> dict[str, int]:
        """Bytes held, by kind."""
        return {}


class Backbone(abc.ABC):
    """Predicts which attention to compute, for the heads it is given.

    A subclass is a frozen dataclass of its settings with a `name`, registered by `heart.register_backbone`. Only
    `predict` must be written; everything else has a default.
    """

    name: ClassVar[str]
    default_threshold: ClassVar[float] = 0.9
    default_delta: ClassVar[float] = 30.0  # bound on the drift, for models that no preset knows better
    rests: ClassVar[tuple[str, ...]] = ("drop", "mean")  # what may become of what its masks leave out
    default_rest: ClassVar[str] = "drop"  # what the original does with what its masks leave out
    candidates: ClassVar[tuple[float, ...]] = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)  # thresholds calibration tries

    @abc.abstractmethod
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
        v: Tensor | None = None,
        grid: Grid | None = None,
    ) -> Any:
        """The mask for q, k [B, H, N, D] and thresholds τ (float, [H] or [B, H]); τ ≥ 1 keeps everything.

        Args:
            state: from `new_state()`, what the backbone remembers between calls of one layer and branch.
            text: where joint text tokens lie.
            order: permutation of the tokens for block masks.
            heads: which heads of the model these are, when they are not all.
            key: (layer, branch, first batch item), for private randomness and for `state`.
            v: values [B, H, N, D], for a selection that reads them; a subclass may leave it out of its signature.
            grid: video tokens as (frames, rows, columns), for masks made from places; may be left out likewise.
        """

    def predict_many(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Sequence[float],
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
        v: Tensor | None = None,
        grid: Grid | None = None,
    ) -> tuple[list[Any], Any]:
        """A mask for each threshold, and the one that keeps everything; from one prediction where that can be.

        `grid` is given only to a backbone that reads it.
        """
        given: dict[str, Any] = {"text": text, "order": order, "heads": heads, "key": key}
        if self.reads_values:
            given["v"] = v
        if self.reads_grid:
            given["grid"] = grid
        masks = [self.predict(q, k, float(tau), self.new_state(), **given) for tau in thresholds]
        return masks, self.predict(q, k, 1.0, self.new_state(), **given)

    @property
    def reads_values(self) -> bool:
        """Whether `predict` takes v."""
        return _takes(type(self), "v")

    @property
    def reads_grid(self) -> bool:
        """Whether `predict` takes the grid of video tokens."""
        return _takes(type(self), "grid")

    def new_state(self) -> Any:
        """An empty memory for one (layer, branch)."""
        return State()

    def state_bytes(self, state: Any) -> dict[str, int]:
        """Bytes that such a memory holds, by kind."""
        return state.nbytes()

    def scaled_to(self, n_tokens: int) -> Any:
        """A copy with settings that suit `n_tokens`."""
        return self

    def usual(self) -> Any:
        """A copy with the settings that costs are measured with, where this one was fitted to a sequence."""
        return self

    def for_rest(self, rest: str) -> Any:
        """A copy that suits what becomes of the rest."""
        return self

    @property
    def remaps(self) -> bool:
        """Whether `remap` chooses anew at every call what a reused mask keeps."""
        return False

    def remap(self, mask: Any, q: Tensor, k: Tensor, v: Tensor | None, thresholds: Sequence[float]) -> Any:
        """A reused mask [B, H] with its kept groups chosen by the present q, k, v [B, H, N, D]."""
        return mask

    @property
    def warms_up(self) -> bool:
        """Whether it also predicts at the last dense step of the warm-up, so that the first sparse step may reuse that."""
        return False

    @property
    def learns(self) -> bool:
        """Whether `learn` wants to know what the groups of a mask gained."""
        return False

    @property
    def visits(self) -> bool:
        """Whether it says by `visit` how a kernel goes through a mask; it then needs a kernel that takes that."""
        return self.learns

    def visit(
        self,
        state: Any,
        mask: Any,
        which: Tensor,
        *,
        heads: Sequence[int] | None = None,
        key: Key | None = None,
    ) -> Visit | None:
        """How a kernel is to go through this mask [B, H], of which the heads in `which`, bool [B, H], refresh."""
        return None

    def learn(
        self,
        state: Any,
        mask: Any,
        gains: Tensor,
        which: Tensor,
        thresholds: Sequence[float],
        *,
        heads: Sequence[int] | None = None,
        key: Key | None = None,
    ) -> Any:
        """The mask [B, H] for the next call, after the heads in `which`, bool [B, H], computed this one.

        `gains` is what the groups gained (see `kernels.Visit`), fp32 [B, H, Mq, Mk].
        """
        return mask

    @property
    def block_tokens(self) -> int | None:
        """Tokens of a block, for token orders; None if the backbone has no use for an order."""
        return None

    def seen_tokens(self, text: Text | None, n: int, device: Any = None) -> slice | Tensor | None:
        """The tokens the predictor sees, of which drift takes the means; None for all."""
        return None if text is None else text.without_unused(n)

    def prediction_work(self, shape: Shape) -> float:
        """How the cost of a prediction grows with the shape of q."""
        return pairs(shape)

    @property
    def first_prediction_factor(self) -> float:
        """How much dearer than a later one a generation's first prediction can be."""
        return 1.0

    def least_density(self, n: int) -> float:
        """The least share of token pairs that a mask of n tokens can keep."""
        return min(1.0, (self.block_tokens or 1) / n)

    def expected_cost(self, n: int, threshold: float) -> float:
        """The share of n tokens' pairs that a mask at this threshold is likely to cost, before there is one."""
        return max(self.least_density(n), EXPECTED_DENSITY)

    @property
    def cost_name(self) -> str:
        """The name of its costs in a table of costs."""
        return self.name

    def to_dict(self) -> dict[str, Any]:
        """Name and settings, for JSON."""
        return {"name": self.name, **{f.name: getattr(self, f.name) for f in _fields(type(self))}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The backbone that `to_dict` described."""
        known = {field.name for field in _fields(cls)}
        unknown = set(data) - known - {"name"}
        if unknown:
            raise HeartError(
                f"{cls.name} has no setting {shown(next(iter(unknown)), 40)}: it has {', '.join(sorted(known))}"
            )
        if data.get("name", cls.name) != cls.name:
            raise HeartError(f"these are settings of {shown(data['name'])}, not of {cls.name!r}")
        for field in _fields(cls):
            if field.name in data and not _fits(data[field.name], str(field.type)):
                raise HeartError(f"{cls.name} got {field.name}={shown(data[field.name])}: give it as {field.type}")
        try:
            return cls(**{name: value for name, value in data.items() if name != "name"})
        except HeartError as error:  # of a subclass that quotes a value as it is
            raise HeartError(str(error)[:LONGEST]) from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise HeartError(f"the settings of {cls.name} do not fit ({str(error)[:120]}): save them anew") from None


def _fields(cls: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int, np.integer), "float": (int, float), "str": (str,), "bool": (bool,), "None": (type(None),)
}  # fmt: skip


def _fits(value: Any, annotation: str) -> bool:
    """Whether a setting from a file is of its field's type: finite numbers, short texts, lists of such numbers."""
    names = [name.strip() for name in annotation.split("|")]
    if isinstance(value, list | tuple):
        return any(name not in _KINDS for name in names) and all(_number_or_row(x) for x in value)
    if not isinstance(value, bool) and isinstance(value, int | float):
        return abs(value) <= 1 << 63 and any(isinstance(value, _KINDS.get(name, (int, float))) for name in names)
    known = any(isinstance(value, _KINDS.get(n, ())) and (n == "bool") == isinstance(value, bool) for n in names)
    return known or (isinstance(value, str | bool | None) and any(n not in _KINDS for n in names))


def _number_or_row(value: Any) -> bool:
    return all(_fits(x, "float") for x in value) if isinstance(value, list | tuple) else _fits(value, "float")


@functools.cache
def _takes(cls: type, parameter: str) -> bool:
    parameters = inspect.signature(cls.predict).parameters  # type: ignore[attr-defined]
    return parameter in parameters


class Adapted(Backbone):
    """A user's object with `predict` that does not derive from `Backbone`, made one at the door."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.name = getattr(inner, "name", type(inner).__name__)  # type: ignore[misc]
        self.default_threshold = getattr(inner, "default_threshold", 0.9)  # type: ignore[misc]
        self._takes_v, self._takes_grid = (x in inspect.signature(inner.predict).parameters for x in ("v", "grid"))

    def predict(
        self, q: Tensor, k: Tensor, thresholds: Thresholds, *args: Any, v: Any = None, grid: Any = None, **more: Any
    ) -> Any:
        """As the user's object does."""
        if self._takes_v:
            more["v"] = v
        if self._takes_grid:
            more["grid"] = grid
        return self.inner.predict(q, k, thresholds, *args, **more)

    def new_state(self) -> Any:
        """The user's own memory, or none."""
        return getattr(self.inner, "new_state", State)()

    def state_bytes(self, state: Any) -> dict[str, int]:
        """Nobody knows what a user's memory holds."""
        return {}

    def scaled_to(self, n_tokens: int) -> Any:
        """As the user's object does."""
        scaled = getattr(self.inner, "scaled_to", lambda n: self.inner)(n_tokens)
        return self if scaled is self.inner else Adapted(scaled)

    @property
    def block_tokens(self) -> int | None:
        """The user's blocks, where it names them."""
        return getattr(self.inner, "block", None)

    def to_dict(self) -> dict[str, Any]:
        """The user's own form."""
        if not callable(getattr(self.inner, "to_dict", None)):
            raise HeartError(f"the backbone {self.name} has no to_dict: derive it from Backbone to save it")
        return self.inner.to_dict()


def adapt(backbone: Any) -> Backbone:
    """A backbone from anything that predicts; refuses what does not."""
    if isinstance(backbone, Backbone):
        return backbone
    if isinstance(backbone, type) or not callable(getattr(backbone, "predict", None)):
        raise HeartError(f"backbone is {shown(backbone)}: give XAttention(...), SVG2(...) or a name")
    return Adapted(backbone)


# ---------------------------------------- work


def pairs(shape: Shape) -> float:
    """Token pairs times head size of q [B, H, N, D]: what dense attention grows with."""
    batch, heads, n, dim = shape
    return float(batch * heads * dim) * n * n


def tokens(shape: Shape) -> float:
    """Numbers in q [B, H, N, D]."""
    return float(math.prod(shape))


# ---------------------------------------- reading arguments


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
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < 1 << 31:
            raise HeartError(f"{owner} got {name}={shown(value)}: give an integer of at least 1, below 2^31")


def check_flag(owner: str, **values: Any) -> None:
    """Raise unless each value is True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise HeartError(f"{owner} got {name}={str(value)[:40]!r}: give True or False")


def check_share(owner: str, **values: Any) -> None:
    """Raise unless each value is a number from 0 to 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise HeartError(f"{owner} got {name}={shown(value)}: give a number from 0 to 1")


def check_seed(owner: str, seed: Any) -> None:
    """Raise unless this is an integer that PyTorch's generators take as a seed."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 63:
        raise HeartError(f"{owner} got seed={shown(seed)}: give an integer from 0, below 2^63")


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


__all__ = [
    "Adapted",
    "Backbone",
    "Grid",
    "Key",
    "Mask",
    "State",
    "Thresholds",
    "adapt",
    "check_flag",
    "check_positive",
    "check_qk",
    "check_seed",
    "check_share",
    "pairs",
    "read_heads",
    "read_text",
    "read_thresholds",
    "tokens",
]
