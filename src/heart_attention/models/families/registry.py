"""Families by the class names of their transformers, and why some video transformers have none."""

from __future__ import annotations

import re
from typing import Any

import torch

from ... import plugins
from ...errors import HeartError
from .base import Family
from .cogvideox import CogVideoX, EasyAnimate
from .cosmos import Allegro, Cosmos, Latte
from .helios import Helios
from .hunyuan import Framepack, HunyuanVideo, HunyuanVideo15
from .kandinsky import Kandinsky5, Kandinsky6
from .ltx import LTX
from .minimax import MiniMaxH3
from .mochi import Mochi
from .motif import MotifVideo
from .wan import AnyFlow, Wan, WanVACE

BUILT_IN: tuple[type[Family], ...] = (
    *(Wan, WanVACE, AnyFlow, Helios),
    *(HunyuanVideo, HunyuanVideo15, Framepack, MotifVideo),
    *(CogVideoX, EasyAnimate, LTX, Mochi, Cosmos, Allegro, Latte, Kandinsky5, Kandinsky6, MiniMaxH3),
)
# Class name of the transformer -> what differs in it.
FAMILIES: dict[str, Family] = {name: family() for family in BUILT_IN for name in family.classes}

# Video transformers of diffusers that cannot be served, and why.
REFUSED: dict[str, str] = {
    "WanAnimate2Transformer3DModel": "each frame attends to reference tokens of its own through a FlexAttention mask",
    "AnyFlowFARTransformer3DModel": "its attention is causal over chunks, with more keys (from a cache) than queries",
    "Cosmos3OmniTransformer": "its video attends with shared key heads to a longer sequence that begins with text",
    "Kandinsky6SRTransformer3DModel": "it was trained with a block-sparse attention of its own (NABLA)",
    "SanaVideoTransformer3DModel": "its self-attention is linear, so that no scores exist that a mask could leave out",
    "SanaWMTransformer3DModel": "its self-attention is a recurrence, or softmax inside modules without a processor",
    "SanaWMLTX2RefinerTransformer3DModel": "its windows attend to a cache, with more keys than queries",
    "TransformerTemporalModel": "it attends over a few frames at each place, too short a sequence to be sparse",
}


def register_family(family: type[Family] | Family) -> type[Family] | Family:
    """Make a family of your own known for the transformers that its `classes` name; also as a decorator."""
    cls = family if isinstance(family, type) else type(family)
    if not issubclass(cls, Family):
        raise HeartError(f"cannot register {str(family)[:80]}: derive a class from models.families.base.Family")
    names = cls.classes if isinstance(family, type) else family.classes
    if not names or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise HeartError(f"{cls.__name__} names no classes: give classes = ('MyTransformer3DModel',), a tuple of names")
    _check_layers(cls)
    FAMILIES.update(dict.fromkeys(names, cls() if isinstance(family, type) else family))
    return family


def _check_layers(cls: type[Family]) -> None:
    try:
        good = not isinstance(cls.layers, str) and all(re.compile(pattern) for pattern in cls.layers)
    except (re.error, TypeError):
        good = False
    if not good:
        raise HeartError(f"{cls.__name__}.layers is {str(cls.layers)[:80]!r}: give a tuple of patterns of module names")


def _known(names: list[str]) -> Family | None:
    return next((FAMILIES[name] for name in names if name in FAMILIES), None)


def family_of(transformer: Any) -> Family:
    """The family of a transformer, found by its class or a base class of it."""
    names = [cls.__name__ for cls in type(transformer).__mro__]
    family = _known(names) or (plugins.load_installed() and _known(names))
    if family:
        return family
    for name in names:
        if name in REFUSED:
            raise HeartError(f"HEART cannot serve {name}: {REFUSED[name]}; use another model.")
    what = "module" if isinstance(transformer, torch.nn.Module) else "object"
    raise HeartError(
        f"{names[0]} is not a video transformer that HEART knows (it knows {', '.join(sorted(FAMILIES))}); "
        f"give another {what}, or a family for it by heart_attention.models.register_family(...)."
    )
