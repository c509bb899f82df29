"""Caches that leave out blocks or whole steps (diffusers' own, cache-dit): what is on, switched off for a while."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

PLAIN = (str, int, float, bool, type(None))


class Cache:
    """The cache of a transformer, if it has one: it can be taken off and put on again as it was."""

    def __init__(self, transformer: torch.nn.Module):
        self.transformer = transformer
        self.config: Any = getattr(transformer, "_cache_config", None)  # diffusers
        self.forward: Callable | None = None  # cache-dit's
        if getattr(transformer, "_is_cached", False) and hasattr(transformer, "_original_forward"):
            self.forward = transformer.forward

    def __bool__(self) -> bool:
        return self.config is not None or self.forward is not None

    def to_dict(self) -> dict[str, Any] | None:
        """Its name and plain settings, for files; None without a cache."""
        if self.config is None:
            return {"name": "cache-dit"} if self else None
        fields = {f.name: getattr(self.config, f.name, None) for f in _fields(self.config)}
        plain = {name: _plain(value) for name, value in fields.items()}
        return {"name": type(self.config).__name__.removesuffix("Config")} | {
            name: value for name, value in plain.items() if value is not None
        }

    def off(self) -> None:
        """Take it off."""
        if self.config is not None:
            self.transformer.disable_cache()
        if self.forward is not None:
            self.transformer.forward = self.transformer._original_forward

    def on(self) -> None:
        """Put it on again, without a memory."""
        if self.forward is not None:
            self.transformer.forward = self.forward
        if self.config is not None:
            self.transformer.enable_cache(self.config)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """On inside the context, off after it."""
        self.on()
        try:
            yield
        finally:
            self.off()


def _fields(config: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()


def _plain(value: Any) -> Any:
    """A number, a word or a list of them as it is; None for what a file cannot hold."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, tuple | list):
        return list(value) if all(isinstance(v, PLAIN) for v in value) else None
    return value if isinstance(value, PLAIN) else None
