"""Masks of blocks of consecutive tokens, in one token order or in one for each head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import HeartError
from .base import Mask, grown
from .layout import Layout, check_permutation, even_starts
from .text import Text


@dataclass(frozen=True, eq=False)
class BlockMask(Mask):
    """Which blocks of `block` query tokens × `block_k` key tokens are computed.

    Args:
        blocks: bool [B, H, ceil(n_q/block), ceil(n_k/block_k)].
        block: query tokens a block.
        n_q, n_k: tokens that the blocks cover.
        order: permutation of those tokens, of queries and keys alike: block row I holds the tokens
            `order[I*block:(I+1)*block]`. None is the order in which they come. Several permutations [S, n_q] need
            `order_of`.
        tail: that many further tokens attend only to themselves (unused text slots at the end).
        order_of: int8 [B, H], which of several orders each head takes.
        block_k: key tokens a block; None is as many as query tokens.
        text: where the tokens lie that are never approximated; None if there are none.
    """

    kind: ClassVar[str] = "block"

    blocks: Tensor
    block: int
    n_q: int
    n_k: int
    order: Tensor | None = None
    tail: int = 0
    order_of: Tensor | None = None
    block_k: int | None = None
    text: Text | None = None

    @property
    def _per_head(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("blocks",) if self.order_of is None else ("blocks", "order_of")

    @property
    def block_q(self) -> int:
        """Query tokens a block."""
        return self.block

    def __post_init__(self) -> None:
        block_k = self.block if self.block_k is None else self.block_k
        object.__setattr__(self, "block_k", block_k)  # always a number from here on
        if min(self.block_q, block_k, self.n_q, self.n_k) < 1 or self.tail < 0:
            raise HeartError(
                f"a block mask of block {self._blocks_are()}, {self.n_q} × {self.n_k} tokens and tail "
                f"{self.tail} cannot be: sizes are at least 1, the tail at least 0"
            )
        self._check_blocks()
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

    def _blocks_are(self) -> str:
        return f"{self.block}" if self.block_q == self.block_k else f"{self.block_q} × {self.block_k}"

    def _check_blocks(self) -> None:
        expected = (-(-self.n_q // self.block_q), -(-self.n_k // self.block_k))  # type: ignore[operator]
        if self.blocks.numel() and (self.blocks.dim() != 4 or tuple(self.blocks.shape[2:]) != expected):
            raise HeartError(
                f"blocks of shape {tuple(self.blocks.shape)} do not fit {self.n_q} × {self.n_k} tokens in "
                f"blocks of {self._blocks_are()}: give bool [B, H, {expected[0]}, {expected[1]}]"
            )
        if self.blocks.dtype != torch.bool:
            raise HeartError(f"blocks are {self.blocks.dtype}: give bool")

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

    def full_like(self, batch: int, heads: int, text: Text | None) -> BlockMask:
        """A mask of the same kind and size that keeps everything, for heads with τ ≥ 1."""
        own = None if self.order_of is None else grown(self.order_of, batch, heads)
        return replace(self, blocks=torch.ones_like(grown(self.blocks, batch, heads)), order_of=own, text=text)

    def row_of(self) -> Tensor:
        """The query block of each token, int64 [n_q], or [B, H, n_q] where heads have orders of their own."""
        return self._places() // self.block_q

    def group_of(self) -> Tensor:
        """The key block of each token, int64 [n_k], or [B, H, n_k] where heads have orders of their own."""
        places = torch.arange(self.n_k, device=self.device) if self.order is None else self._places()
        return places // self.block_k  # type: ignore[operator]

    @property
    def block_shape(self) -> tuple[int, int]:
        """Query and key tokens a block."""
        return self.block_q, self.block_k  # type: ignore[return-value]

    def layout(self) -> Layout:
        """Tokens in block order; boundaries are shared by all heads."""
        order = self.orders()
        if self.order is not None and order is not None:
            for row in self.order.reshape(-1, self.n_q):
                check_permutation(row, self.n_q)
            order = order.to(device=self.device, dtype=torch.int32).contiguous()
        starts = [even_starts(n, block, self.device) for n, block in zip((self.n_q, self.n_k), self.block_shape)]
        return Layout(starts[0], starts[1], order, order)

    def _places(self) -> Tensor:
        """Where each query token stands in the order of its head."""
        every, order = torch.arange(self.n_q, device=self.device), self.orders()
        if order is None:
            return every
        return torch.empty_like(order, dtype=torch.int64).scatter_(-1, order.long(), every.expand(order.shape))

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Tokens in each query and key block: int64 [B, H, Mq] and [B, H, Mk]."""
        return self._sizes(self.n_q, self.block_q), self._sizes(self.n_k, self.block_k)  # type: ignore[arg-type]

    def _sizes(self, n: int, block: int) -> Tensor:
        starts = torch.arange(0, n, block, device=self.device)
        return (n - starts).clamp(max=block).expand(*self.shape, -1)

    def to(self, device: Any) -> BlockMask:
        """The mask on another device."""
        moved = self.map_heads(lambda x: x.to(device))
        return moved if self.order is None else replace(moved, order=self.order.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes held; the order is shared by all masks of a run and not counted."""
        return super().nbytes


def _within(x: Tensor, count: int) -> bool:
    return 0 <= int(x.min()) and int(x.max()) < count
