"""Modules of other people that register backbones, policies, kernels, families, errors or metrics.

An installed package names its module under the entry-point group `heart_attention.plugins`; a module that is not
installed is given as `--plugin MODULE`. Importing it is all that is done: the module calls `heart.register_...`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Iterable

from .errors import HeartError

log = logging.getLogger(__name__)
GROUP = "heart_attention.plugins"
_loaded: list[str] = []  # by name, in order: what workers on other machines must import too


def load(modules: Iterable[str]) -> None:
    """Import these modules; an error is one sentence."""
    for module in modules:
        if module in _loaded:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            raise HeartError(f"the plugin {module!r} cannot be imported ({error}): is it on PYTHONPATH?") from error
        _loaded.append(module)


def loaded() -> list[str]:
    """The modules that `load` has imported."""
    return list(_loaded)


@functools.cache
def load_installed() -> tuple[str, ...]:
    """Import the plugins of installed packages, once; one that fails is named in the log and left out."""
    names = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
            names.append(entry.name)
        except Exception as error:  # somebody else's package must not stop ours
            log.warning("the plugin %s cannot be loaded: %s", entry.name, error)
    return tuple(names)
