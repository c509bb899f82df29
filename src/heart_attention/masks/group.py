"""Masks of pairs of equal groups: tokens sorted by cluster and cut, for kernels that take equal blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import HeartError
from .base import grown
from .cluster import ClusterMask
from .layout import Layout, even_starts, sort_labels
from .text import Text


@dataclass(frozen=True, eq=False)
class GroupMask(ClusterMask):
    """A map between groups of equally many tokens, the last one fewer: blocks, in an order for queries and one for keys.

    Args:
        map, q_labels, k_labels, text: as in `ClusterMask`; labels [B, H, n] do not cover the tail.
        group: tokens a group.
        tail: that many further tokens attend only to themselves (unused text slots at the end).
    """

    kind: ClassVar[str] = "block"

    group: int = 64
    tail: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = (-(-self.n_q // self.group), -(-self.n_k // self.group))
        if self.map.numel() and tuple(self.map.shape[2:]) != expected:
            raise HeartError(
                f"a map of shape {tuple(self.map.shape)} does not fit {self.n_q} × {self.n_k} tokens in groups of "
                f"{self.group}: give [B, H, {expected[0]}, {expected[1]}]"
            )

    @property
    def block_shape(self) -> tuple[int, int]:
        """Query and key tokens a group."""
        return self.group, self.group

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Tokens in each group: int64 [B, H, Mq] and [B, H, Mk]."""
        starts = (even_starts(n, self.group, self.device) for n in (self.n_q, self.n_k))
        q_sizes, k_sizes = (x.diff().long().expand(*self.shape, -1) for x in starts)
        return q_sizes, k_sizes

    def layout(self) -> Layout:
        """Tokens sorted by group, each head on its own; boundaries are shared by all heads."""
        sides = ((self.q_labels, self.n_q, "query"), (self.k_labels, self.n_k, "key"))
        perms = [sort_labels(labels, -(-n // self.group), side)[0] for labels, n, side in sides]
        starts = [even_starts(n, self.group, self.device) for _, n, _ in sides]
        return Layout(starts[0], starts[1], perms[0], perms[1])

    def full_like(self, batch: int, heads: int, text: Text | None) -> GroupMask:
        """A mask of the same size that keeps everything, for heads with τ ≥ 1: groups are stretches of tokens."""
        kept = self._everything(grown(self.map, batch, heads), text)
        labels = (self._in_raster(grown(x, batch, heads)) for x in (self.q_labels, self.k_labels))
        return replace(self, map=kept, **dict(zip(("q_labels", "k_labels"), labels)), text=text)

    @staticmethod
    def _everything(like: Tensor, text: Text | None) -> Tensor:
        return torch.ones_like(like)

    def _in_raster(self, labels: Tensor) -> Tensor:
        place = torch.arange(labels.shape[-1], device=labels.device) // self.group
        return place.to(labels.dtype).expand(labels.shape).contiguous()


def cut_in_groups(keys: Tensor, group: int) -> Tensor:
    """Groups of `group` tokens each, in the order of integer keys [B, H, n] (ties by place); int16 [B, H, n]."""
    order = keys.argsort(dim=-1, stable=True)
    place = (torch.arange(keys.shape[-1], device=keys.device) // group).to(torch.int16)
    return torch.empty_like(keys, dtype=torch.int16).scatter_(-1, order, place.expand(keys.shape))
