"""What a user sets: `HeartConfig`, and its JSON form.

JSON has the form {"_type", "_version", "_data"}: nothing is executed, unknown types, versions and fields are
refused. Versions 1 and 2 are migrated on loading.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from . import backbones, token_order
from .backbones.base import Backbone
from .errors import HeartError, shown
from .files import read_json, write_json
from .online import reuse as policies
from .online import thresholds as head_thresholds
from .online import warmup
from .online.points import Point, PointTable, check_rest
from .online.reuse import TMR, Policy

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from .online.thresholds import ThresholdSource

    Thresholds: TypeAlias = float | Sequence[Any] | np.ndarray | Tensor | ThresholdSource

__all__ = ["HeartConfig", "Point", "PointTable"]

VERSION = 3
HEAD_ASSIGNMENTS = ("order", "cost")


@dataclass(frozen=True)
class HeartConfig:
    """Everything that decides what HEART computes.

    Args:
        backbone: what predicts masks: `XAttention(...)`, `SVG2(...)`, any other registered backbone, or its name.
        thresholds: top-p mass to keep: a number for all heads, [H], [L, H], [transformers, L, H] (lists, arrays or
            tensors), or a `Calibration`. 1 or more means dense attention for that head. None: the backbone's default.
        reuse: when masks are predicted anew: `TMR`, `Interval`, `Warmup`, `Always`, or any object with `refresh`.
        order: "raster" (tokens as the model has them), "tiles" (blocks compact in time and space), or a tile's shape for
            every head, as `heart tune-order` finds them.
        dense_steps: denoising steps at the start that stay dense: a number, or "auto" for as many as the noise asks for:
            five of fifty or twenty-five, one of eight or four.
        dense_last_steps: denoising steps at the end that stay dense.
        dense_layers: layers at the start that stay dense.
        kernel: a kernel's name, or "auto" for the quickest that serves here.
        force_sparse: sparse even where dense would be quicker (tests, studies).
        scale_clusters: fit SVG2's cluster counts to the number of tokens (they are meant for 32,760).
        head_assignment: how heads go to GPUs under context parallelism: "order", or "cost" for even work by the
            densities of a calibration. It changes no result.
        model: name of the model (see `presets.MODELS`) these values belong to; enabling another is an error.
        rest: what becomes of what a mask leaves out: "drop", "mean" to approximate each group by one key, or
            "first-order" with PISA.
        points: an operating point for every head and phase, instead of backbone, thresholds, order and rest.
        cost_table: JSON file of `heart tune-costs`; None for the table that ships for this kind of device.
    """

    backbone: Backbone = "xattention"  # type: ignore[assignment]
    thresholds: Any = None
    reuse: Policy = None  # type: ignore[assignment]
    order: Any = "raster"
    dense_steps: int | str = warmup.AUTO
    dense_layers: int = 0
    kernel: str = "auto"
    force_sparse: bool = False
    scale_clusters: bool = False
    head_assignment: str = "order"
    model: str | None = None
    rest: str = "drop"
    points: PointTable | None = None
    cost_table: str | None = None
    dense_last_steps: int = 0

    if TYPE_CHECKING:  # what a user may give; __post_init__ turns it into the types above

        def __init__(
            self,
            backbone: Backbone | str = "xattention",
            thresholds: Thresholds | None = None,
            reuse: Policy | None = None,
            order: str | Sequence[Any] = "raster",
            dense_steps: int | Literal["auto"] = "auto",
            dense_layers: int = 0,
            kernel: str = "auto",
            force_sparse: bool = False,
            scale_clusters: bool = False,
            head_assignment: Literal["order", "cost"] = "order",
            model: str | None = None,
            rest: Literal["drop", "mean", "first-order"] = "drop",
            points: PointTable | None = None,
            cost_table: str | None = None,
            dense_last_steps: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        given: Any = self.backbone
        put("backbone", backbones.by_name(given) if isinstance(given, str) else backbones.adapt(given))
        value = self.backbone.default_threshold if self.thresholds is None else self.thresholds
        put("thresholds", head_thresholds.freeze(value))
        policy: Any = self.reuse
        put("reuse", TMR(delta=self.backbone.default_delta) if policy is None else policies.adapt(policy))
        put("order", token_order.read(self.order))
        check_rest(self.rest, self.backbone)
        if self.points is not None and not isinstance(self.points, PointTable):
            raise HeartError(f"points is a {type(self.points).__name__}: give a PointTable, as a calibration makes it")
        self._check_words()
        self._check_numbers()

    def _check_words(self) -> None:
        if self.head_assignment not in HEAD_ASSIGNMENTS:
            words = ", ".join(HEAD_ASSIGNMENTS)
            raise HeartError(f"head_assignment is {shown(self.head_assignment)}: it must be one of {words}")
        if not isinstance(self.kernel, str):
            raise HeartError(f"kernel is {shown(self.kernel)}: give a kernel's name or 'auto'")
        if self.cost_table is not None and not isinstance(self.cost_table, str):
            raise HeartError(f"cost_table is {shown(self.cost_table)}: give the path of a file of heart tune-costs")
        if self.model is not None:
            from .presets import MODELS

            if not isinstance(self.model, str) or self.model not in MODELS:
                raise HeartError(f"model is {shown(self.model)}: known are {', '.join(MODELS)}; or leave it out")

    def _check_numbers(self) -> None:
        warmup.check(self.dense_steps)
        for name in ("dense_layers", "dense_last_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= warmup.STEP_LIMIT:
                raise HeartError(f"{name} is {shown(value)}: it must be a whole number, 0 or more")
        for name in ("force_sparse", "scale_clusters"):
            if not isinstance(getattr(self, name), bool):
                raise HeartError(f"{name} is {shown(getattr(self, name))}: it must be true or false")

    @property
    def deal(self) -> str:
        """The old name of `head_assignment`."""
        warnings.warn("HeartConfig.deal is called head_assignment now", DeprecationWarning, stacklevel=2)
        return self.head_assignment

    def first_dense_steps(self, steps: int) -> int:
        """How many of the first steps are dense in a generation of `steps`, as far as the number alone tells."""
        return warmup.first_steps(self.dense_steps, steps)

    def oddities(self) -> list[str]:
        """A sentence for each value that is allowed and means something else than it may have been meant to."""
        told = []
        if isinstance(self.thresholds, float) and self.thresholds > 1:
            told.append(f"thresholds is {self.thresholds:g}: 1 or more means dense attention; shares go from 0 to 1")
        told += self.reuse.oddities()
        return told

    def replace(self, **changes: Any) -> HeartConfig:
        """A copy with some fields changed."""
        return replace(self, **_renamed(changes, stacklevel=3))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["backbone"] = self.backbone.to_dict()
        data["thresholds"] = head_thresholds.plain(self.thresholds)
        data["order"] = head_thresholds.plain(self.order)
        data["reuse"] = _policy_to_dict(self.reuse)
        data["points"] = None if self.points is None else self.points.to_dict()
        return {"_type": "HeartConfig", "_version": VERSION, "_data": data}

    def summary(self) -> dict[str, Any] | None:
        """`to_dict()`, or None where something in it is a user's own and has no JSON form."""
        try:
            return self.to_dict()
        except HeartError:
            return None

    @classmethod
    def from_dict(cls, obj: Any) -> HeartConfig:
        """From what `to_dict` gave; anything unknown is refused by name."""
        data = dict(_migrated(*_unwrap(obj, "HeartConfig")))
        known = {f.name for f in fields(cls)}
        if unknown := [name for name in data if name not in known]:
            raise HeartError(
                f"the config has an unknown field {shown(unknown[0], 40)}: known are {', '.join(sorted(known))}"
            )
        if isinstance(data.get("backbone"), dict):
            data["backbone"] = backbones.from_dict(data["backbone"])
        if data.get("reuse") is not None:
            data["reuse"] = _policy_from_dict(data["reuse"])
        if data.get("points") is not None:
            data["points"] = PointTable.from_dict(data["points"])
        return cls(**data)

    def save(self, path: str | os.PathLike) -> None:
        """Write as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike) -> HeartConfig:
        """Read what `save` wrote."""
        return cls.from_dict(read_json(path))


def _with_old_names(init: Any) -> Any:
    """The constructor, with fields under their old names accepted and a wrong one refused in one sentence."""

    @functools.wraps(init)
    def checked(self: HeartConfig, *args: Any, **given: Any) -> None:
        given = _renamed(given, stacklevel=3)
        known = [f.name for f in fields(HeartConfig)]
        if unknown := next((name for name in given if name not in known), None):
            near = difflib.get_close_matches(unknown, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise HeartError(f"a config has no field {unknown[:40]!r}: {hint}")
        init(self, *args, **given)

    return checked


HeartConfig.__init__ = _with_old_names(HeartConfig.__init__)  # type: ignore[method-assign]


# ---------------------------------------- JSON parts


def _renamed(data: dict[str, Any], stacklevel: int = 2) -> dict[str, Any]:
    """Fields under their present names; an old one is said."""
    if "deal" not in data:
        return data
    warnings.warn("the config's field deal is called head_assignment now", DeprecationWarning, stacklevel=stacklevel)
    return {("head_assignment" if name == "deal" else name): value for name, value in data.items()}


def _migrated(data: dict[str, Any], version: int) -> dict[str, Any]:
    """Fields of any version as those of the present one.

    Version 1 called the head assignment `deal`; up to version 2, dense_steps left out meant five.
    """
    if version == VERSION:
        return data
    return {"dense_steps": 5} | {("head_assignment" if k == "deal" else k): v for k, v in data.items()}


def _unwrap(obj: Any, kind: str) -> tuple[dict[str, Any], int]:
    if not isinstance(obj, dict) or set(obj) != {"_type", "_version", "_data"}:
        raise HeartError(f"this is no saved {kind}: it must be an object with _type, _version and _data")
    if obj["_type"] != kind:
        raise HeartError(f"the file holds a {shown(obj['_type'])}, a {kind} is wanted")
    version = obj["_version"]
    if type(version) is not int or not 1 <= version <= VERSION:
        raise HeartError(
            f"the {kind} has version {shown(version)}, this HEART reads 1 to {VERSION}: update or save anew"
        )
    if not isinstance(obj["_data"], dict):
        raise HeartError(f"the {kind}'s _data is {type(obj['_data']).__name__}: it must be an object")
    return obj["_data"], version


def _policy_to_dict(policy: Policy) -> dict[str, Any]:
    name = policy.name
    if policies.POLICIES.get(name) is not type(policy):
        known = [*policies.POLICIES]
        raise HeartError(f"the policy {name} has no JSON form: register it, or save the config with one of {known}")
    return {"_type": name, "_version": VERSION, "_data": _inf_to_text(policy.to_dict())}


def _policy_from_dict(obj: Any) -> Policy:
    name = obj.get("_type") if isinstance(obj, dict) else None
    if not isinstance(name, str) or name not in policies.POLICIES:
        raise HeartError(f"the config's reuse is of type {shown(name)}: known are {', '.join(policies.POLICIES)}")
    data = _text_to_inf(_unwrap(obj, name)[0])
    try:
        return policies.POLICIES[name](**data)
    except TypeError as error:
        raise HeartError(f"the config's {name} has wrong fields ({shown(str(error), 100)}): save it anew") from None


def _inf_to_text(x: Any) -> Any:
    """JSON has no infinity; δ=∞ is written as the text "inf"."""
    if isinstance(x, dict):
        return {k: _inf_to_text(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_inf_to_text(v) for v in x]
    return str(x) if isinstance(x, float) and math.isinf(x) else x


def _text_to_inf(x: Any, depth: int = 0) -> Any:
    if depth > 4:
        raise HeartError("the config's reuse is nested too deeply: save it anew")
    if isinstance(x, dict):
        return {str(k): _text_to_inf(v, depth + 1) for k, v in x.items()}
    if isinstance(x, list):
        return [_text_to_inf(v, depth + 1) for v in x]
    return float(x) if isinstance(x, str) and x in ("inf", "-inf") else x
