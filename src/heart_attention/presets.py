"""Known models and the paper's values for them: a plain dict of named configs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import backbones, tiny
from .backbones import EAR, PISA, SVG, SVG2, Band, ExactMass, Lite, Radial, Sparge, XAttention
from .config import HeartConfig
from .errors import HeartError
from .files import read_json
from .online.reuse import TMR
from .tiny import NATIVE

log = logging.getLogger(__name__)

HEART = "heart"  # every head at an operating point of its own: a calibration, not a preset
# Such calibrations that ship, by model.
SHIPPED_HEART = {
    "tiny": f"{HEART}.heart.json", "tiny-student": "student.heart.json", "tiny-hunyuan": f"hunyuan-{HEART}.heart.json",
}  # fmt: skip


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
    "tiny": Model("WanTransformer3DModel", 9, 4, 32),
    "tiny-student": Model("WanTransformer3DModel", 9, 4, 32),  # told from "tiny" by its weights' values alone
    "tiny-hunyuan": Model("HunyuanVideoTransformer3DModel", 9, 4, 32),
}
EMBEDDED = ("tiny", "tiny-student", "tiny-hunyuan")


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
        *_fitted_to_tiny(),
    )
    native = (int(NATIVE["width"]), int(NATIVE["height"]), int(NATIVE["num_frames"]))
    rows = (
        ("wan2.1-1.3b-480p", "wan2.1-1.3b", wan, (832, 480, 81)),
        ("wan2.1-1.3b-720p", "wan2.1-1.3b", wan, (1280, 720, 81)),
        ("wan2.1-14b", "wan2.1-14b", wan, (832, 480, 81)),
        ("wan2.2-a14b", "wan2.2-a14b", wan, (832, 480, 81)),
        ("hunyuanvideo-13b", "hunyuanvideo-13b", hunyuan, (720, 480, 129)),
        *((name, name, small, native) for name in EMBEDDED),
    )
    table = {}
    for name, model, configs, size in rows:
        for config in (*configs, *_by_authors(model)):
            kind = config.backbone.name
            paper = kind in ("xattention", "svg2")
            ours = _OURS.get((model, kind), "" if paper else "δ, and on the embedded model what fits its size")
            table[f"{name}-{kind}"] = Preset(config.replace(model=model), *size, ours=ours)
    return table


def _by_authors(model: str) -> tuple[HeartConfig, ...]:
    """Other backbones on large models as their authors run them at 50 steps; δ is ours.

    SVG keeps the first 20 % of steps dense on Wan, 10 % on HunyuanVideo, and 3 % of layers; Radial twelve steps, and on
    Wan a layer. Sparge and Lite have one setting for all models.
    """
    if model in EMBEDDED:
        return ()
    reuse, wan = TMR(relative=UNKNOWN_RELATIVE), model.startswith("wan")
    layers = int(0.03 * MODELS[model].layers)
    return (
        HeartConfig(Sparge(), 0.98, reuse),
        HeartConfig(SVG(), 0.3 if wan else 0.25, reuse, dense_steps=10 if wan else 5, dense_layers=layers),
        HeartConfig(Radial(), 0.5, reuse, dense_steps=12, dense_layers=1 if wan else 0),
        HeartConfig(Lite(), 1 - 2.0**-10, reuse),
    )


def _fitted_to_tiny() -> tuple[HeartConfig, ...]:
    """The other backbones on the embedded model: blocks that suit 4,096 tokens in 16 frames, about half of all pairs."""
    reuse = TMR(relative=UNKNOWN_RELATIVE)
    return (
        HeartConfig(EAR(), 0.9, reuse, rest="mean", scale_clusters=True),
        HeartConfig(PISA(), 0.15, reuse, rest="first-order"),
        HeartConfig(Band(), 0.3, reuse),
        HeartConfig(Sparge(block_q=64, block_k=32, similarity=0.1), 0.9, reuse),
        HeartConfig(SVG(), 0.3, reuse),
        HeartConfig(Radial(block=32), 0.2, reuse),
        HeartConfig(ExactMass(block=64), 0.9, reuse),
        HeartConfig(Lite(tile_q=32, tile_k=32), 1 - 2.0**-4, reuse),
    )


# What in a preset is not the paper's.
_OURS = {
    ("wan2.2-a14b", "xattention"): "the model: the paper ran Wan2.1",
    ("wan2.2-a14b", "svg2"): "the model: the paper ran Wan2.1",
    ("hunyuanvideo-13b", "xattention"): "δ, which the paper does not state for XAttention on HunyuanVideo",
    **{(name, "xattention"): "block, stride and δ, which fit its size" for name in EMBEDDED},
    **{(name, "svg2"): "cluster counts and δ, which fit its size" for name in EMBEDDED},
}
# Bounds on the relative drift: for the embedded model, and for models nobody has tuned (`heart tune-delta` does).
# On the embedded model (8 prompts, 2 seeds, small size, 25 steps; docs/reproduction.md) XAttention at 0.1 reuses 71 % of
# its masks and PSNR does not fall.
TINY_RELATIVE = {"xattention": 0.1, "svg2": 0.2}
UNKNOWN_RELATIVE = 0.1

PRESETS: dict[str, Preset] = _presets()


def identify(transformer: Any, two: bool = False) -> str | None:
    """The name in `MODELS` of a transformer (`two`: its pipeline has a second one), or None."""
    names = [name for name, model in MODELS.items() if model.matches(transformer)]
    same = [name for name in names if MODELS[name].two == two]
    return next(iter(same or names), None)


def preset(name: str, model: Any = None) -> HeartConfig:
    """The config of a preset, or with a backbone's name the one for this pipeline or transformer."""
    return find_preset(name, model)[0]


