"""Masks of pairs of clusters: a map between clusters of queries and of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import HeartError
from .base import Mask, grown
from .layout import Layout, sort_labels
from .text import Text


@dataclass(frozen=True, eq=False)
class ClusterMask(Mask):
    """Which pairs of clusters are computed: token i attends to j iff `map[q_labels[i], k_labels[j]]`.

    Args:
        map: bool [B, H, Cq, Ck].
        q_labels, k_labels: integer [B, H, N], the cluster of each query and key.
        text: where the tokens lie that are never approximated; None if there are none.
    """

    kind: ClassVar[str] = "cluster"

    map: Tensor
    q_labels: Tensor
    k_labels: Tensor
    text: Text | None = None

    _per_head = ("map", "q_labels", "k_labels")

    def __post_init__(self) -> None:
        if self.map.dtype != torch.bool:
            raise HeartError(f"the map is {self.map.dtype}: give bool")
        if self.map.numel() and (self.map.dim() != 4 or self.q_labels.dim() != 3 or self.k_labels.dim() != 3):
            raise HeartError(
                f"a map of shape {tuple(self.map.shape)} and labels of shapes "
                f"{tuple(self.q_labels.shape)}, {tuple(self.k_labels.shape)}: give [B, H, Cq, Ck] and twice [B, H, N]"
            )
        if self.map.numel() and not self.map.shape[:2] == self.q_labels.shape[:2] == self.k_labels.shape[:2]:
            raise HeartError(
                f"a map for {tuple(self.map.shape[:2])} (batch, heads) but labels for "
                f"{tuple(self.q_labels.shape[:2])} and {tuple(self.k_labels.shape[:2])}: "
                "they must agree"
            )

    @property
    def n_q(self) -> int:  # type: ignore[override]
        """Queries."""
        return self.q_labels.shape[-1]

    @property
    def n_k(self) -> int:  # type: ignore[override]
        """Keys."""
        return self.k_labels.shape[-1]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Tokens in each cluster: int64 [B, H, Cq] and [B, H, Ck]."""
        return count_labels(self.q_labels, self.map.shape[2]), count_labels(self.k_labels, self.map.shape[3])

    def row_of(self) -> Tensor:
        """The cluster of each query, int64 [B, H, N]."""
        return self.q_labels.long()

    def group_of(self) -> Tensor:
        """The cluster of each key, int64 [B, H, N]."""
        return self.k_labels.long()

    def layout(self) -> Layout:
        """Tokens sorted by cluster, each head on its own."""
        q_perm, q_starts = sort_labels(self.q_labels, self.map.shape[2], "query")
        k_perm, k_starts = sort_labels(self.k_labels, self.map.shape[3], "key")
        return Layout(q_starts, k_starts, q_perm, k_perm)

    def full_like(self, batch: int, heads: int, text: Text | None) -> ClusterMask:
        """A mask of the same size that keeps everything, for heads with τ ≥ 1.

        Clusters become equal stretches of tokens, which is what kernels like best; text keeps its two clusters.
        """
        kept, extra = self._everything(grown(self.map, batch, heads), text), 0 if text is None else 2
        q_labels = _even_labels(grown(self.q_labels, batch, heads), kept.shape[2] - extra)
        return ClusterMask(
            kept, q_labels, _even_labels(grown(self.k_labels, batch, heads), kept.shape[3] - extra), text
        )

    def everything(self) -> Tensor:
        """The map that keeps all there is, bool [B, H, Cq, Ck]."""
        return self._everything(self.map, self.text)

    @staticmethod
    def _everything(like: Tensor, text: Text | None) -> Tensor:
        kept = torch.ones_like(like)
        if text is not None:  # unused slots attend only to themselves
            kept[..., -1, :-1] = False
            kept[..., :-1, -1] = False
        return kept


def _even_labels(labels: Tensor, clusters: int) -> Tensor:
    """Video tokens given to clusters in equal stretches; labels of text (from `clusters` up) stay."""
    video = labels < clusters
    place = video.long().cumsum(-1) - 1
    count = int(video.sum(-1).flatten()[0])
    return torch.where(video, place * clusters // count, labels).to(labels.dtype)


def count_labels(labels: Tensor, clusters: int) -> Tensor:
    """How many tokens carry each label: integer [..., N] -> int64 [..., C]."""
    counts = torch.zeros(*labels.shape[:-1], clusters, dtype=torch.int64, device=labels.device)
    ones = torch.ones(1, dtype=torch.int64, device=labels.device).expand(labels.shape)
    return counts.scatter_add_(-1, labels.long(), ones)
