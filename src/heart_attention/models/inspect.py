"""Which transformers a model has, and how many attention layers and heads each of them."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import HeartError
from .compat import unwrapped
from .families.registry import family_of

NAMES = ("transformer", "transformer_2")  # of a pipeline; Wan2.2 has two


def is_pipeline(model: Any) -> bool:
    """Whether this is a pipeline (whatever holds a transformer and is none), not a transformer."""
    return not isinstance(unwrapped(model), torch.nn.Module) and bool(_held(model))


def transformers_of(model: Any) -> list[torch.nn.Module]:
    """The transformers of a pipeline in the order of `NAMES`, or the transformer itself, never the compiled wrapper."""
    if isinstance(unwrapped(model), torch.nn.Module):
        return [unwrapped(model)]
    held = _held(model)
    if not held:
        raise HeartError(
            f"{type(model).__name__} has no transformer: give a diffusers video pipeline or its transformer"
        )
    return list(held.values())


def named_transformers(pipe: Any) -> dict[str, torch.nn.Module]:
    """The transformers of a pipeline by name; at least one."""
    transformers_of(pipe)
    return _held(pipe)


def layers_and_heads(transformer: Any) -> tuple[int, int]:
    """How many attention layers of this transformer HEART serves, and how many heads each has."""
    modules = attention_modules(transformer)
    heads = sorted({heads_of(module, transformer) for module in modules})
    if len(heads) > 1:
        raise HeartError(
            f"the attention layers of this {type(unwrapped(transformer)).__name__} have {heads[0]} to {heads[-1]} heads: "
            "its family must find layers of one kind"
        )
    return len(modules), heads[0]


def attention_modules(transformer: Any) -> list[torch.nn.Module]:
    """The attention modules that HEART serves, in order; at least one."""
    transformer = unwrapped(transformer)
    found = [module for _, module in family_of(transformer).find(transformer)]
    if not found:
        name = type(transformer).__name__
        raise HeartError(f"this {name} has no attention layer that HEART knows: is it a complete video transformer?")
    return found


def heads_of(module: Any, transformer: Any) -> int:
    """The number of heads of an attention module; the transformer's config says it where the module does not."""
    own = getattr(module, "heads", 0) or getattr(module, "num_heads", 0)  # Kandinsky's word
    return int(own or unwrapped(transformer).config.num_attention_heads)


def head_size(transformer: Any) -> int:
    """The size of an attention head."""
    module, size = attention_modules(transformer)[0], getattr(unwrapped(transformer).config, "attention_head_dim", None)
    if size:
        return int(size)
    projection = module.to_q if hasattr(module, "to_q") else module.to_query
    return projection.out_features // heads_of(module, transformer)


def _held(pipe: Any) -> dict[str, torch.nn.Module]:
    found = {name: unwrapped(getattr(pipe, name, None)) for name in NAMES}
    return {name: module for name, module in found.items() if module is not None}
