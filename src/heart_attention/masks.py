"""What attention is to be computed: block and cluster masks, where text lies, top-p selection, token orders.

A mask knows its density by token pairs, can be cut into heads and batch items and put together again, and
can be stored at one bit an entry. Shapes: B batch, H heads, N tokens, M blocks, C clusters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .errors import HeartError

DENSE_TOKENS_LIMIT = 1 << 28  # entries of a token mask that `dense_tokens` agrees to write out
TILE_SHAPES = 10  # shapes that `tile_order` tries


@dataclass(frozen=True)
class Text:
    """Where joint text lies in a sequence: `prompt` valid tokens from `start`, then `unused` empty slots.

    All other tokens are video.
    """

    start: int
    prompt: int
    unused: int = 0

    def __post_init__(self) -> None:
        if min(self.start, self.prompt, self.unused) < 0:
            raise HeartError(f"{self} has a negative part: start, prompt and unused count tokens from 0 up")

    @property
    def end(self) -> int:
        """The first token after the text."""
        return self.start + self.prompt + self.unused

    def check(self, n: int) -> None:
        """Raise unless the text lies inside a sequence of `n` tokens that also holds video."""
        if self.end > n or self.video_count(n) < 1:
            raise HeartError(f"{self} does not leave any video in {n} tokens: give the sequence that holds both")

    def video_count(self, n: int) -> int:
        """How many of `n` tokens are video."""
        return n - self.prompt - self.unused

    def video_index(self, n: int, device: Any = None) -> Tensor:
        """Indices of the video tokens among `n`, ascending."""
        before = torch.arange(self.start, device=device)
        return torch.cat([before, torch.arange(self.end, n, device=device)])  # [video]


def top_p(
    scores: Tensor,
    thresholds: Tensor | float,
    strict: bool,
    dtype: torch.dtype = torch.float64,
    total: float | None = None,
    at_least: int = 1,
) -> Tensor:
    """Keep, per row of `scores` [..., M], the largest entries until they reach the share τ; bool [..., M].

    Sorted descending, ties by lowest index, a position stays iff the sum of all before it is below
    `τ · total` (`strict`, XAttention) or not above it (SVG2). `thresholds` [...] holds τ per row, `total` is
    what τ is a share of (None: the row's own sum), and the first `at_least` positions always stay. A row
    with NaN is kept whole: nothing can be said about it, and dense attention would see all of it.
    """
    values, places = torch.sort(scores, dim=-1, descending=True, stable=True)
    values = values.to(dtype)  # after sorting, which is quicker in the scores' own type
    before = torch.nn.functional.pad(values.cumsum(-1)[..., :-1], (1, 0))  # [..., M] sum of what comes earlier
    tau = torch.as_tensor(thresholds, dtype=dtype, device=scores.device)
    need = (tau * (values.sum(-1) if total is None else total)).unsqueeze(-1)  # [..., 1]
    enough = before >= need if strict else before > need
    enough[..., :at_least] = False
    return torch.empty_like(enough).scatter_(-1, places, ~enough)


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

    bits: Tensor  # uint8 [B, H, rows, ceil(cols / 8)]
    cols: int
    mask: Any  # the mask with an empty flag tensor, for everything that is not bits

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return _nbytes(self.bits) + self.mask.nbytes

    def unpack(self) -> BlockMask | ClusterMask:
        """The mask that was packed."""
        return self.mask._with_flags(unpack_bits(self.bits, self.cols))


class _Mask:
    """What block and cluster masks share: per-head tensors named in `_per_head`, of which the first are flags."""

    _per_head: tuple[str, ...] = ()

    def _flags(self) -> Tensor:
        return getattr(self, self._per_head[0])

    def _with_flags(self, flags: Tensor) -> Any:
        return replace(self, **{self._per_head[0]: flags})  # type: ignore[type-var]

    def _map(self, function: Any) -> Any:
        """The mask with `function` applied to every per-head tensor [B, H, ...]."""
        return replace(self, **{name: function(getattr(self, name)) for name in self._per_head})  # type: ignore

    @property
    def shape(self) -> tuple[int, int]:
        """(B, H)."""
        return tuple(self._flags().shape[:2])  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        """Where the mask lives."""
        return self._flags().device

    def item(self, b: int) -> Any:
        """The mask of batch item `b` alone, [1, H]."""
        return self._map(lambda x: x[b : b + 1])

    def heads(self, index: Sequence[int] | Tensor) -> Any:
        """The mask of the heads in `index` (indices, or bool [H]), in that order."""
        index = torch.as_tensor(index, device=self.device)
        return self._map(lambda x: x[:, index if index.dtype == torch.bool else index.long()])

    def put(self, index: Sequence[int] | Tensor, mask: Any) -> Any:
        """A new mask with the heads in `index` replaced by those of `mask`.

        `index` is bool [B, H], or head indices. `mask` holds either all [B, H] heads, or only the replaced
        ones: [B, len(index)] for head indices, [1, number of true entries] in row-major order for bool.
        """
        chosen, source = self._source(index, mask)
        b, h = chosen.nonzero(as_tuple=True)

        def merge(name: str) -> Tensor:
            old, new = getattr(self, name), getattr(mask, name)
            if old.shape[2:] != new.shape[2:]:
                raise HeartError(
                    f"cannot put {name} of shape {tuple(new.shape)} into {tuple(old.shape)}: "
                    "both masks must have the same blocks or clusters"
                )
            result = old.clone()
            result[b, h] = new.flatten(0, 1)[source].to(old.device, old.dtype)
            return result

        return replace(self, **{name: merge(name) for name in self._per_head})  # type: ignore[type-var]

    def _source(self, index: Sequence[int] | Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        """Which heads are replaced, bool [B, H], and by which row of `mask` flattened to [B·H]."""
        batch, heads = self.shape
        index = torch.as_tensor(index, device=self.device)
        rows = torch.arange(mask.shape[0] * mask.shape[1], device=self.device).view(mask.shape)
        if index.dtype != torch.bool:
            chosen = torch.zeros(batch, heads, dtype=torch.bool, device=self.device)
            chosen[:, index.long()] = True
            if mask.shape == (batch, index.numel()):
                placed = torch.zeros(batch, heads, dtype=torch.long, device=self.device)
                placed[:, index.long()] = rows
                return chosen, placed[chosen]
        else:
            chosen = index.expand(batch, heads)
        if mask.shape == (batch, heads):
            return chosen, rows[chosen]
        if mask.shape == (1, int(chosen.sum())):
            return chosen, rows[0]
        raise HeartError(
            f"cannot put {int(chosen.sum())} heads from a mask of shape {tuple(mask.shape)} into one of "
            f"shape {(batch, heads)}: give all heads or exactly the replaced ones"
        )

    def to(self, device: Any) -> Any:
        """The mask on another device."""
        return self._map(lambda x: x.to(device))

    def packed(self) -> Packed:
        """The mask at one bit an entry, for storage."""
        flags = self._flags()
        return Packed(pack_bits(flags), flags.shape[-1], self._with_flags(flags.new_empty(0)))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(_nbytes(getattr(self, name)) for name in self._per_head)


@dataclass(frozen=True, eq=False)
class BlockMask(_Mask):
    """Which blocks of `block` × `block` tokens are computed.

    Args:
        blocks: bool [B, H, ceil(n_q/block), ceil(n_k/block)].
        block: tokens a block.
        n_q, n_k: tokens that the blocks cover.
        order: permutation of those tokens, of queries and keys alike: block row I holds the tokens
            `order[I*block:(I+1)*block]`. None is the order in which they come. Several permutations [S, n_q] need
            `order_of`.
        tail: that many further tokens attend only to themselves (unused text slots at the end).
        order_of: int8 [B, H], which of several orders each head takes.
    """

    blocks: Tensor
    block: int
    n_q: int
    n_k: int
    order: Tensor | None = None
    tail: int = 0
    order_of: Tensor | None = None

    @property
    def _per_head(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("blocks",) if self.order_of is None else ("blocks", "order_of")

    def __post_init__(self) -> None:
        if self.block < 1 or self.n_q < 1 or self.n_k < 1 or self.tail < 0:
            raise HeartError(
                f"a block mask of block {self.block}, {self.n_q} × {self.n_k} tokens and tail "
                f"{self.tail} cannot be: sizes are at least 1, the tail at least 0"
            )
        expected = (-(-self.n_q // self.block), -(-self.n_k // self.block))
        if self.blocks.numel() and (self.blocks.dim() != 4 or tuple(self.blocks.shape[2:]) != expected):
            raise HeartError(
                f"blocks of shape {tuple(self.blocks.shape)} do not fit {self.n_q} × {self.n_k} tokens in "
                f"blocks of {self.block}: give bool [B, H, {expected[0]}, {expected[1]}]"
            )
        if self.blocks.dtype != torch.bool:
            raise HeartError(f"blocks are {self.blocks.dtype}: give bool")
        if (self.order is not None or self.tail) and self.n_q != self.n_k:
            raise HeartError(f"a token order or a tail needs as many keys as queries, not {self.n_k} and {self.n_q}")
        several = () if self.order_of is None else (-1 if self.order is None else len(self.order),)
        if self.order is not None and tuple(self.order.shape) != (*several, self.n_q):
            raise HeartError(
                f"an order of shape {tuple(self.order.shape)} cannot permute {self.n_q} tokens: give [{self.n_q}], "
                f"or [S, {self.n_q}] with order_of"
            )
        if self.order_of is not None:
            self._check_order_of(several[0])

    def _check_order_of(self, orders: int) -> None:
        own = self.order_of
        assert own is not None
        if orders < 0 or own.dim() != 2 or (own.device.type == "cpu" and own.numel() and not _within(own, orders)):
            raise HeartError(
                f"order_of of shape {tuple(own.shape)} does not choose among {max(orders, 0)} orders: "
                "give a row of order for each head, [B, H]"
            )

    def orders(self) -> Tensor | None:
        """The order of all heads [n_q], that of each head [B, H, n_q], or None."""
        return self.order if self.order is None or self.order_of is None else self.order[self.order_of.long()]

    @classmethod
    def full(
        cls, batch: int, heads: int, n: int, block: int, order: Tensor | None = None, tail: int = 0, device: Any = None
    ) -> BlockMask:
        """The mask that keeps every block of `n` tokens."""
        m = -(-n // block)
        return cls(torch.ones(batch, heads, m, m, dtype=torch.bool, device=device), block, n, n, order, tail)

    def density(self) -> Tensor:
        """Kept share of all token pairs, float64 [B, H]; the unused tail counts neither as kept nor as all."""
        rows, cols = self._sizes(self.n_q), self._sizes(self.n_k)
        kept = torch.einsum("bhqk,q,k->bh", self.blocks.double(), rows, cols)
        return kept / (self.n_q * self.n_k)

    def _sizes(self, n: int) -> Tensor:
        """Tokens in each block, float64 [M]."""
        starts = torch.arange(0, n, self.block, device=self.device, dtype=torch.float64)
        return (n - starts).clamp(max=self.block)

    def dense_tokens(self) -> Tensor:
        """The mask token by token, bool [B, H, n_q + tail, n_k + tail]; for small sizes."""
        _refuse_large(self.shape, self.n_q + self.tail, self.n_k + self.tail)
        q = torch.arange(self.n_q, device=self.device) // self.block
        k = torch.arange(self.n_k, device=self.device) // self.block
        tokens = self.blocks[:, :, q][..., k]
        order = self.orders()
        if order is not None:
            every = torch.arange(self.n_q, device=self.device)
            places = torch.empty_like(order, dtype=torch.int64).scatter_(-1, order.long(), every.expand(order.shape))
            places = places.expand(*self.shape, self.n_q)  # of each token in the order of its head
            tokens = tokens.gather(2, places[..., None].expand(tokens.shape))
            tokens = tokens.gather(3, places[..., None, :].expand(tokens.shape))
        if self.tail:
            tokens = torch.nn.functional.pad(tokens, (0, self.tail, 0, self.tail))
            tokens[..., self.n_q :, self.n_k :] = True
        return tokens

    def to(self, device: Any) -> BlockMask:
        """The mask on another device."""
        moved = self._map(lambda x: x.to(device))
        return moved if self.order is None else replace(moved, order=self.order.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes held; the order is shared by all masks of a run and not counted."""
        return super().nbytes


@dataclass(frozen=True, eq=False)
class ClusterMask(_Mask):
    """Which pairs of clusters are computed: token i attends to j iff `map[q_labels[i], k_labels[j]]`.

    Args:
        map: bool [B, H, Cq, Ck].
        q_labels, k_labels: integer [B, H, N], the cluster of each query and key.
    """

    map: Tensor
    q_labels: Tensor
    k_labels: Tensor

    _per_head = ("map", "q_labels", "k_labels")

    def __post_init__(self) -> None:
        if self.map.dtype != torch.bool:
            raise HeartError(f"the map is {self.map.dtype}: give bool")
        if self.map.numel() and (self.map.dim() != 4 or self.q_labels.dim() != 3 or self.k_labels.dim() != 3):
            raise HeartError(
                f"a map of shape {tuple(self.map.shape)} and labels of shapes "
                f"{tuple(self.q_labels.shape)}, {tuple(self.k_labels.shape)}: give [B, H, Cq, Ck] and twice [B, H, N]"
            )
        if self.map.numel() and not self.map.shape[:2] == self.q_labels.shape[:2] == self.k_labels.shape[:2]:
            raise HeartError(
                f"a map for {tuple(self.map.shape[:2])} (batch, heads) but labels for "
                f"{tuple(self.q_labels.shape[:2])} and {tuple(self.k_labels.shape[:2])}: "
                "they must agree"
            )

    @property
    def n_q(self) -> int:
        """Queries."""
        return self.q_labels.shape[-1]

    @property
    def n_k(self) -> int:
        """Keys."""
        return self.k_labels.shape[-1]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Tokens in each cluster: int64 [B, H, Cq] and [B, H, Ck]."""
        return count_labels(self.q_labels, self.map.shape[2]), count_labels(self.k_labels, self.map.shape[3])

    def density(self) -> Tensor:
        """Kept share of all token pairs, float64 [B, H]; text clusters count as any other."""
        rows, cols = (sizes.double() for sizes in self.sizes())
        kept = torch.einsum("bhqk,bhq,bhk->bh", self.map.double(), rows, cols)
        return kept / (self.n_q * self.n_k)

    def dense_tokens(self) -> Tensor:
        """The mask token by token, bool [B, H, N, N]; for small sizes."""
        _refuse_large(self.shape, self.n_q, self.n_k)
        batch, heads = self.shape
        b = torch.arange(batch, device=self.device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=self.device).view(1, -1, 1, 1)
        return self.map[b, h, self.q_labels.long().unsqueeze(-1), self.k_labels.long().unsqueeze(-2)]


def _within(x: Tensor, count: int) -> bool:
    return 0 <= int(x.min()) and int(x.max()) < count


def count_labels(labels: Tensor, clusters: int) -> Tensor:
    """How many tokens carry each label: integer [..., N] -> int64 [..., C]."""
    counts = torch.zeros(*labels.shape[:-1], clusters, dtype=torch.int64, device=labels.device)
    ones = torch.ones(1, dtype=torch.int64, device=labels.device).expand(labels.shape)
    return counts.scatter_add_(-1, labels.long(), ones)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _refuse_large(shape: tuple[int, int], n_q: int, n_k: int) -> None:
    if shape[0] * shape[1] * n_q * n_k > DENSE_TOKENS_LIMIT:
        raise HeartError(
            f"a token mask of {shape[0]}×{shape[1]}×{n_q}×{n_k} entries is too large to write out "
            f"(limit {DENSE_TOKENS_LIMIT}): use blocks or clusters"
        )


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
