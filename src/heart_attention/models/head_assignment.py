"""Which rank computes which head: in order as diffusers does it, or by what heads cost.

Sparse heads cost what their masks keep, so that ranks with dense heads hold up the others. Where costs are known
from a calibration, `head_assignment="cost"` in the config evens them out; `balance` says what that gains.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ..errors import HeartError
from ..online import thresholds

Assignment = list[list[int]]  # the heads of each rank
Costs = Sequence[Sequence[float]]  # [L, H]


@functools.lru_cache(maxsize=1024)  # asked at every call of every layer
def assign(costs: tuple[float, ...] | None, heads: int, ranks: int) -> Assignment:
    """The heads of each rank: by cost where costs of a layer's heads are given, else in order."""
    return in_order(heads, ranks) if costs is None else by_cost(costs, ranks)


def in_order(heads: int, ranks: int) -> Assignment:
    """Heads in order, as evenly as can be: how diffusers shares them out."""
    most = -(-heads // max(ranks, 1))
    assignment = [list(range(r * most, min(heads, (r + 1) * most))) for r in range(ranks)]
    if not assignment or not all(assignment):
        raise HeartError(f"{heads} attention heads cannot be shared by {ranks} ranks; use another number.")
    return assignment


def by_cost(costs: Sequence[float], ranks: int) -> Assignment:
    """Share heads out so that all ranks have equally many and about equal cost.

    The dearest head goes to the rank with the least so far that still has room; then pairs of heads change
    places as long as that helps the dearest rank. Heads in order are the other start; the better end is taken.

    Args:
        costs: one number a head, e.g. the densities a calibration measured.
        ranks: how many devices share the heads.
    """
    plain = in_order(len(costs), ranks)
    starts = [_greedy(costs, [len(heads) for heads in plain]), plain]
    for assignment in starts:
        while _improve(costs, assignment):
            pass
    best = min(starts, key=lambda assignment: imbalance(costs, assignment))
    return [sorted(heads) for heads in best]


def _greedy(costs: Sequence[float], sizes: list[int]) -> Assignment:
    assignment: Assignment = [[] for _ in sizes]
    for head in sorted(range(len(costs)), key=lambda h: (-costs[h], h)):
        free = [r for r, size in enumerate(sizes) if len(assignment[r]) < size]
        assignment[min(free, key=lambda r: (_load(costs, assignment[r]), r))].append(head)
    return assignment


def _load(costs: Sequence[float], heads: list[int]) -> float:
    return float(sum(costs[h] for h in heads))


def _improve(costs: Sequence[float], assignment: Assignment) -> bool:
    """Swap the pair of heads that lowers the dearest rank's load most; False when none does."""
    loads = [_load(costs, heads) for heads in assignment]
    top = max(range(len(assignment)), key=loads.__getitem__)
    best, swap = loads[top] * (1 - 1e-12), None
    for r, heads in enumerate(assignment):
        for i, head in enumerate(assignment[top]):
            for j, other in enumerate(heads):
                change = costs[head] - costs[other]
                worst = max(loads[top] - change, loads[r] + change)
                if r != top and worst < best:
                    best, swap = worst, (i, r, j)
    if swap is None:
        return False
    i, r, j = swap
    assignment[top][i], assignment[r][j] = assignment[r][j], assignment[top][i]
    return True


def imbalance(costs: Sequence[float], assignment: Assignment) -> float:
    """The dearest rank's load over the mean: 1 is even; all others wait for that rank."""
    loads = [_load(costs, heads) for heads in assignment]
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def balance(costs: Costs, ranks: int) -> dict[str, float]:
    """The dearest rank's load over the mean (1 is even), with heads in order and assigned by cost.

    Ranks meet after every layer, so a layer's imbalance counts with that layer's cost; the worst layer is told too.
    """
    told: dict[str, float] = {}
    total = sum(sum(row) for row in costs)
    rules = {"order": lambda row: in_order(len(row), ranks), "cost": lambda row: by_cost(row, ranks)}
    for name, rule in rules.items():
        of_layers = [imbalance(row, rule(row)) for row in costs]
        mean = sum(x * sum(row) for x, row in zip(of_layers, costs)) / total if total else 1.0
        told |= {name: mean, f"{name}, worst layer": max(of_layers)}
    return told


def head_costs(calibration: Any) -> list[list[float]]:
    """What each head costs [L, H]: the share of dense that a calibration measured at the point it chose."""
    costs = thresholds.source(calibration).head_costs()
    if costs is None:
        raise HeartError(
            "heads can be assigned by cost only where a calibration measured their sparsity, and these thresholds bring "
            "no such table: give thresholds=Calibration.load(...) of a measured one, or head_assignment='order'"
        )
    return costs


def check_costs(costs: Costs, layers: int) -> list[tuple[float, ...]]:
    """The costs [L, H] as rows that can be looked up, if they are for so many layers."""
    if len(costs) != layers:
        raise HeartError(f"costs are for {len(costs)} layers but the transformer has {layers}; give [layers, heads].")
    return [tuple(row) for row in costs]
