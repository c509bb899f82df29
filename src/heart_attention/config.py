"""What a user sets: `HeartConfig`, the presets with the paper's values, and both as JSON.

JSON has the form {"_type", "_version", "_data"}: nothing is executed, unknown types, versions and fields are
refused.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from . import backbones, token_order
from .backbones import SVG2, XAttention
from .errors import HeartError
from .files import read_json, write_json
from .online.reuse import POLICIES, TMR, Policy
from .tiny import NATIVE

log = logging.getLogger(__name__)

VERSION = 1
DEALS = ("order", "cost")
PAPER_DELTA = {"xattention": 30.0, "svg2": 8.0}  # on Wan; the paper's appendix, "HEART Configurations"


@dataclass(frozen=True)
class HeartConfig:
    """Everything that decides what HEART computes.

    Args:
        backbone: what predicts masks: `XAttention(...)`, `SVG2(...)`, or their names.
        thresholds: top-p mass to keep: a number for all heads, [H], [L, H], [transformers, L, H] (lists,
            arrays or
            tensors), or a `Calibration`. 1 or more means dense attention for that head. None: the backbone's
            default.
        reuse: when masks are predicted anew: `TMR`, `Interval`, `Warmup`, `Always`, or any object with
            `refresh`.
        order: "raster" (tokens as the model has them), "tiles" (blocks compact in time and space), or a tile's shape for
            every head, as `heart tune-order` finds them.
        dense_steps: denoising steps at the start that stay dense.
        dense_layers: layers at the start that stay dense.
        kernel: a kernel's name, or "auto" for the quickest that serves here.
        force_sparse: sparse even where dense would be quicker (tests, studies).
        scale_clusters: fit SVG2's cluster counts to the number of tokens (they are meant for 32,760).
        deal: how heads go to GPUs under context parallelism: "order", or "cost" for even work by the densities of a
            calibration. It changes no result.
        model: name of the model (see `MODELS`) these values belong to; enabling another is an error.
    """

    backbone: Any = "xattention"
    thresholds: Any = None
    reuse: Any = None
    order: Any = "raster"
    dense_steps: int = 5
    dense_layers: int = 0
    kernel: str = "auto"
    force_sparse: bool = False
    scale_clusters: bool = False
    deal: str = "order"
    model: str | None = None

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        if isinstance(self.backbone, str):
            put("backbone", backbones.by_name(self.backbone))
        if not callable(getattr(self.backbone, "predict", None)):
            raise HeartError(f"backbone is {self.backbone!r}: give XAttention(...), SVG2(...) or a name")
        if self.thresholds is None:
            put("thresholds", self.backbone.default_threshold)
        put("thresholds", _freeze_thresholds(self.thresholds))
        if self.reuse is None:
            put("reuse", TMR(delta=PAPER_DELTA.get(self.backbone.name, 30.0)))
        if not isinstance(self.reuse, Policy):
            raise HeartError(f"reuse is {self.reuse!r}: give TMR(...), Interval(n), Warmup(n) or Always()")
        put("order", token_order.read(self.order))
        if self.deal not in DEALS:
            raise HeartError(f"deal is {self.deal!r}: it must be one of {', '.join(DEALS)}")
        for name in ("dense_steps", "dense_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise HeartError(f"{name} is {value!r}: it must be a whole number, 0 or more")
        if not isinstance(self.kernel, str):
            raise HeartError(f"kernel is {self.kernel!r}: give a kernel's name or 'auto'")
        if self.model is not None and self.model not in MODELS:
            raise HeartError(f"model is {self.model!r}: known are {', '.join(MODELS)}; or leave it out")

    def replace(self, **changes: Any) -> HeartConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["backbone"] = self.backbone.to_dict()
        data["thresholds"] = _plain(self.thresholds)
        data["order"] = _plain(self.order)
        data["reuse"] = _policy_to_dict(self.reuse)
        return {"_type": "HeartConfig", "_version": VERSION, "_data": data}

    @classmethod
    def from_dict(cls, obj: Any) -> HeartConfig:
        """From what `to_dict` gave; anything unknown is refused by name."""
        data = _unwrap(obj, "HeartConfig")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise HeartError(f"the config has unknown fields {unknown}: known are {sorted(known)}")
        data = dict(data)
        if isinstance(data.get("backbone"), dict):
            data["backbone"] = backbones.from_dict(data["backbone"])
        if "reuse" in data:
            data["reuse"] = _policy_from_dict(data["reuse"])
        return cls(**data)

    def save(self, path: str | os.PathLike) -> None:
        """Write as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike) -> HeartConfig:
        """Read what `save` wrote."""
        return cls.from_dict(read_json(path))


# ---------------------------------------- JSON parts


def _unwrap(obj: Any, kind: str) -> dict[str, Any]:
    if not isinstance(obj, dict) or set(obj) != {"_type", "_version", "_data"}:
        raise HeartError(f"this is no saved {kind}: it must be an object with _type, _version and _data")
    if obj["_type"] != kind:
        raise HeartError(f"the file holds a {obj['_type']!r}, a {kind} is wanted")
    if obj["_version"] != VERSION:
        raise HeartError(f"the {kind} has version {obj['_version']!r}, this HEART reads {VERSION}: update or save anew")
    if not isinstance(obj["_data"], dict):
        raise HeartError(f"the {kind}'s _data is {type(obj['_data']).__name__}: it must be an object")
    return obj["_data"]


