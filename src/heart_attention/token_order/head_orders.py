"""The token orders of every head of a model, as permutations for one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..masks import BlockMask, Text
from .names import RASTER, Grid, Order, for_heads, names_in, permutation


@dataclass(frozen=True)
class CallOrders:
    """Permutations for the heads of one call.

    Args:
        table: None for raster, one permutation [n] for all heads, or several [S, n].
        of_head: with several, the row of `table` that each head takes.
    """

    table: Tensor | None = None
    of_head: tuple[int, ...] | None = None

    def group(self, head: int) -> int:
        """Heads with equal numbers share an order."""
        return 0 if self.of_head is None else self.of_head[head]

    def permutation(self, head: int) -> Tensor | None:
        """The order of one head, [n], or None for raster."""
        return self.table if self.table is None or self.of_head is None else self.table[self.of_head[head]]

    def mark(self, mask: Any, head: int) -> Any:
        """A mask made in the order of `head`, as one whose heads choose among all of the table."""
        if self.table is None or self.of_head is None:
            return mask
        return with_table(mask, self.table, self.of_head[head])


IN_RASTER = CallOrders()


def orders_of(
    names: Sequence[str], grid: Grid | None, n: int, text: Text | None, block: int | None, device: Any
) -> CallOrders:
    """The orders of one call's heads from their names; raster where the grid does not hold the video tokens."""
    every = tuple(sorted(set(names)))
    if every == (RASTER,) or grid is None or block is None:
        return IN_RASTER
    rows = [permutation(name, grid, n, text, block) for name in every]
    whole = [row for row in rows if row is not None]
    if len(whole) < len(rows):
        return IN_RASTER
    if len(every) == 1:
        return CallOrders(whole[0].to(device))
    return CallOrders(torch.stack(whole).to(device), tuple(every.index(name) for name in names))


def with_table(mask: BlockMask, table: Tensor, row: int) -> BlockMask:
    """A mask made in one row of `table`, as one whose heads choose among its rows."""
    order_of = torch.full(mask.shape, row, dtype=torch.int8, device=mask.device)
    return replace(mask, order=table, order_of=order_of)


class HeadOrders:
    """Orders of all heads of a model, checked once; permutations are made once per grid and text.

    Args:
        order: as a config holds it.
        transformers, layers, heads: of the model.
        block: tokens of a block; None for a backbone that has no use for an order.
    """

    def __init__(self, order: Order, transformers: int, layers: int, heads: int, block: int | None) -> None:
        self.order, self.block = order, block
        self._rows = for_heads(order, transformers, layers, heads, block)
        self._names = () if self._rows is None else names_in(self._rows)
        self._permutations: dict[tuple, Tensor | None] = {}

    def of_call(
        self,
        transformer: int,
        layer: int,
        heads: Sequence[int],
        grid: Grid | None,
        n: int,
        text: Text | None,
        device: Any,
    ) -> CallOrders:
        """The orders of these heads in a sequence of `n` tokens."""
        if self.order == RASTER or grid is None or self.block is None:
            return IN_RASTER
        given = (grid, n, text, device)
        if self._rows is None:
            return CallOrders(self._get((str(self.order),), *given))
        row = self._rows[transformer][layer]
        names = [row[h] for h in heads]
        if len(set(names)) == 1:
            return IN_RASTER if names[0] == RASTER else CallOrders(self._get((names[0],), *given))
        table = self._get(self._names, *given)  # one table serves all layers
        return IN_RASTER if table is None else CallOrders(table, tuple(self._names.index(name) for name in names))

    def _get(self, names: tuple[str, ...], grid: Grid, n: int, text: Text | None, device: Any) -> Tensor | None:
        """One order, [tokens], or several, [names, tokens]; None if the grid does not hold the video tokens."""
        key = (names, grid, n, text, device)
        if key not in self._permutations:
            assert self.block is not None
            rows = [permutation(name, grid, n, text, self.block) for name in names]
            whole = [row for row in rows if row is not None]
            table = None if len(whole) < len(rows) else whole[0] if len(names) == 1 else torch.stack(whole)
            self._permutations[key] = None if table is None else table.to(device)
        return self._permutations[key]
