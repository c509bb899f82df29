"""Exact tokens before the video moved behind it, and back, for models that have some on both sides.

Attention does not depend on the order of tokens once positions are in q and k, and masks know exact tokens in one
place. Dense attention still sees the model's own order, so that it is the model's own to the bit.
"""

from __future__ import annotations

from typing import Any

import torch

from ..online.call import CallContext, Handler


def attend(
    handler: Handler,
    call: CallContext,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dense: Any,
    front: int,
    video: int,
) -> torch.Tensor:
    """One call, q, k, v [B, H, N, D], whose first `front` tokens go behind the `video` tokens that follow them."""
    moved = [move(x, front, video) for x in (q, k, v)]

    def in_order(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        whole = all(x is y for x, y in zip(qkv, moved))
        own = (q, k, v) if whole else [move(x, video, front) for x in qkv]
        return move(dense(*own, **options), front, video)

    return move(handler.attend(call, moved[0], moved[1], moved[2], in_order), video, front)


def move(x: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """The first two stretches of tokens in each other's place, [B, H, N, D]."""
    a, b, rest = x.split((first, second, x.shape[2] - first - second), dim=2)
    return torch.cat((b, a, rest), dim=2)