def _policy_to_dict(policy: Any) -> dict[str, Any]:
    name = type(policy).__name__
    if POLICIES.get(name) is not type(policy):
        raise HeartError(
            f"the policy {name} is your own and has no JSON form: save the config with one of {[*POLICIES]}"
        )
    return {"_type": name, "_version": VERSION, "_data": _inf_to_text(asdict(policy))}


def _policy_from_dict(obj: Any) -> Policy:
    name = obj.get("_type") if isinstance(obj, dict) else None
    if name not in POLICIES:
        raise HeartError(f"the config's reuse is of type {name!r}: known are {', '.join(POLICIES)}")
    try:
        return POLICIES[name](**_text_to_inf(_unwrap(obj, name)))
    except TypeError as error:
        raise HeartError(f"the config's {name} has wrong fields ({error}): save it anew") from None


def _inf_to_text(x: Any) -> Any:
    """JSON has no infinity; δ=∞ is written as the text "inf"."""
    if isinstance(x, dict):
        return {k: _inf_to_text(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_inf_to_text(v) for v in x]
    return str(x) if isinstance(x, float) and math.isinf(x) else x


def _text_to_inf(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _text_to_inf(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_text_to_inf(v) for v in x]
    return float(x) if x in ("inf", "-inf") else x


# ---------------------------------------- thresholds


def _freeze_thresholds(value: Any) -> Any:
    """Numbers as nested tuples (so that a config is hashable and cannot change); a Calibration as it is."""
    if hasattr(value, "thresholds"):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple) and value and all(hasattr(x, "thresholds") for x in value):
        from .calibration.experts import Experts

        return Experts(tuple(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = tuple(_freeze_thresholds(x) for x in value)
        if len({_shape(p) for p in parts}) > 1 or not parts:
            raise HeartError(
                "the thresholds are ragged or empty: give a number, [H], or [L, H] with rows of one length"
            )
        return parts
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise HeartError(f"a threshold is {value!r}: give a number above 0, [H], [L, H] or a Calibration")
    if not 0 < value < math.inf:  # also refuses NaN
        raise HeartError(f"a threshold is {value!r}: it must be above 0 and finite (1 or more means dense)")
    return float(value)


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value), *_shape(value[0])) if isinstance(value, tuple) else ()


def _plain(value: Any) -> Any:
    if hasattr(value, "thresholds"):
        value = _freeze_thresholds(value.thresholds)
    return [_plain(x) for x in value] if isinstance(value, tuple) else value


def threshold_table(thresholds: Any, transformers: int, layers: int, heads: int) -> list[list[tuple[float, ...]]]:
    """Thresholds of every head, [transformers][layers] rows of `heads` numbers, from any of the accepted forms."""
    value = _freeze_thresholds(getattr(thresholds, "thresholds", thresholds))
    shape = _shape(value)
    if shape == (heads,):
        value = (value,) * layers
    elif shape == ():
        value = ((value,) * heads,) * layers
    elif shape not in ((layers, heads), (transformers, layers, heads)):
        have = " x ".join(map(str, shape))
        raise HeartError(
            f"the thresholds have shape [{have}] but the model has {layers} layers of {heads} heads:"
            f" give one number, [{heads}] or [{layers} x {heads}]"
        )
    return [list(t) for t in (value if len(shape) == 3 else (value,) * transformers)]


# ---------------------------------------- models and presets


@dataclass(frozen=True)
class Model:
    """How a model is told from its diffusers config, and the size it is meant for."""

    cls: str
    layers: int
    heads: int
    head_dim: int
    two: bool = False  # Wan2.2's pair of experts

    def matches(self, transformer: Any) -> bool:
        """Whether this transformer has these dimensions."""
        return (self.cls, self.layers, self.heads, self.head_dim) == _dimensions(transformer)


MODELS = {
    "wan2.1-1.3b": Model("WanTransformer3DModel", 30, 12, 128),
    "wan2.1-14b": Model("WanTransformer3DModel", 40, 40, 128),
    "wan2.2-a14b": Model("WanTransformer3DModel", 40, 40, 128, two=True),
    "hunyuanvideo-13b": Model("HunyuanVideoTransformer3DModel", 60, 24, 128),
    "tiny": Model("WanTransformer3DModel", 6, 4, 32),
}


@dataclass(frozen=True)
class Preset:
    """A config for one model at one size; `ours` says what in it is not the paper's."""

    config: HeartConfig
    width: int
    height: int
    frames: int
    steps: int = 50
    ours: str = ""


def _presets() -> dict[str, Preset]:
    """The paper's settings (its appendix, "Experimental Details"): δ 30 / 8 on Wan, 30 on HunyuanVideo."""
    x, s = XAttention(stride=16, block=128), SVG2(q_clusters=300, k_clusters=1000, min_ratio=0.10)
    wan = (HeartConfig(x, 0.9, TMR(delta=30.0)), HeartConfig(s, 0.9, TMR(delta=8.0)))
    hunyuan = (HeartConfig(x, 0.9, TMR(delta=30.0)), HeartConfig(s, 0.9, TMR(delta=30.0)))
    small = (
        HeartConfig(XAttention(stride=8, block=64), 0.9, TMR(relative=TINY_RELATIVE["xattention"])),
        HeartConfig(s, 0.9, TMR(relative=TINY_RELATIVE["svg2"]), scale_clusters=True),
    )
    rows = (
        ("wan2.1-1.3b-480p", "wan2.1-1.3b", wan, (832, 480, 81)),
        ("wan2.1-1.3b-720p", "wan2.1-1.3b", wan, (1280, 720, 81)),
        ("wan2.1-14b", "wan2.1-14b", wan, (832, 480, 81)),
        ("wan2.2-a14b", "wan2.2-a14b", wan, (832, 480, 81)),
        ("hunyuanvideo-13b", "hunyuanvideo-13b", hunyuan, (720, 480, 129)),
        ("tiny", "tiny", small, (NATIVE["width"], NATIVE["height"], NATIVE["num_frames"])),
    )
    made = {}
    for name, model, configs, size in rows:
        for config in configs:
            kind = config.backbone.name
            made[f"{name}-{kind}"] = Preset(config.replace(model=model), *size, ours=_OURS.get((model, kind), ""))
    return made


# What in a preset is not the paper's.
_OURS = {
    ("wan2.2-a14b", "xattention"): "the model: the paper ran Wan2.1",
    ("wan2.2-a14b", "svg2"): "the model: the paper ran Wan2.1",
    ("hunyuanvideo-13b", "xattention"): "δ: the paper has no XAttention on HunyuanVideo",
    ("tiny", "xattention"): "block, stride and δ, which fit its size",
    ("tiny", "svg2"): "cluster counts and δ, which fit its size",
}
# Bounds on the relative drift: for the embedded model, and for models nobody has tuned (`heart tune-delta` does).
# On the embedded model (8 prompts, 2 seeds, small size, 25 steps; docs/reproduction.md) XAttention at 0.1 reuses 71 % of
# its masks and PSNR does not fall.
TINY_RELATIVE = {"xattention": 0.1, "svg2": 0.2}
UNKNOWN_RELATIVE = 0.1

PRESETS: dict[str, Preset] = _presets()


def identify(transformer: Any, two: bool = False) -> str | None:
    """The name in `MODELS` of a transformer (`two`: its pipeline has a second one), or None."""
    found = [name for name, model in MODELS.items() if model.matches(transformer)]
    same = [name for name in found if MODELS[name].two == two]
    return (same or found or [None])[0]


def preset(name: str, model: Any = None) -> HeartConfig:
    """The config of a preset, or with a backbone's name the one for this pipeline or transformer."""
    return find_preset(name, model)[0]


def find_preset(name: str, model: Any = None) -> tuple[HeartConfig, str]:
    """As `preset`, with a line for an unknown model that says what it got (empty for a known one)."""
    if name in PRESETS:
        return PRESETS[name].config, ""
    if name not in backbones.BACKBONES:
        known = ", ".join([*backbones.BACKBONES, *PRESETS])
        raise HeartError(f"there is no preset {name!r}: give a .json file or one of {known}")
    transformer = getattr(model, "transformer", None) or model
    found = identify(transformer, getattr(model, "transformer_2", None) is not None)
    for key, candidate in PRESETS.items():
        if found is not None and candidate.config.model == found and key.endswith(name):
            return candidate.config, ""
    kind = type(transformer).__name__ if transformer is not None else "model"
    note = (
        f"no preset knows this {kind}: relative δ {UNKNOWN_RELATIVE:g} and other safe values; "
        "heart tune-delta and heart tune-order find better ones"
    )
    log.warning("%s", note)
    return HeartConfig(name, 0.9, TMR(relative=UNKNOWN_RELATIVE), scale_clusters=True), note


def check_model(config: HeartConfig, transformer: Any) -> None:
    """Raise if the config was made for a model of other dimensions than this one."""
    if config.model is None or MODELS[config.model].matches(transformer):
        return
    want, have = MODELS[config.model], _dimensions(transformer)
    raise HeartError(
        f"the config is for {config.model} ({want.cls}, {want.layers} layers, {want.heads} heads of {want.head_dim})"
        f" but the model is {have[0]} with {have[1]} layers, {have[2]} heads of {have[3]}:"
        " use 'xattention' or 'svg2' to have the right preset found"
    )


def _dimensions(transformer: Any) -> tuple[str, int, int, int]:
    """Class, layers, heads and head size as the diffusers config tells them (0 where it does not)."""
    config = getattr(transformer, "config", None) or {}
    get = config.get if hasattr(config, "get") else lambda key, default=None: getattr(config, key, default)
    heads = get("num_attention_heads", 0) or 0
    layers = (get("num_layers", 0) or 0) + (get("num_single_layers", 0) or 0)
    return type(transformer).__name__, layers, heads, get("attention_head_dim", 0) or 0
