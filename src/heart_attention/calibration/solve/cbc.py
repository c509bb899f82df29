"""The assignment by PuLP with CBC, as in the paper: a cross-check of the exact solver.

CBC's tolerances are absolute and PuLP's status is not to be trusted alone, so costs and budget are scaled,
the solution's status is checked, and the choice is verified and bounded by our own dual.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import HeartError
from .assignment import Problem, lagrangian, rounding, start


def by_cbc(problem: Problem, attempts: int = 5, seconds: int = 300) -> tuple[np.ndarray, float, bool]:
    """The ILP by CBC: costs scaled, the status checked, the choice verified and bounded by our own dual."""
    try:
        import pulp
    except ImportError:
        raise HeartError("the cross-check by CBC needs PuLP: pip install 'heart-attention[cbc]'") from None

    first, price = start(problem)
    upper = problem.total_cost(first)
    lower, slack = lagrangian(problem, price)[0], rounding(problem, price)
    if upper <= 0:
        return first, 0.0, True
    # One candidate that alone costs more than a known choice is never used; without those, costs fit CBC's
    # scale.
    usable = problem.cost <= upper
    ilp = pulp.LpProblem("heart", pulp.LpMinimize)
    pairs = np.argwhere(usable).tolist()
    x = {(i, k): pulp.LpVariable(f"x_{i}_{k}", cat="Binary") for i, k in pairs}
    ilp += pulp.lpSum(problem.cost[i, k] / upper * 1e4 * v for (i, k), v in x.items())
    for i in range(len(usable)):
        ilp += pulp.lpSum(x[i, k] for k in np.nonzero(usable[i])[0].tolist()) == 1
    # The row is scaled so that CBC's tolerance of 1e-9 there is below ours on the mean.
    ilp += pulp.lpSum(1e3 * problem.gain[i, k] * v for (i, k), v in x.items()) >= 1e3 * problem.need
    for _ in range(attempts):
        choice = _cbc_once(pulp, ilp, x, len(usable), seconds)
        if problem.feasible(choice):
            gap = max(problem.total_cost(choice) - lower, 0.0) + slack
            return choice, gap, False
        ilp += (
            pulp.lpSum(x[i, int(k)] for i, k in enumerate(choice)) <= len(choice) - 1
        )  # over the budget: not this one
    raise HeartError(f"CBC gave {attempts} choices that miss the budget by its tolerance: use the exact solver")


def _cbc_once(pulp: Any, ilp: Any, x: dict, heads: int, seconds: int) -> np.ndarray:
    options = ["primalTolerance 1e-9", "dualTolerance 1e-9", "integerTolerance 1e-9"]
    ilp.solve(pulp.PULP_CBC_CMD(msg=False, gapRel=0.0, gapAbs=0.0, timeLimit=seconds, options=options))
    # PuLP reports "Optimal" when CBC ran out of time, and leaves values behind when infeasible: sol_status
    # tells.
    if ilp.status != pulp.LpStatusOptimal or ilp.sol_status != pulp.LpSolutionOptimal:
        status = pulp.LpSolution.get(ilp.sol_status, ilp.sol_status)
        raise HeartError(f"CBC did not prove an optimum within {seconds} s (it says {status!r}): use the exact solver")
    choice = np.full(heads, -1, np.int64)
    for (i, k), v in x.items():
        if v.value() is not None and v.value() > 0.5:
            choice[i] = k
    if (choice < 0).any():
        raise HeartError("CBC left a head without a candidate: use the exact solver")
    return choice
