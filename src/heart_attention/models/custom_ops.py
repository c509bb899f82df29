"""The two custom operators behind which HEART works under torch.compile.

A graph sees two opaque calls: one begins a forward, one attends. Layers and transformers are 0-dim CPU
tensors holding a number, so that graphs are shared by all layers and nothing recompiles from step to step.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .compat import PARALLEL

_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def handle(thing: Any) -> torch.Tensor:
    """A 0-dim CPU tensor that stands for this object in compiled graphs."""
    number = next(_numbers)
    _objects[number] = thing
    return torch.tensor(number, dtype=torch.int64)


@torch.library.custom_op("heart::start", mutates_args=("forward",))
def start(forward: torch.Tensor, timestep: torch.Tensor, grid: Sequence[int], inputs: Sequence[torch.Tensor]) -> None:
    """A forward begins. It "writes" `forward`, which every `attend` reads: that keeps their order."""
    attachment = _objects.get(int(forward))
    if attachment is not None:
        attachment.start(timestep, tuple(grid) if grid else None, list(inputs))


@start.register_fake
def _(forward, timestep, grid, inputs):
    return None


@torch.library.custom_op("heart::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    layer: torch.Tensor,
    forward: torch.Tensor,
) -> torch.Tensor:
    """One attention call; q, k, v and the result [B, N, H, D]."""
    from .processors import attend as eager

    tag = _objects[int(layer)].tag
    out = eager(tag, query, key, value, mask, tag.values.get(PARALLEL))
    # an operator's result is contiguous, as promised below, and is none of its inputs
    if any(out.data_ptr() == x.data_ptr() for x in (query, key, value)):
        return out.clone(memory_format=torch.contiguous_format)
    return out.contiguous()


@attend.register_fake
def _(query, key, value, mask, layer, forward):
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
