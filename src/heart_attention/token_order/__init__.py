"""Token orders: names for configs, permutations for kernels."""

from .head_orders import IN_RASTER, CallOrders, HeadOrders, orders_of, with_table
from .names import (
    RASTER,
    SHAPES,
    TILES,
    Grid,
    Order,
    candidates,
    for_heads,
    names_at,
    names_in,
    permutation,
    read,
    shape_of,
)
from .tiles import tile_order, tile_order_of

__all__ = [
    "IN_RASTER",
    "RASTER",
    "SHAPES",
    "TILES",
    "CallOrders",
    "Grid",
    "HeadOrders",
    "Order",
    "candidates",
    "for_heads",
    "names_at",
    "names_in",
    "orders_of",
    "permutation",
    "read",
    "shape_of",
    "tile_order",
    "tile_order_of",
    "with_table",
]
