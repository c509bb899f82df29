"""Per-head budgets for SGLang's sub-block router.

The router of SGLang 0.5.23 (`subblock_sparse/router.py`) keeps one share of key blocks for all heads of a call and says
that a budget for each head would gain more than any better estimator, but that nothing produces one. A calibration does:
`budgets` writes what it measured as groups of heads with one sparsity each, so that a layer is one `route(q[:, :, heads],
k[:, :, heads], sparsity, …)` for each group. SGLang has no option that reads such a file, so a patch of its backend does.
"""

from __future__ import annotations

import math
from typing import Any

from ..errors import HeartError
from ..models.head_assignment import head_costs

BLOCK = 64  # key tokens of a block
GRANULARITY = 8  # the router rounds a row's number of blocks up to multiples of this


def budgets(calibration: Any, tokens: int, block: int = BLOCK) -> list[list[dict[str, Any]]]:
    """Of each layer: groups of heads with equal numbers of key blocks, as {"sparsity", "blocks", "heads"}.

    Args:
        calibration: one whose file holds measured sparsities.
        tokens: how long sequences are.
        block: key tokens of a block.
    """
    if tokens < block:
        raise HeartError(f"{tokens} tokens are less than one block of {block}: give the length of a sequence")
    total = math.ceil(tokens / block)
    return [_groups(row, total) for row in head_costs(calibration)]


def _groups(densities: list[float], total: int) -> list[dict[str, Any]]:
    wanted = [_blocks(density, total) for density in densities]
    return [
        {
            "sparsity": round(1 - blocks / total, 6),
            "blocks": blocks,
            "heads": [head for head, own in enumerate(wanted) if own == blocks],
        }
        for blocks in sorted(set(wanted))
    ]


def _blocks(density: float, total: int) -> int:
    """Key blocks that a density stands for, rounded up as the router does."""
    blocks = math.ceil(round(density * total, 6))
    return max(1, min(total, GRANULARITY * math.ceil(blocks / GRANULARITY)))
