"""What backbones of blocks share: which tokens blocks cover, in which order, and masks made head by head."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError
from ..masks import BlockMask, Text
from .base import Backbone, Grid, Key, Thresholds, check_qk, read_heads, read_text, read_thresholds


@dataclass(frozen=True, eq=False)
class Covered:
    """The tokens that blocks cover: video and prompt, in block order; unused text slots at the end are set aside.

    Args:
        n_q, n_k: how many queries and keys.
        tail: unused slots after them.
        order: token at each place, int64 [n_q], or None.
        text: where text lies, or None.
        grid: video tokens as (frames, rows, columns), where it is known.
        device: where masks are to live.
    """

    n_q: int
    n_k: int
    tail: int
    order: Tensor | None
    text: Text | None
    grid: Grid | None
    device: Any

    def of(self, x: Tensor) -> Tensor:
        """Those of one head's tokens x [N, D], in block order, fp32 [n, D]."""
        x = x[: x.shape[0] - self.tail]
        return (x if self.order is None else x.index_select(0, self.order)).float()

    def blocks(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Blocks of queries and of keys."""
        return -(-self.n_q // shape[0]), -(-self.n_k // shape[1])

    def mask(self, blocks: Tensor, shape: tuple[int, int]) -> BlockMask:
        """The mask of these blocks, bool [B, H, Mq, Mk]."""
        return BlockMask(blocks, shape[0], self.n_q, self.n_k, self.order, self.tail, block_k=shape[1], text=self.text)

    @functools.cached_property
    def places(self) -> Tensor:
        """Frame, row and column of each token in block order, fp32 [n_q, 3]; NaN for the prompt."""
        n = self.n_q + self.tail
        video = torch.arange(n) if self.text is None else self.text.video_index(n)
        if self.grid is None or len(video) != self.grid[0] * self.grid[1] * self.grid[2] or self.n_q != self.n_k:
            raise HeartError(
                f"{len(video)} video tokens do not lie on the grid {self.grid}: give grid=(frames, rows, columns) in the call"
            )
        found = torch.full((n, 3), torch.nan)
        found[video] = torch.cartesian_prod(*(torch.arange(float(size)) for size in self.grid)).view(-1, 3)
        return found[: self.n_q] if self.order is None else found[self.order.cpu()]


def covered(
    owner: str, q: Tensor, k: Tensor, text: Text | None, order: Tensor | None = None, grid: Grid | None = None
) -> Covered:
    """The tokens that blocks of q, k [B, H, N, D] cover; an order of the video alone is stretched over the prompt."""
    n, n_k = q.shape[2], k.shape[2]
    text = read_text(text, n)
    tail = text.unused if text else 0
    if (text is not None or order is not None) and n_k != n:
        raise HeartError(f"text or a token order needs as many keys as queries, not {n_k} and {n}")
    if tail and text is not None and text.end != n:
        raise HeartError(
            f"unused text slots end at token {text.end} of {n}: {owner} can leave them out only at the end of the sequence"
        )
    if order is not None:
        order = stretch(order.to(q.device), n - tail, text)
    return Covered(n - tail, n_k - tail, tail, order, text, grid, q.device)


def stretch(order: Tensor, n: int, text: Text | None) -> Tensor:
    """The order of all `n` tokens: an order of the video tokens alone leaves the prompt after them as it is."""
    video = n if text is None else text.start
    if text is not None and order.numel() == video and text.start + text.prompt == n:
        order = torch.cat([order.long(), torch.arange(video, n, device=order.device)])
    if order.numel() != n:
        raise HeartError(
            f"an order of {order.numel()} tokens does not fit the {n} tokens of video and prompt: "
            "give all of them, or the video alone with the text at the end"
        )
    if order.device.type == "cpu" and not 0 <= int(order.min()) <= int(order.max()) < n:
        raise HeartError(f"an order names tokens outside 0..{n - 1}: give a permutation of the {n} tokens")
    return order.long()


def in_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Tokens [n, D] as blocks [M, block, D], the last one filled up with zeros, and how many are real, fp32 [M, 1]."""
    n = x.shape[0]
    sizes = (n - torch.arange(0, n, block, device=x.device)).clamp(max=block).float().unsqueeze(-1)
    return torch.nn.functional.pad(x, (0, 0, 0, -n % block)).unflatten(0, (-1, block)), sizes


def block_means(x: Tensor, block: int) -> Tensor:
    """Means of blocks of x [n, D] over their real tokens, [M, D]."""
    blocks, sizes = in_blocks(x, block)
    return blocks.sum(1) / sizes


def largest(scores: Tensor, count: int) -> Tensor:
    """The `count` largest of each row of scores [M, K], ties by lowest index; bool."""
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)


class BlockBackbone(Backbone):
    """A backbone that looks at one head after the other and chooses blocks.

    A subclass says what it sees in a head (`examine`) and which blocks it chooses from that at a threshold (`choose`).
    """

    @property
    @abstractmethod
    def block_shape(self) -> tuple[int, int]:
        """Query and key tokens of a block."""

    @abstractmethod
    def examine(self, tokens: Covered, q: Tensor, k: Tensor, v: Tensor | None) -> Any:
        """What one head's q, k, v [N, D] say, whatever the threshold."""

    @abstractmethod
    def choose(self, seen: Any, tau: float, head: int) -> Tensor:
        """The blocks to compute at a threshold below 1, bool [Mq, Mk]; `head` is its number in the model."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, for token orders."""
        return min(self.block_shape)

    @torch.no_grad()
    def predict(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Thresholds,
        state: Any = None,
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
        v: Tensor | None = None,
        grid: Grid | None = None,
    ) -> BlockMask:
        """The blocks to compute (see `Backbone.predict`); unused text slots at the end attend only to themselves."""
        check_qk(q, k)
        tau, names = read_thresholds(thresholds, *q.shape[:2]), read_heads(heads, q.shape[1])
        tokens = covered(type(self).__name__, q, k, text, order, grid)
        blocks = self._all(tokens, q)
        for b, h in (tau < 1).nonzero().tolist():
            seen = self.examine(tokens, q[b, h], k[b, h], None if v is None else v[b, h])
            blocks[b, h] = self.choose(seen, float(tau[b, h]), names[h])
        return tokens.mask(blocks, self.block_shape)

    @torch.no_grad()
    def predict_many(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Sequence[float],
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
        v: Tensor | None = None,
        grid: Grid | None = None,
    ) -> tuple[list[BlockMask], BlockMask]:
        """A mask for each threshold and the full one; every head is looked at once."""
        check_qk(q, k)
        names = read_heads(heads, q.shape[1])
        tokens = covered(type(self).__name__, q, k, text, order, grid)
        full = self._all(tokens, q)
        found = [full.clone() for _ in thresholds]
        for b, h in torch.ones(q.shape[:2]).nonzero().tolist():
            seen = self.examine(tokens, q[b, h], k[b, h], None if v is None else v[b, h])
            for blocks, tau in zip(found, thresholds):
                if tau < 1:
                    blocks[b, h] = self.choose(seen, float(tau), names[h])
        return [tokens.mask(blocks, self.block_shape) for blocks in found], tokens.mask(full, self.block_shape)

    def _all(self, tokens: Covered, q: Tensor) -> Tensor:
        return torch.ones(*q.shape[:2], *tokens.blocks(self.block_shape), dtype=torch.bool, device=q.device)
