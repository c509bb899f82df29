"""Permutations of a raster of tokens such that every block of consecutive tokens is a compact tile."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..errors import HeartError

TILE_SHAPES = 10  # shapes that `tile_order` tries


def tile_order(grid: tuple[int, int, int], block: int) -> Tensor:
    """A permutation of a (T, H, W) raster of tokens such that each block of `block` tokens is a compact tile.

    Of all tile shapes t×h×w = block the one is taken whose blocks have the least spread: a cube where the
    grid divides (4×4×4 of 64, 4×4×8 of 128), else whatever straddles least. Whole tiles come first, so that
    they are whole blocks; the smaller ones at the edges follow, neighbours beside each other. Inside a tile, too,
    every few tokens are a compact box, so that XAttention's groups are alike.
    """
    if len(grid) != 3 or min(grid) < 1 or block < 1:
        raise HeartError(f"no tiles for grid {grid} and block {block}: give (frames, height, width) and a block ≥ 1")
    return _tile_order(tuple(int(n) for n in grid), int(block)).clone()  # type: ignore[arg-type]


@functools.lru_cache(maxsize=32)
def _tile_order(grid: tuple[int, int, int], block: int) -> Tensor:
    orders = [_order_by_tile(grid, tile) for tile in _tile_shapes(grid, block)]
    return min(orders, key=lambda order: _spread(order, grid, block))


def tile_order_of(grid: tuple[int, int, int], tile: tuple[int, int, int]) -> Tensor:
    """As `tile_order`, for tiles of this shape."""
    return _order_by_tile(tuple(int(n) for n in grid), tuple(int(n) for n in tile)).clone()  # type: ignore[arg-type]


def _tile_shapes(grid: tuple[int, int, int], block: int) -> list[tuple[int, int, int]]:
    """The few shapes of `block` tokens that are nearest to a cube, of those that fit the grid if any does."""
    divisors = [d for d in range(1, block + 1) if block % d == 0]
    shapes = [(t, h, block // (t * h)) for t in divisors for h in divisors if block % (t * h) == 0]
    shapes = [s for s in shapes if all(a <= n for a, n in zip(s, grid))] or shapes
    shapes.sort(key=lambda s: (sum(s), s))
    cut = dict.fromkeys(tuple(min(a, n) for a, n in zip(s, grid)) for s in shapes)
    return list(cut)[:TILE_SHAPES]  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def _order_by_tile(grid: tuple[int, int, int], tile: tuple[int, int, int]) -> Tensor:
    """Tokens sorted by (edge or whole, tile, place in the tile); tiles are walked there and back again."""
    place = torch.cartesian_prod(*(torch.arange(n) for n in grid)).view(-1, 3)  # [n, 3] in raster order
    size, counts = torch.tensor(tile), [-(-n // t) for n, t in zip(grid, tile)]
    index, inner = place // size, place % size
    edge = ((index + 1) * size > torch.tensor(grid)).any(-1)
    t, h, w = index.unbind(-1)
    h = torch.where(t % 2 == 1, counts[1] - 1 - h, h)
    w = torch.where((t * counts[1] + h) % 2 == 1, counts[2] - 1 - w, w)
    key = ((edge * counts[0] + t) * counts[1] + h) * counts[2] + w
    bits = (max(tile) - 1).bit_length()
    return torch.argsort((key << 3 * bits) + _inside(inner, bits), stable=True)  # [n]


def _inside(place: Tensor, bits: int) -> Tensor:
    """Where tokens at these places [n, 3] of a tile come in it: boxes of boxes of 2×2×2, in the order of a Gray code.

    Any 2^k tokens from a multiple of 2^k on are then a box with sides as equal as can be, and of these the p-th from
    the front and the p-th from the back lie side by side along one axis. XAttention estimates a block from just such
    pairs of groups' tokens; in a raster of the tile they would be far apart, and its estimate poor.
    """
    code = torch.zeros(len(place), dtype=torch.int64)
    for bit in reversed(range(bits)):
        for axis in range(3):
            code = 2 * code + (place[:, axis] >> bit & 1)
    for shift in (1, 2, 4, 8, 16, 32):  # from Gray code to position
        code = code ^ (code >> shift)
    return code


def _spread(order: Tensor, grid: tuple[int, int, int], block: int) -> float:
    """Mean squared distance of tokens from the middle of their block."""
    place = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in grid)).view(-1, 3)[order]
    owner = torch.arange(len(order)) // block
    blocks = int(owner[-1]) + 1
    count = torch.bincount(owner).unsqueeze(-1)
    middle = torch.zeros(blocks, 3, dtype=torch.float64).index_add_(0, owner, place) / count
    return float((place - middle[owner]).square().sum(-1).mean())
