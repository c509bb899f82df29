"""Token orders: raster, tiles, and a shape of tiles for every head.

A head may look along rows, through time or around itself, and needs the fewest blocks when its blocks are shaped
alike. An order is "raster", "tiles" (the most compact tiles for all heads), or names for every head, [L][H] or
[transformers][L][H]: "raster" or a shape such as "4x16x1" (frames × rows × columns of one block). `heart tune-order`
finds them from dense generations.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError, shown
from ..masks import Text
from .tiles import tile_order, tile_order_of

log = logging.getLogger(__name__)

RASTER, TILES = "raster", "tiles"
Order = str | tuple
Grid = tuple[int, int, int]


# ---------------------------------------- names


def read(order: Any, depth: int = 0) -> Order:
    """An order as a config holds it: a name, or nested tuples of names; anything else is refused."""
    if isinstance(order, str) and order in (RASTER, TILES):
        return order
    if not isinstance(order, list | tuple) or not order or depth > 2:
        raise HeartError(f"order is {shown(order)}: it must be raster, tiles, or names for every head, [layers][heads]")
    rows = tuple(tuple(map(_read_name, row)) if _is_row(row) else read(row, depth + 1) for row in order)
    if any(isinstance(row, str) for row in rows) or len({_sizes(row) for row in rows}) > 1:
        raise HeartError("the order is ragged: give names for every head, [layers][heads], with rows of one length")
    return rows


def _is_row(row: Any) -> bool:
    return isinstance(row, list | tuple) and bool(row) and all(isinstance(name, str) for name in row)


def _read_name(name: str) -> str:
    if name != RASTER:
        shape_of(name)
    return name


def _sizes(order: Any) -> tuple[int, ...]:
    return (len(order), *_sizes(order[0])) if isinstance(order, tuple) else ()


def shape_of(name: str) -> Grid:
    """The tile that a name such as "4x16x1" stands for."""
    parts = name.split("x")
    if len(parts) != 3 or not all(p.isascii() and p.isdigit() and len(p) < 6 and 0 < int(p) < 1 << 16 for p in parts):
        raise HeartError(
            f"a head's order is {shown(name)}: give 'raster' or a tile such as '4x4x8', frames x rows x columns"
        )
    return int(parts[0]), int(parts[1]), int(parts[2])


def for_heads(order: Order, transformers: int, layers: int, heads: int, block: int | None) -> list[list[tuple]] | None:
    """Names of every head, [transformers][layers] rows, checked against a model; None if all heads share one order."""
    if isinstance(order, str):
        return None
    sizes = _sizes(order)
    if sizes not in ((layers, heads), (transformers, layers, heads)):
        raise HeartError(
            f"the order has shape {list(sizes)} but the model has {layers} layers of {heads} heads: "
            "run heart tune-order for this model"
        )
    every = order if len(sizes) == 3 else (order,) * transformers
    for name in [name for name in names_in(every) if name not in (RASTER, TILES)]:
        if block is not None and math.prod(shape_of(name)) != block:
            raise HeartError(
                f"a head's order {name!r} has tiles of {math.prod(shape_of(name))} tokens but the backbone's blocks have "
                f"{block}: run heart tune-order with this backbone"
            )
    return [list(table) for table in every]


def names_at(order: Order, transformer: int, layer: int, heads: int) -> tuple[str, ...]:
    """The names of one layer's heads."""
    if isinstance(order, str):
        return (order,) * heads
    table = order[transformer] if len(_sizes(order)) == 3 else order
    if layer >= len(table) or len(table[layer]) != heads:
        raise HeartError(
            f"the order has shape {list(_sizes(order))} and names no {heads} heads of layer {layer}: "
            "run heart tune-order for this model"
        )
    return table[layer]


def names_in(tables: Sequence[Sequence[Sequence[str]]]) -> tuple[str, ...]:
    """All names that heads have, sorted."""
    return tuple(sorted({name for table in tables for row in table for name in row}))


# ---------------------------------------- permutations


def permutation(name: str, grid: Grid, n: int, text: Text | None, block: int) -> Tensor | None:
    """All tokens but the unused text slots, the video in this order, then the prompt; None if the grid has other tokens.

    `name` is "raster", "tiles" or a tile's shape.
    """
    video = torch.arange(n) if text is None else text.video_index(n)
    if math.prod(grid) != len(video):
        log.warning("raster order: a grid of %s does not hold the %d video tokens", grid, len(video))
        return None
    prompt = torch.arange(0) if text is None else torch.arange(text.start, text.start + text.prompt)
    if name != RASTER:
        video = video[tile_order(grid, block) if name == TILES else tile_order_of(grid, shape_of(name))]
    return torch.cat([video, prompt])


# ---------------------------------------- candidates

# Tiles to try, as the shares of a block's logarithm that time, height and width take: a cube, a piece of one frame, and
# boxes that are thin along one axis. On the embedded model five of them do nearly as well as all that there are.
SHAPES = (
    (1 / 3, 1 / 3, 1 / 3),
    (0, 1 / 2, 1 / 2),
    (1 / 3, 2 / 3, 0),
    (2 / 3, 1 / 3, 0),
    (1 / 3, 1 / 6, 1 / 2),
    (1 / 3, 0, 2 / 3),
)


@functools.lru_cache(maxsize=32)
def candidates(grid: Grid, block: int) -> tuple[str, ...]:
    """Names of orders to try on this grid: the raster, and the tile nearest to each of SHAPES among those that fit."""
    divisors = [d for d in range(1, block + 1) if block % d == 0]
    known = [(t, h, block // (t * h)) for t in divisors for h in divisors if block % (t * h) == 0]
    known = [s for s in known if all(a <= n for a, n in zip(s, grid))]
    whole = math.log(block)

    def distance(shape: Grid, want: Sequence[float]) -> float:
        straddling = sum(n % a > 0 for a, n in zip(shape, grid))  # tiles cut at the edge share blocks with others
        return sum((math.log(a) - share * whole) ** 2 for a, share in zip(shape, want)) + 0.1 * straddling

    found = [min(known, key=lambda s: (distance(s, want), s)) for want in SHAPES if known]
    names = [f"{t}x{h}x{w}" for t, h, w in found if (t, h, w) != _raster_block(grid, block)]
    return (RASTER, *dict.fromkeys(names))


def _raster_block(grid: Grid, block: int) -> Grid:
    """The box that a block is in raster order, where it is one."""
    w = min(block, grid[2])
    h = min(max(block // w, 1), grid[1])
    return max(block // (w * h), 1), h, w
