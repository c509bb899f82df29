"""Masks of pairs of clusters: a map between clusters of queries and of keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import HeartError
from .packed import Mask, refuse_large


@dataclass(frozen=True, eq=False)
class ClusterMask(Mask):
    """Which pairs of clusters are computed: token i attends to j iff `map[q_labels[i], k_labels[j]]`.

    Args:
        map: bool [B, H, Cq, Ck].
        q_labels, k_labels: integer [B, H, N], the cluster of each query and key.
    """

    map: Tensor
    q_labels: Tensor
    k_labels: Tensor

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
    def n_q(self) -> int:
        """Queries."""
        return self.q_labels.shape[-1]

    @property
    def n_k(self) -> int:
        """Keys."""
        return self.k_labels.shape[-1]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Tokens in each cluster: int64 [B, H, Cq] and [B, H, Ck]."""
        return count_labels(self.q_labels, self.map.shape[2]), count_labels(self.k_labels, self.map.shape[3])

    def density(self) -> Tensor:
        """Kept share of all token pairs, float64 [B, H]; text clusters count as any other."""
        rows, cols = (sizes.double() for sizes in self.sizes())
        kept = torch.einsum("bhqk,bhq,bhk->bh", self.map.double(), rows, cols)
        return kept / (self.n_q * self.n_k)

    def dense_tokens(self) -> Tensor:
        """The mask token by token, bool [B, H, N, N]; for small sizes."""
        refuse_large(self.shape, self.n_q, self.n_k)
        batch, heads = self.shape
        b = torch.arange(batch, device=self.device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=self.device).view(1, -1, 1, 1)
        return self.map[b, h, self.q_labels.long().unsqueeze(-1), self.k_labels.long().unsqueeze(-2)]


def count_labels(labels: Tensor, clusters: int) -> Tensor:
    """How many tokens carry each label: integer [..., N] -> int64 [..., C]."""
    counts = torch.zeros(*labels.shape[:-1], clusters, dtype=torch.int64, device=labels.device)
    ones = torch.ones(1, dtype=torch.int64, device=labels.device).expand(labels.shape)
    return counts.scatter_add_(-1, labels.long(), ones)
