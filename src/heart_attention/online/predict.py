"""The only way from q, k and v to masks: for some heads or all, one threshold a head or a list of them to try."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backbones.base import Backbone, Grid, Key, Thresholds
from ..masks import Mask, Text
from ..token_order import IN_RASTER, CallOrders


def predict(
    backbone: Backbone,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    thresholds: Thresholds,
    state: Any = None,
    text: Text | None = None,
    *,
    orders: CallOrders = IN_RASTER,
    heads: Sequence[int] | None = None,
    key: Key | None = None,
    grid: Grid | None = None,
) -> Any:
    """The mask of all heads of q, k, v [B, H, N, D], as `Backbone.predict`, with an order for each head."""
    which = torch.ones(q.shape[:2], dtype=torch.bool)
    tau = torch.as_tensor(thresholds, dtype=torch.float64).expand(q.shape[1]).tolist()
    names = list(heads) if heads is not None else list(range(q.shape[1]))
    mask = predict_some(backbone, q, k, v, tau, which, state, text, orders=orders, heads=names, key=key, grid=grid)
    return mask.split_batch(q.shape[0])


def predict_some(
    backbone: Backbone,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    tau: Sequence[float],
    which: Tensor,
    state: Any,
    text: Text | None,
    *,
    orders: CallOrders,
    heads: Sequence[int],
    key: Key | None,
    grid: Grid | None = None,
) -> Any:
    """Masks of the heads in `which`, bool [B, H], as [1, n] in row-major order; None if there are none.

    `tau` and `heads` (the model's numbers) have one entry for each head of q. Whole stretches of heads are predicted
    together, so that q, k and v stay views.
    """
    layer, branch, first = key if key is not None else (0, "", 0)
    masks = []
    for b, row in enumerate(which.tolist()):
        groups = [1 + orders.group(h) if flag else 0 for h, flag in enumerate(row)]
        for start, stop in _stretches(groups):
            part = (slice(b, b + 1), slice(start, stop))
            more: dict[str, Any] = {"v": v[part]} if backbone.reads_values and v is not None else {}
            more |= _grid(backbone, grid)
            mask = backbone.predict(
                q[part],
                k[part],
                list(tau[start:stop]),
                state,
                text,
                order=orders.permutation(start),
                heads=list(heads[start:stop]),
                key=(layer, branch, first + b),
                **more,
            )
            masks.append(orders.mark(mask, start))
    return Mask.join(masks) if masks else None


def predict_many(
    backbone: Backbone,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    thresholds: Sequence[float],
    text: Text | None = None,
    *,
    orders: CallOrders = IN_RASTER,
    heads: Sequence[int] | None = None,
    key: Key | None = None,
    grid: Grid | None = None,
) -> tuple[list[Any], Any]:
    """Masks [1, H] of all heads for each threshold, and the full one; q, k, v [1, H, N, D], no history."""
    names = list(heads) if heads is not None else list(range(q.shape[1]))
    columns, places = [], []
    for group in sorted({orders.group(h) for h in range(q.shape[1])}):
        alike = [h for h in range(q.shape[1]) if orders.group(h) == group]
        whole = len(alike) == q.shape[1]
        parts = [x if whole or x is None else x[:, alike] for x in (q, k, v)]
        masks, full = backbone.predict_many(
            parts[0],
            parts[1],
            thresholds,
            text,
            order=orders.permutation(alike[0]),
            heads=[names[h] for h in alike],
            key=key,
            v=parts[2],
            **_grid(backbone, grid),
        )
        columns.append([orders.mark(mask, alike[0]) for mask in (*masks, full)])
        places += alike
    if len(columns) == 1:
        return columns[0][:-1], columns[0][-1]
    back = torch.tensor(places).argsort()
    joined = [Mask.join(list(column)).heads(back) for column in zip(*columns)]
    return joined[:-1], joined[-1]


def _grid(backbone: Backbone, grid: Grid | None) -> dict[str, Any]:
    """The grid, for a backbone that reads it."""
    return {"grid": grid} if backbone.reads_grid else {}


def _stretches(values: list[int]) -> list[tuple[int, int]]:
    """Stretches of equal entries other than 0, as (start, stop)."""
    edges = [i for i in range(len(values) + 1) if i in (0, len(values)) or values[i - 1] != values[i]]
    return [(start, stop) for start, stop in itertools.pairwise(edges) if values[start]]
