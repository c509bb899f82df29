"""Tokens in group order: boundaries of the groups and the permutations that sort tokens into them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import HeartError


class Layout(NamedTuple):
    """Where the tokens of each group lie once they are sorted by group."""

    q_starts: Tensor  # int32 boundaries in sorted positions, [M + 1] shared by all heads or [B, H, M + 1]
    k_starts: Tensor
    q_perm: Tensor | None  # int32 token at each sorted position, [n], [B, H, n], or None for identity
    k_perm: Tensor | None


def even_starts(n: int, block: int, device: torch.device) -> Tensor:
    """Boundaries of equal blocks, the last one cut: [ceil(n / block) + 1]."""
    starts = torch.arange(0, n + block, block, dtype=torch.int32, device=device)
    return starts.clamp_(max=n)


def check_permutation(order: Tensor, n: int) -> None:
    """Refuse an order [n] that does not name each token once."""
    seen = torch.zeros(n, dtype=torch.bool, device=order.device)
    fits = order.shape == (n,) and 0 <= int(order.min()) and int(order.max()) < n
    if fits:
        seen[order.long()] = True
    if not fits or not bool(seen.all()):
        raise HeartError(
            f"the token order of a mask over {n} tokens is not a permutation: give each of 0 … {n - 1} once"
        )


def sort_labels(labels: Tensor, clusters: int, side: str) -> tuple[Tensor, Tensor]:
    """Tokens sorted by label (stable) and the boundaries of the clusters: int32 [B, H, N], [B, H, C + 1]."""
    if labels.is_cuda:
        inside = (labels >= 0).all() & (labels < clusters).all()
        torch._assert_async(inside, f"{side} labels run beyond the map's {clusters} clusters")
    elif int(labels.min()) < 0 or int(labels.max()) >= clusters:
        raise HeartError(
            f"{side} labels run from {int(labels.min())} to {int(labels.max())} but the map has {clusters} clusters"
        )
    perm = _stable_argsort(labels)
    sizes = torch.zeros(*labels.shape[:2], clusters + 1, dtype=torch.int32, device=labels.device)
    sizes.scatter_add_(
        2, labels.long() + 1, torch.ones((), dtype=torch.int32, device=labels.device).expand(labels.shape)
    )
    return perm, sizes.cumsum(dim=-1, dtype=torch.int32)


def _stable_argsort(labels: Tensor) -> Tensor:
    """numpy sorts 16-bit integers by radix, several times quicker than torch on a CPU."""
    if labels.device.type != "cpu":
        return labels.argsort(dim=-1, stable=True).to(torch.int32)
    order = labels.to(torch.int16).numpy().argsort(axis=-1, kind="stable")
    return torch.from_numpy(order).to(torch.int32)
