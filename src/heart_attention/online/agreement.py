"""What the ranks that share a layer's heads settle together, so that all of them make the same collective calls.

A rank sees only its own heads and may have a cost table of its own. Whether a layer runs dense is therefore asked
of all ranks at once, from sums over all heads; on one process nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .call import CallContext


def over_ranks(call: CallContext, device: torch.device, numbers: Sequence[float]) -> list[float]:
    """The sums of these numbers over the ranks of this layer (NCCL needs them where the model's tensors live)."""
    if call.all_reduce is None:
        return list(numbers)
    return call.all_reduce(torch.tensor(numbers, dtype=torch.float64, device=device)).tolist()


def agreed(call: CallContext, device: torch.device, reason: str) -> str:
    """One answer for all ranks: a layer that one rank wants dense is dense on all, since all wait for the slowest."""
    (refusals,) = over_ranks(call, device, [float(bool(reason))])
    return reason or ("not worth it: on another rank" if refusals else "")


def layer_shape(call: CallContext, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of q with the heads of all ranks, [B, H, N, D]."""
    batch, heads, n, dim = shape
    return batch, call.heads_total or heads, n, dim
