"""Which groups of keys to keep for each group of queries: the best by score until they hold a share of all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from . import native
from .chooser import Op, Way


def torch_keep_share(scores: Tensor, sizes: Tensor, share: float, at_least: int) -> Tensor:
    """Bool [R, C] from scores fp32 [R, C] and sizes int64 [C], in plain PyTorch: the definition.

    Sorted descending, ties by lowest index, a position stays iff the keys before it are fewer than the share, or it is
    one of the first `at_least`. A row with NaN is kept whole.
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    ordered = sizes.double()[order]  # [R, C]
    before = ordered.cumsum(-1) - ordered
    keep = before < share * sizes.sum().double()
    keep[:, :at_least] = True
    keep |= scores.isnan().any(-1, keepdim=True)
    return torch.empty_like(keep).scatter_(-1, order, keep)


def _c_reasons(scores: Tensor | None = None, *more: object) -> list[str]:
    if scores is None:
        return native.reasons_not()
    return native.reasons_not(scores) + ([] if scores.dtype == torch.float32 else ["scores are not float32"])


keep_share = Op("selection by share", Way("c", native.keep_share, _c_reasons), Way("torch", torch_keep_share))
