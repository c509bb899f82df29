"""What block and cluster masks share: groups of tokens, densities, heads cut out and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..errors import HeartError
from .layout import Layout
from .packed import Packed, pack_bits, tensor_bytes
from .text import Text

DENSE_TOKENS_LIMIT = 1 << 28  # entries of a token mask that `dense_tokens` agrees to write out
RESTS = ("drop", "mean", "first-order")  # what becomes of the groups that a mask leaves out; the last is PISA's


def check_rest(rest: str, known: Sequence[str] = RESTS) -> None:
    """Refuse an unknown way to treat what a mask leaves out."""
    if rest not in known:
        raise HeartError(f"rest is {rest!r}: give one of {', '.join(known)}")


class Mask:
    """Which pairs of token groups are computed, for every head.

    Queries fall into groups (rows), keys into groups (columns): blocks of consecutive tokens, or clusters. A kind of mask
    says how by `row_of`, `group_of` and `sizes`; everything else follows here. Per-head tensors [B, H, ...] are named in
    `_per_head`, of which the first are the flags [B, H, rows, columns].
    """

    kind: ClassVar[str]
    _per_head: tuple[str, ...] = ()
    n_q: int  # tokens that the groups cover
    n_k: int
    tail: int = 0  # further tokens that attend only to themselves
    text: Text | None = None  # where the tokens lie that are never approximated

    # ---------------------------------------- what a kind of mask says

    def row_of(self) -> Tensor:
        """The query group of each token, int64 [n_q], or [B, H, n_q] where heads differ."""
        raise NotImplementedError

    def group_of(self) -> Tensor:
        """The key group of each token, int64 [n_k], or [B, H, n_k] where heads differ."""
        raise NotImplementedError

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Tokens in each query and key group: int64 [B, H, rows] and [B, H, columns]."""
        raise NotImplementedError

    def layout(self) -> Layout:
        """Tokens in group order, for a kernel's plan."""
        raise NotImplementedError

    @property
    def block_shape(self) -> tuple[int, int] | None:
        """Query and key tokens a block where all blocks are equal (but for the last), else None."""
        return None

    def full_like(self, batch: int, heads: int, text: Text | None) -> Self:
        """A mask of the same kind and size that keeps everything, for heads with τ ≥ 1."""
        raise NotImplementedError

    # ---------------------------------------- what it keeps

    @property
    def flags(self) -> Tensor:
        """Which pairs of groups are computed, bool [B, H, rows, columns]."""
        return getattr(self, self._per_head[0])

    def with_flags(self, flags: Tensor) -> Self:
        """The mask with other flags."""
        return replace(self, **{self._per_head[0]: flags})  # type: ignore[type-var]

    def kept(self) -> Tensor:
        """Pairs of groups that hold tokens and are computed, bool [B, H, rows, columns]."""
        rows, columns = (sizes > 0 for sizes in self.sizes())
        return self.flags & rows[..., :, None] & columns[..., None, :]

    def rows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which of the key tokens each of the query tokens attends to, bool [B, H, q, k]; integer [q] and [k]."""
        queries, keys = queries.to(self.device), keys.to(self.device)
        batch, heads = self.shape
        row = self.row_of()[..., queries.clamp(max=self.n_q - 1)].expand(batch, heads, -1)
        group = self.group_of()[..., keys.clamp(max=self.n_k - 1)].expand(batch, heads, -1)
        b = torch.arange(batch, device=self.device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=self.device).view(1, -1, 1, 1)
        found = self.flags[b, h, row.unsqueeze(-1), group.unsqueeze(-2)]
        if self.tail:
            from_tail, to_tail = (queries >= self.n_q)[:, None], (keys >= self.n_k)[None, :]
            found = torch.where(from_tail | to_tail, from_tail & to_tail, found)
        return found

    def dense_tokens(self) -> Tensor:
        """The mask token by token, bool [B, H, n_q + tail, n_k + tail]; for small sizes."""
        n_q, n_k = self.n_q + self.tail, self.n_k + self.tail
        refuse_large(self.shape, n_q, n_k)
        return self.rows(torch.arange(n_q), torch.arange(n_k))

    def density(self) -> Tensor:
        """Kept share of all token pairs, float64 [B, H]; the unused tail counts neither as kept nor as all."""
        rows, columns = (sizes.double() for sizes in self.sizes())
        kept = (self.flags.float() @ columns.float().unsqueeze(-1)).squeeze(-1)  # [B, H, rows], exact below 2^24 keys
        return (kept.double() * rows).sum(-1) / (self.n_q * self.n_k)

    # ---------------------------------------- the rest: what it leaves out

    def exact_groups(self) -> Tensor:
        """Key groups that hold a token which is never approximated (text), bool [B, H, columns]."""
        return self._holding(self.group_of(), self.flags.shape[3], "exact", self.n_k)

    def _holding(self, groups: Tensor, count: int, part: str, n: int) -> Tensor:
        """Groups [B, H, count] that hold a token of one part of the text."""
        found = torch.zeros(*self.shape, count, dtype=torch.bool, device=self.device)
        if self.text is None:
            return found
        tokens = self.text.index(part, n, self.device)
        return found.scatter_(-1, groups[..., tokens].expand(*self.shape, -1), True)

    def for_rest(self, rest: str) -> Self:
        """The mask as it is computed when the rest is treated so: approximated, text's groups are kept in every row."""
        check_rest(rest)
        if rest == "drop" or self.text is None:
            return self
        prompt = self._holding(self.group_of(), self.flags.shape[3], "prompt", self.n_k)
        unused = self._holding(self.row_of(), self.flags.shape[2], "unused", self.n_q)
        return self.with_flags(self.flags | prompt[..., None, :] & ~unused[..., :, None])

    def approximated(self, filled: Sequence[Tensor] | None = None) -> Tensor:
        """Pairs of groups that `rest="mean"` approximates, bool [B, H, rows, columns].

        Left out, but neither empty nor text; unused text slots, which see only themselves, approximate nothing. `filled`
        says which rows and columns hold tokens, if that is known already.
        """
        rows, columns = (sizes > 0 for sizes in self.sizes()) if filled is None else filled
        if self.text is not None:
            rows = rows & ~self._holding(self.row_of(), self.flags.shape[2], "unused", self.n_q)
            columns = columns & ~self.exact_groups()
        return ~self.flags & rows[..., :, None] & columns[..., None, :]  # text's groups are exact, kept or not

    def cost(self, rest: str = "drop") -> Tensor:
        """Computed share of all token pairs, float64 [B, H]: kept pairs, and one for each query and approximated group."""
        return self.shares(rest)[1]

    def shares(self, rest: str = "drop") -> tuple[Tensor, Tensor]:
        """Density and cost when the rest is treated so."""
        density = self.for_rest(rest).density()
        if rest == "drop":
            return density, density
        rows = self.sizes()[0].double()
        return density, density + (self.approximated().sum(-1) * rows).sum(-1) / (self.n_q * self.n_k)

    def minus(self, lower: Self) -> Self | None:
        """What this mask keeps beyond `lower`, as a mask; None if it does not keep all of `lower`."""
        return None if bool((lower.flags & ~self.flags).any()) else self.with_flags(self.flags & ~lower.flags)

    # ---------------------------------------- heads and batch items

    def map_heads(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The mask with `function` applied to every per-head tensor [B, H, ...]."""
        return replace(self, **{name: function(getattr(self, name)) for name in self._per_head})  # type: ignore

    @property
    def shape(self) -> tuple[int, int]:
        """(B, H)."""
        return tuple(self.flags.shape[:2])  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """Where the mask lives."""
        return self.flags.device

    def item(self, b: int) -> Self:
        """The mask of batch item `b` alone, [1, H]."""
        return self.map_heads(lambda x: x[b : b + 1])

    def heads(self, index: Sequence[int] | Tensor) -> Self:
        """The mask of the heads in `index` (indices, or bool [H]), in that order."""
        index = torch.as_tensor(index, device=self.device)
        return self.map_heads(lambda x: x[:, index if index.dtype == torch.bool else index.long()])

    def split_batch(self, batch: int) -> Self:
        """[1, B·H] as [B, H]."""
        return self if batch == 1 else self.map_heads(lambda x: x.view(batch, -1, *x.shape[2:]))

    @staticmethod
    def join(masks: Sequence[Any]) -> Any:
        """Masks [1, n] of one kind side by side."""
        first = masks[0]
        parts = {name: torch.cat([getattr(m, name) for m in masks], 1) for name in first._per_head}
        return first if len(masks) == 1 else replace(first, **parts)

    def where(self, chosen: Tensor, mask: Self) -> Self:
        """The heads of `mask` [B, H] where `chosen`, bool [B, H] on this mask's device, and this mask's elsewhere."""

        def choose(name: str) -> Tensor:
            old, new = getattr(self, name), getattr(mask, name)
            return torch.where(chosen.view(*chosen.shape, *(1,) * (old.dim() - 2)), new, old)

        return replace(self, **{name: choose(name) for name in self._per_head})  # type: ignore[type-var]

    def put(self, index: Sequence[int] | Tensor, mask: Self) -> Self:
        """A new mask with the heads in `index` replaced by those of `mask`.

        `index` is bool [B, H], or head indices. `mask` holds either all [B, H] heads, or only the replaced
        ones: [B, len(index)] for head indices, [1, number of true entries] in row-major order for bool.
        """
        chosen, source = self._source(index, mask)
        b, h = chosen.nonzero(as_tuple=True)

        def merge(name: str) -> Tensor:
            old, new = getattr(self, name), getattr(mask, name)
            if old.shape[2:] != new.shape[2:]:
                raise HeartError(
                    f"cannot put {name} of shape {tuple(new.shape)} into {tuple(old.shape)}: "
                    "both masks must have the same blocks or clusters"
                )
            result = old.clone()
            result[b, h] = new.flatten(0, 1)[source].to(old.device, old.dtype)
            return result

        return replace(self, **{name: merge(name) for name in self._per_head})  # type: ignore[type-var]

    def _source(self, index: Sequence[int] | Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Which heads are replaced, bool [B, H], and by which row of `mask` flattened to [B·H]."""
        batch, heads = self.shape
        index = torch.as_tensor(index, device="cpu")  # where it is decided; a GPU would have to be asked for it
        rows = torch.arange(mask.shape[0] * mask.shape[1]).view(mask.shape)
        if index.dtype != torch.bool:
            chosen = torch.zeros(batch, heads, dtype=torch.bool)
            chosen[:, index.long()] = True
            if mask.shape == (batch, index.numel()):
                placed = torch.zeros(batch, heads, dtype=torch.long)
                placed[:, index.long()] = rows
                return chosen, placed[chosen]
        else:
            chosen = index.expand(batch, heads)
        if mask.shape == (batch, heads):
            return chosen, rows[chosen]
        if mask.shape == (1, int(chosen.sum())):
            return chosen, rows[0]
        raise HeartError(
            f"cannot put {int(chosen.sum())} heads from a mask of shape {tuple(mask.shape)} into one of "
            f"shape {(batch, heads)}: give all heads or exactly the replaced ones"
        )

    # ---------------------------------------- storage

    def to(self, device: Any) -> Self:
        """The mask on another device."""
        return self.map_heads(lambda x: x.to(device))

    def packed(self) -> Packed:
        """The mask at one bit an entry, for storage."""
        return Packed(pack_bits(self.flags), self.flags.shape[-1], self.with_flags(self.flags.new_empty(0)))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor_bytes(getattr(self, name)) for name in self._per_head)


def refuse_large(shape: tuple[int, int], n_q: int, n_k: int) -> None:
    """Refuse to write out a token mask that would fill the memory."""
    if shape[0] * shape[1] * n_q * n_k > DENSE_TOKENS_LIMIT:
        raise HeartError(
            f"a token mask of {shape[0]}×{shape[1]}×{n_q}×{n_k} entries is too large to write out "
            f"(limit {DENSE_TOKENS_LIMIT}): use blocks or clusters"
        )


def grown(x: Tensor, batch: int, heads: int) -> Tensor:
    """The first head of x [B, H, ...] for all of `batch` × `heads`."""
    return x[:1, :1].expand(batch, heads, *x.shape[2:]).contiguous()
