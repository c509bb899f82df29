"""Masks at one bit an entry, and what block and cluster masks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import HeartError

if TYPE_CHECKING:
    from .block import BlockMask
    from .cluster import ClusterMask

DENSE_TOKENS_LIMIT = 1 << 28  # entries of a token mask that `dense_tokens` agrees to write out


def pack_bits(flags: Tensor) -> Tensor:
    """Bool [..., M] as uint8 [..., ceil(M/8)], lowest bit first."""
    m = flags.shape[-1]
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -m % 8)).unflatten(-1, (-1, 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, m: int) -> Tensor:
    """The inverse of `pack_bits`: uint8 [..., ceil(m/8)] as bool [..., m]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :m].bool()


@dataclass(frozen=True, eq=False)
class Packed:
    """A mask at one bit an entry; `unpack()` gives the mask back."""

    bits: Tensor  # uint8 [B, H, rows, ceil(cols / 8)]
    cols: int
    mask: Any  # the mask with an empty flag tensor, for everything that is not bits

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return tensor_bytes(self.bits) + self.mask.nbytes

    def unpack(self) -> BlockMask | ClusterMask:
        """The mask that was packed."""
        return self.mask._with_flags(unpack_bits(self.bits, self.cols))


class Mask:
    """What block and cluster masks share: per-head tensors named in `_per_head`, of which the first are flags."""

    _per_head: tuple[str, ...] = ()

    def _flags(self) -> Tensor:
        return getattr(self, self._per_head[0])

    def _with_flags(self, flags: Tensor) -> Any:
        return replace(self, **{self._per_head[0]: flags})  # type: ignore[type-var]

    def _map(self, function: Any) -> Any:
        """The mask with `function` applied to every per-head tensor [B, H, ...]."""
        return replace(self, **{name: function(getattr(self, name)) for name in self._per_head})  # type: ignore

    @property
    def shape(self) -> tuple[int, int]:
        """(B, H)."""
        return tuple(self._flags().shape[:2])  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """Where the mask lives."""
        return self._flags().device

    def item(self, b: int) -> Any:
        """The mask of batch item `b` alone, [1, H]."""
        return self._map(lambda x: x[b : b + 1])

    def heads(self, index: Sequence[int] | Tensor) -> Any:
        """The mask of the heads in `index` (indices, or bool [H]), in that order."""
        index = torch.as_tensor(index, device=self.device)
        return self._map(lambda x: x[:, index if index.dtype == torch.bool else index.long()])

    def put(self, index: Sequence[int] | Tensor, mask: Any) -> Any:
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

    def _source(self, index: Sequence[int] | Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        """Which heads are replaced, bool [B, H], and by which row of `mask` flattened to [B·H]."""
        batch, heads = self.shape
        index = torch.as_tensor(index, device=self.device)
        rows = torch.arange(mask.shape[0] * mask.shape[1], device=self.device).view(mask.shape)
        if index.dtype != torch.bool:
            chosen = torch.zeros(batch, heads, dtype=torch.bool, device=self.device)
            chosen[:, index.long()] = True
            if mask.shape == (batch, index.numel()):
                placed = torch.zeros(batch, heads, dtype=torch.long, device=self.device)
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

    def to(self, device: Any) -> Any:
        """The mask on another device."""
        return self._map(lambda x: x.to(device))

    def packed(self) -> Packed:
        """The mask at one bit an entry, for storage."""
        flags = self._flags()
        return Packed(pack_bits(flags), flags.shape[-1], self._with_flags(flags.new_empty(0)))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor_bytes(getattr(self, name)) for name in self._per_head)


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def refuse_large(shape: tuple[int, int], n_q: int, n_k: int) -> None:
    if shape[0] * shape[1] * n_q * n_k > DENSE_TOKENS_LIMIT:
        raise HeartError(
            f"a token mask of {shape[0]}×{shape[1]}×{n_q}×{n_k} entries is too large to write out "
            f"(limit {DENSE_TOKENS_LIMIT}): use blocks or clusters"
        )
