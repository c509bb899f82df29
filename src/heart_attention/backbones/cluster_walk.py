"""An order of clusters in which neighbours lie close together, so that tokens sorted by it can be cut anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

POWER_STEPS = 4  # iterations towards the direction of largest spread


def walk(points: Tensor) -> Tensor:
    """The place of each point [..., C, D] in a walk through all of them, int64 [..., C].

    Points are halved along the direction of their largest spread, each half again along its own, down to single points.
    All heads go together and nothing is read back: a greedy walk would take C steps, one after the other.
    """
    count = points.shape[-2]
    size = 1 << max(count - 1, 0).bit_length()
    order = (torch.arange(size, device=points.device) % count).expand(*points.shape[:-2], size)  # copies fill it up
    x = _take(points.float(), order)
    part = size
    while part > 1:
        along = _along(x.unflatten(-2, (-1, part)))  # [..., size / part, part]
        first = torch.arange(0, size, part, device=points.device).unsqueeze(-1)
        place = (along.argsort(dim=-1, stable=True) + first).flatten(-2)
        order, x, part = order.gather(-1, place), _take(x, place), part // 2
    places = torch.arange(size, device=points.device).expand(order.shape)
    found = torch.full(points.shape[:-1], size, device=points.device).scatter_reduce_(-1, order, places, "amin")
    return found.argsort(dim=-1).argsort(dim=-1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def _along(x: Tensor) -> Tensor:
    """How far each point of x [..., P, D] lies along the direction in which they spread most, [..., P]."""
    off = x - x.mean(-2, keepdim=True)
    farthest = off.square().sum(-1).argmax(-1, keepdim=True)
    direction = _take(off, farthest)  # [..., 1, D]
    for _ in range(POWER_STEPS):
        direction = F.normalize((direction @ off.mT) @ off, dim=-1)
    return (off @ direction.mT).squeeze(-1)
