"""Masks put together from those of some heads, when the engine refreshes these and keeps the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from . import BlockMask, ClusterMask, Text


def join(masks: list[Any]) -> Any:
    """Masks [1, n] side by side."""
    first = masks[0]
    if len(masks) == 1:
        return first
    parts = {name: torch.cat([getattr(m, name) for m in masks], 1) for name in first._per_head}
    return dataclasses.replace(first, **parts)


def split_batch(mask: Any, batch: int) -> Any:
    """[1, B·H] as [B, H]."""
    if batch == 1:
        return mask
    return mask._map(lambda x: x.view(batch, -1, *x.shape[2:]))


def full_like(mask: Any, batch: int, heads: int, text: Text | None) -> BlockMask | ClusterMask:
    """A mask of the same kind that keeps everything, for heads with τ ≥ 1.

    Clusters become equal stretches of tokens, which is what kernels like best; text keeps its two clusters.
    """
    grow = lambda x: x[:1, :1].expand(batch, heads, *x.shape[2:]).contiguous()  # noqa: E731
    if isinstance(mask, BlockMask):
        own = None if mask.order_of is None else grow(mask.order_of)
        return dataclasses.replace(mask, blocks=torch.ones_like(grow(mask.blocks)), order_of=own)
    kept, extra = torch.ones_like(grow(mask.map)), 0 if text is None else 2
    if text is not None:  # unused slots attend only to themselves
        kept[..., -1, :-1] = False
        kept[..., :-1, -1] = False
    q_labels = _even_labels(grow(mask.q_labels), kept.shape[2] - extra)
    return ClusterMask(kept, q_labels, _even_labels(grow(mask.k_labels), kept.shape[3] - extra))


def _even_labels(labels: Tensor, clusters: int) -> Tensor:
    """Video tokens dealt to clusters in equal stretches; labels of text (from `clusters` up) stay."""
    video = labels < clusters
    place = video.long().cumsum(-1) - 1
    count = int(video.sum(-1).flatten()[0])
    return torch.where(video, place * clusters // count, labels).to(labels.dtype)
