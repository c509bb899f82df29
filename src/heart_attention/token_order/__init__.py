"""Token orders: names for configs, permutations for kernels."""

from .names import (
    RASTER,
    SHAPES,
    TILES,
    Cache,
    Grid,
    Order,
    candidates,
    for_heads,
    names_at,
    names_in,
    permutation,
    read,
    shape_of,
    with_own,
)
from .tiles import tile_order, tile_order_of

__all__ = [
    "RASTER",
    "SHAPES",
    "TILES",
    "Cache",
    "Grid",
    "Order",
    "candidates",
    "for_heads",
    "names_at",
    "names_in",
    "permutation",
    "read",
    "shape_of",
    "tile_order",
    "tile_order_of",
    "with_own",
]
