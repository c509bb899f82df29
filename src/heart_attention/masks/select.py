"""Top-p selection: which scores to keep so that they reach a share of their sum."""

from __future__ import annotations

import torch
from torch import Tensor


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
