"""Masks at one bit an entry, for storage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .base import Mask


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

    bits: Tensor  # uint8 [B, H, rows, ceil(columns / 8)]
    cols: int
    mask: Mask  # with an empty flag tensor, for everything that is not bits

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.bits.untyped_storage().nbytes() + self.mask.nbytes

    def without_bits(self) -> Packed:
        """All but what is kept, for masks whose map is made anew before it is used; it unpacks to nothing kept."""
        return replace(self, bits=self.bits.new_zeros(1).expand(self.bits.shape))

    def unpack(self) -> Any:
        """The mask that was packed."""
        return self.mask.with_flags(unpack_bits(self.bits, self.cols))


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor's numbers take."""
    return tensor.numel() * tensor.element_size()
