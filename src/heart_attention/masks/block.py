"""Masks of blocks of consecutive tokens, in one token order or in one for each head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError
from .packed import Mask, refuse_large


@dataclass(frozen=True, eq=False)
class BlockMask(Mask):
    """Which blocks of `block` × `block` tokens are computed.

    Args:
        blocks: bool [B, H, ceil(n_q/block), ceil(n_k/block)].
        block: tokens a block.
        n_q, n_k: tokens that the blocks cover.
        order: permutation of those tokens, of queries and keys alike: block row I holds the tokens
            `order[I*block:(I+1)*block]`. None is the order in which they come. Several permutations [S, n_q] need
            `order_of`.
        tail: that many further tokens attend only to themselves (unused text slots at the end).
        order_of: int8 [B, H], which of several orders each head takes.
    """

    blocks: Tensor
    block: int
    n_q: int
    n_k: int
    order: Tensor | None = None
    tail: int = 0
    order_of: Tensor | None = None

    @property
    def _per_head(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("blocks",) if self.order_of is None else ("blocks", "order_of")

    def __post_init__(self) -> None:
        if self.block < 1 or self.n_q < 1 or self.n_k < 1 or self.tail < 0:
            raise HeartError(
                f"a block mask of block {self.block}, {self.n_q} × {self.n_k} tokens and tail "
                f"{self.tail} cannot be: sizes are at least 1, the tail at least 0"
            )
        expected = (-(-self.n_q // self.block), -(-self.n_k // self.block))
        if self.blocks.numel() and (self.blocks.dim() != 4 or tuple(self.blocks.shape[2:]) != expected):
            raise HeartError(
                f"blocks of shape {tuple(self.blocks.shape)} do not fit {self.n_q} × {self.n_k} tokens in "
                f"blocks of {self.block}: give bool [B, H, {expected[0]}, {expected[1]}]"
            )
        if self.blocks.dtype != torch.bool:
            raise HeartError(f"blocks are {self.blocks.dtype}: give bool")
        if (self.order is not None or self.tail) and self.n_q != self.n_k:
            raise HeartError(f"a token order or a tail needs as many keys as queries, not {self.n_k} and {self.n_q}")
        several = () if self.order_of is None else (-1 if self.order is None else len(self.order),)
        if self.order is not None and tuple(self.order.shape) != (*several, self.n_q):
            raise HeartError(
                f"an order of shape {tuple(self.order.shape)} cannot permute {self.n_q} tokens: give [{self.n_q}], "
                f"or [S, {self.n_q}] with order_of"
            )
        if self.order_of is not None:
            self._check_order_of(several[0])

    def _check_order_of(self, orders: int) -> None:
        own = self.order_of
        assert own is not None
        if orders < 0 or own.dim() != 2 or (own.device.type == "cpu" and own.numel() and not _within(own, orders)):
            raise HeartError(
                f"order_of of shape {tuple(own.shape)} does not choose among {max(orders, 0)} orders: "
                "give a row of order for each head, [B, H]"
            )

    def orders(self) -> Tensor | None:
        """The order of all heads [n_q], that of each head [B, H, n_q], or None."""
        return self.order if self.order is None or self.order_of is None else self.order[self.order_of.long()]

    @classmethod
    def full(
        cls, batch: int, heads: int, n: int, block: int, order: Tensor | None = None, tail: int = 0, device: Any = None
    ) -> BlockMask:
        """The mask that keeps every block of `n` tokens."""
        m = -(-n // block)
        return cls(torch.ones(batch, heads, m, m, dtype=torch.bool, device=device), block, n, n, order, tail)

    def density(self) -> Tensor:
        """Kept share of all token pairs, float64 [B, H]; the unused tail counts neither as kept nor as all."""
        rows, cols = self._sizes(self.n_q), self._sizes(self.n_k)
        kept = torch.einsum("bhqk,q,k->bh", self.blocks.double(), rows, cols)
        return kept / (self.n_q * self.n_k)

    def _sizes(self, n: int) -> Tensor:
        """Tokens in each block, float64 [M]."""
        starts = torch.arange(0, n, self.block, device=self.device, dtype=torch.float64)
        return (n - starts).clamp(max=self.block)

    def dense_tokens(self) -> Tensor:
        """The mask token by token, bool [B, H, n_q + tail, n_k + tail]; for small sizes."""
        refuse_large(self.shape, self.n_q + self.tail, self.n_k + self.tail)
        q = torch.arange(self.n_q, device=self.device) // self.block
        k = torch.arange(self.n_k, device=self.device) // self.block
        tokens = self.blocks[:, :, q][..., k]
        order = self.orders()
        if order is not None:
            every = torch.arange(self.n_q, device=self.device)
            places = torch.empty_like(order, dtype=torch.int64).scatter_(-1, order.long(), every.expand(order.shape))
            places = places.expand(*self.shape, self.n_q)  # of each token in the order of its head
            tokens = tokens.gather(2, places[..., None].expand(tokens.shape))
            tokens = tokens.gather(3, places[..., None, :].expand(tokens.shape))
        if self.tail:
            tokens = torch.nn.functional.pad(tokens, (0, self.tail, 0, self.tail))
            tokens[..., self.n_q :, self.n_k :] = True
        return tokens

    def to(self, device: Any) -> BlockMask:
        """The mask on another device."""
        moved = self._map(lambda x: x.to(device))
        return moved if self.order is None else replace(moved, order=self.order.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes held; the order is shared by all masks of a run and not counted."""
        return super().nbytes


def _within(x: Tensor, count: int) -> bool:
    return 0 <= int(x.min()) and int(x.max()) < count
