"""LiteAttention: tiles that attention itself found skippable are not computed again in this generation.

There is no prediction: while a call computes a tile it sees whether the tile's largest logit lies so far below the
running maximum that the tile may be left out from the next call on. Sets of tiles only shrink, one for each layer,
branch and head, until the generation ends. This is the rule of the versions after 0.2.0 (every skippable tile goes, the
direction of the visit alternates, rows past the end are ignored). Written from its rules in words; the original's own
part has the licence MIT, its FlashAttention part BSD-3-Clause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import HeartError
from ..kernels import Visit, choose, run
from ..masks import BlockMask, Text, pack_bits, unpack_bits
from .base import Backbone, Key, Shape, State, Thresholds, check_positive, check_qk, read_heads, read_thresholds
from .blocks import Covered, covered

Place = tuple[int, int]  # batch item, head of the model
TILES = ((64, (192, 192)), (96, (192, 144)), (128, (128, 176)), (192, (128, 112)))  # by head size, for 2-byte types
LARGE_TILE = (128, 80)


class LiteState(State):
    """The tiles still computed, and how often each head was judged."""

    def __init__(self) -> None:
        self.alive: dict[Place, Tensor] = {}  # one bit a tile: uint8 [Mq, ceil(Mk / 8)]
        self.calls: dict[Place, int] = {}
        self.protected: Tensor | None = None  # bool [Mk]

    def clear(self) -> None:
        """All tiles are computed again."""
        self.alive.clear()
        self.calls.clear()

    def forget(self, heads: Sequence[int]) -> None:
        """All tiles of these heads are computed again."""
        for place in [place for place in self.alive if place[1] in set(heads)]:
            del self.alive[place], self.calls[place]

    def nbytes(self) -> dict[str, int]:
        """Bytes of the sets."""
        return {"tiles": sum(one.nbytes for one in self.alive.values())}


@dataclass(frozen=True)
class Lite(Backbone):
    """LiteAttention. It needs a kernel that says what it saw of the tiles: `cpu` or `eager`.

    Args:
        threshold: a tile goes if its largest logit lies at least this far below the running maximum, in units of log2
            (−10 in the original). None takes it from the head's τ as log2(1 − τ), so that calibration can choose.
        tile_q, tile_k: tokens of a tile of queries and of keys; None is the original's choice for the head size.
        must: ranges (start, end) of key tokens whose tiles always stay; the prompt's always do.
    """

    threshold: float | None = None
    tile_q: int | None = None
    tile_k: int | None = None
    must: tuple[tuple[int, int], ...] = ()

    name: ClassVar[str] = "lite"
    rests: ClassVar[tuple[str, ...]] = ("drop",)  # a tile is skipped because it does not matter
    default_threshold: ClassVar[float] = 1 - 2.0**-10  # −10 in units of log2
    candidates: ClassVar[tuple[float, ...]] = tuple(1 - 2.0**-t for t in (1, 2, 3, 4, 6, 8, 10))

    def __post_init__(self) -> None:
        given = {"tile_q": self.tile_q, "tile_k": self.tile_k}
        check_positive("Lite", **{name: value for name, value in given.items() if value is not None})
        number = isinstance(self.threshold, int | float) and -math.inf < self.threshold < 0
        if self.threshold is not None and not number:
            raise HeartError(
                f"Lite got threshold={str(self.threshold)[:40]}: give a number below 0 in units of log2, or None"
            )
        if not isinstance(self.must, list | tuple) or not all(map(_is_range, self.must)):
            raise HeartError(f"Lite got must={str(self.must)[:60]}: give ranges (start, end) of tokens")
        object.__setattr__(self, "must", tuple((start, end) for start, end in self.must))

    def tile(self, dim: int) -> tuple[int, int]:
        """Tokens of a tile of queries and of keys at this head size."""
        usual = next((tile for limit, tile in TILES if dim <= limit), LARGE_TILE)
        return self.tile_q or usual[0], self.tile_k or usual[1]

    def log2_threshold(self, tau: float) -> float:
        """The bound on a tile's gain for a head with this τ."""
        return self.threshold if self.threshold is not None else math.log2(1 - tau) if tau < 1 else -math.inf

    @property
    def learns(self) -> bool:
        """It lives on what attention tells it."""
        return True

    @property
    def block_tokens(self) -> int:
        """Tokens of a tile, for token orders."""
        return self.tile_q or 128

    def prediction_work(self, shape: Shape) -> float:
        """None: the kernel judges tiles that it computes anyway."""
        return 0.0

    def new_state(self) -> LiteState:
        """All tiles, nothing judged."""
        return LiteState()

    def to_dict(self) -> dict[str, Any]:
        """Name and settings, for JSON."""
        return super().to_dict() | {"must": [list(one) for one in self.must]}

    @torch.no_grad()
    def predict(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Thresholds,
        state: LiteState | None = None,
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
    ) -> BlockMask:
        """The tiles that are still alive: all of them where nothing was learnt yet (see `Backbone.predict`)."""
        check_qk(q, k)
        tau, names = read_thresholds(thresholds, *q.shape[:2]), read_heads(heads, q.shape[1])
        tokens, tile = covered("Lite", q, k, text, order), self.tile(q.shape[-1])
        shape = tokens.blocks(tile)
        blocks = torch.ones(*q.shape[:2], *shape, dtype=torch.bool, device=q.device)
        if state is not None:
            state.protected = self._protected(tokens, tile[1], shape[1])
            for b, h in (tau < 1).nonzero().tolist():
                alive = state.alive.get(_place(key, b, names[h]))
                if alive is not None and alive.shape == (shape[0], -(-shape[1] // 8)):
                    blocks[b, h] = unpack_bits(alive, shape[1])
        return tokens.mask(blocks, tile)

    def visit(
        self,
        state: LiteState,
        mask: BlockMask,
        which: Tensor,
        *,
        heads: Sequence[int] | None = None,
        key: Key | None = None,
    ) -> Visit | None:
        """What tiles gain, in the direction in which each head's turn is; nothing if no head refreshes."""
        if not bool(which.any()):
            return None
        places = self._places(mask, heads, key)
        back = torch.tensor([[state.calls.get(place, 0) % 2 == 1 for place in row] for row in places])
        return Visit(back, torch.empty(mask.blocks.shape, dtype=torch.float32, device=mask.device))

    @torch.no_grad()
    def learn(
        self,
        state: LiteState,
        mask: BlockMask,
        gains: Tensor,
        which: Tensor,
        thresholds: Sequence[float],
        *,
        heads: Sequence[int] | None = None,
        key: Key | None = None,
    ) -> BlockMask:
        """The mask [B, H] without the tiles that the heads in `which`, bool [B, H], need no more."""
        places, blocks = self._places(mask, heads, key), mask.blocks.clone()
        for b, h in which.nonzero().tolist():
            skippable = gains[b, h] <= self.log2_threshold(thresholds[h])
            if state.protected is not None:
                skippable &= ~state.protected
            blocks[b, h] &= ~skippable
            place = places[b][h]
            state.alive[place], state.calls[place] = pack_bits(blocks[b, h]), state.calls.get(place, 0) + 1
        return mask.with_flags(blocks)

    @torch.no_grad()
    def predict_many(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Sequence[float],
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
        v: Tensor | None = None,
        **more: Any,
    ) -> tuple[list[BlockMask], BlockMask]:
        """What each threshold leaves after one call that judged all tiles, and the full mask; for calibration."""
        full = self.predict(q, k, 1.0, None, text, order=order)
        gains = torch.empty(full.blocks.shape, dtype=torch.float32, device=q.device)
        run(choose(full, q, visits=True).plan(full), q, k, k, visit=Visit(gains=gains))
        kept = self._protected(covered("Lite", q, k, text, order), full.block_shape[1], full.blocks.shape[3])
        bounds = [self.log2_threshold(float(tau)) if tau < 1 else -math.inf for tau in thresholds]
        return [full.with_flags((gains > bound) | kept) for bound in bounds], full

    def _places(self, mask: BlockMask, heads: Sequence[int] | None, key: Key | None) -> list[list[Place]]:
        """Under what the state keeps each batch item's heads."""
        names = read_heads(heads, mask.shape[1])
        return [[_place(key, b, name) for name in names] for b in range(mask.shape[0])]

    def _protected(self, tokens: Covered, tile: int, count: int) -> Tensor:
        """Key tiles that always stay, bool [Mk]: those of `must` and of the prompt."""
        kept = torch.zeros(tokens.n_k, dtype=torch.bool)
        for start, end in self.must:
            kept[start:end] = True
        if tokens.text is not None:
            kept[tokens.text.index("prompt", tokens.n_k)] = True
        kept = kept if tokens.order is None else kept[tokens.order.cpu()]
        return torch.nn.functional.pad(kept, (0, count * tile - len(kept))).view(count, tile).any(-1).to(tokens.device)


def _is_range(value: Any) -> bool:
    """Whether this is (start, end) with 0 ≤ start < end."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(x) is int for x in value):
        return False
    return 0 <= value[0] < value[1]


def _place(key: Key | None, b: int, head: int) -> Place:
    return (0 if key is None else key[2]) + b, head
