"""The backbones by name: the only list of them."""

from __future__ import annotations

import importlib
from typing import Any

from .. import plugins
from ..errors import HeartError, shown
from .base import Backbone

# Name -> module and class. Imported on first use.
BUILT_IN = {
    "xattention": (".xattention", "XAttention"),
    "svg2": (".svg2", "SVG2"),
    "ear": (".ear", "EAR"),
    "pisa": (".pisa", "PISA"),
    "band": (".band", "Band"),
    "sparge": (".sparge", "Sparge"),
    "svg": (".svg", "SVG"),
    "radial": (".radial", "Radial"),
    "exact": (".exact_mass", "ExactMass"),
    "lite": (".lite", "Lite"),
}
_REGISTERED: dict[str, type] = {}  # users' own


def register(cls: type) -> type:
    """Make a backbone of your own known by its `name`, everywhere; also as a decorator."""
    name = getattr(cls, "name", None)
    if not isinstance(cls, type) or not isinstance(name, str) or not name.isidentifier():
        raise HeartError(f"cannot register {cls!r}: give a backbone's class with a `name` such as 'mine'")
    if not callable(getattr(cls, "predict", None)) or not callable(getattr(cls, "from_dict", None)):
        raise HeartError(f"the backbone {name!r} has no predict or from_dict: derive it from heart.Backbone")
    known = _REGISTERED.get(name)
    if name in BUILT_IN or (known is not None and known.__qualname__ != cls.__qualname__):
        raise HeartError(f"a backbone named {name!r} is known already: choose another name")
    _REGISTERED[name] = cls
    return cls


def names() -> list[str]:
    """All backbones' names, the built-in ones first."""
    plugins.load_installed()
    return [*BUILT_IN, *_REGISTERED]


def find(name: Any) -> type[Backbone]:
    """The class of that name. A name from a file never imports anything by itself."""
    if isinstance(name, str) and name in BUILT_IN:
        module, cls = BUILT_IN[name]
        return getattr(importlib.import_module(module, __package__), cls)
    if name not in names():
        raise HeartError(f"there is no backbone {shown(name)}: choose one of {', '.join(names())}, or load its plugin")
    return _REGISTERED[name]


def by_name(name: str, **settings: Any) -> Any:
    """The backbone of that name, with its default settings unless others are given."""
    return from_dict({"name": name, **settings})


def from_dict(data: Any) -> Any:
    """The backbone that `to_dict` described."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise HeartError(f"a backbone's settings are a dict with a name, not {shown(data)}")
    return find(data["name"]).from_dict(data)