def shipped_heart(model: Any) -> str:
    """The calibration of operating points that ships for this pipeline or transformer; none is an error that tells how."""
    from .calibration.fingerprint import values_digest

    transformer = getattr(model, "transformer", None) or model
    folder = Path(tiny.path()).parent / "calibrations"
    if transformer is not None and identify(transformer) in EMBEDDED:
        digest = values_digest(transformer)
        for path in (folder / name for name in SHIPPED_HEART.values()):
            if path.is_file() and digest in (None, read_json(path)["model"]["values_digest"]):
                return str(path)
    raise HeartError(
        f"no calibration of operating points ships for this {type(transformer).__name__}: make one with `heart calibrate "
        "--model MODEL --points default --budget time=0.25 --out mine.heart.json` and enable that file"
    )


def find_preset(name: str, model: Any = None) -> tuple[HeartConfig, str]:
    """As `preset`, with a line for an unknown model that says what it got (empty for a known one)."""
    if name in PRESETS:
        return PRESETS[name].config, ""
    if name not in backbones.names():
        raise HeartError(
            f"there is no preset {name[:60]!r}: give a backbone ({', '.join(backbones.names())}), a .json file, or one that "
            "heart info --presets lists"
        )
    transformer = getattr(model, "transformer", None) or model
    known_as = identify(transformer, getattr(model, "transformer_2", None) is not None)
    for candidate in PRESETS.values():
        if known_as is not None and (candidate.config.model, candidate.config.backbone.name) == (known_as, name):
            return candidate.config, ""
    kind = type(transformer).__name__ if transformer is not None else "model"
    note = (
        f"no preset of {name} knows this {kind}: relative δ {UNKNOWN_RELATIVE:g} and other safe values; "
        "heart tune-delta and heart tune-order find better ones"
    )
    log.warning("%s", note)
    cls, reuse = backbones.find(name), TMR(relative=UNKNOWN_RELATIVE)
    config = HeartConfig(name, cls.default_threshold, reuse, scale_clusters=True)
    return config.replace(rest=cls.default_rest), note


def check_model(config: HeartConfig, transformer: Any) -> None:
    """Raise if the config was made for a model of other dimensions than this one."""
    if config.model is None or MODELS[config.model].matches(transformer):
        return
    want, have = MODELS[config.model], _dimensions(transformer)
    raise HeartError(
        f"the config is for {config.model} ({want.cls}, {want.layers} layers, {want.heads} heads of {want.head_dim})"
        f" but the model is {have[0]} with {have[1]} layers, {have[2]} heads of {have[3]}:"
        f" use {config.backbone.name!r} to have the right preset found"
    )


def _dimensions(transformer: Any) -> tuple[str, int, int, int]:
    """Class, layers, heads and head size as the diffusers config tells them (0 where it does not)."""
    config = getattr(transformer, "config", None) or {}
    get = config.get if hasattr(config, "get") else lambda key, default=None: getattr(config, key, default)
    heads = get("num_attention_heads", 0) or 0
    layers = (get("num_layers", 0) or 0) + (get("num_single_layers", 0) or 0)
    return type(transformer).__name__, layers, heads, get("attention_head_dim", 0) or 0
