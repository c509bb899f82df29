"""Methods at several budgets on prompts and seeds: videos, times and velocity errors, each on record by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...errors import HeartError
from ...files import write_json
from .. import cases, compare, results, tables
from ..cases import Cluster
from ..run import Folder, cases_of, run
from . import front, velocity
from .retime import check_made, retime

FILE = "frontier.json"


def frontier(
    pipe: Any,
    methods: Sequence[str],
    prompts: Sequence[str] | None = None,
    out: str | Path = "runs/frontier",
    *,
    timed: int | None = None,
    times_only: bool = False,
    velocity_prompts: int = 0,
    seeds: Sequence[int] = (0,),
    progress: Callable[[str, int], Any] | None = None,
    cluster: Cluster | None = None,
    **given: Any,
) -> dict[str, Any]:
    """The speed-quality front of methods, each at several budgets: `heart@0.2`, `heart@0.3`, `xattention@0.8`.

    Args:
        pipe, methods, prompts, out, seeds, progress, cluster: as in `compare`; so is `given` (call, metrics, calibrations …).
        timed: how many prompts have times measured, of all seeds; None: all. Quality is of all prompts.
        times_only: generate no video; measure times again that are missing or cannot be trusted, for those prompts.
        velocity_prompts: how many prompts have velocity errors measured, each at the price of one more generation.

    Returns:
        What `results.json` holds, with the front under "frontier" (in the folder: `frontier.json`).
    """
    plan = compare.planned(pipe, methods, prompts, **given)
    count = len(plan.prompts) if timed is None else timed
    if count < 0 or velocity_prompts < 0:
        raise HeartError(f"{min(count, velocity_prompts)} prompts cannot be timed or measured: give 0 or more")
    folder, seeds = Folder(out), list(dict.fromkeys(seeds))
    whole = cases_of(pipe, plan.methods, plan.prompts, seeds, plan.setting, warm=True)
    to_time = whole[: count * len(seeds)]
    quality = dataclasses.replace(plan.setting, timed=False)
    with cases.opened(cluster) as executor:
        if times_only:
            check_made(whole, folder)
            retime(pipe, to_time, folder, progress, executor)
        elif to_time:
            run(pipe, plan.methods, plan.prompts[:count], seeds, plan.setting, out, progress, executor=executor)
        told = progress if not to_time or times_only else None
        made = run(pipe, plan.methods, plan.prompts, seeds, quality, out, told, executor=executor)
    velocity.measure(pipe, whole[: velocity_prompts * len(seeds)], folder, progress, cluster)
    made = velocity.attached(made, whole, folder)
    return _written(made, out)


def _written(made: dict, out: str | Path) -> dict:
    results.save(made, out)
    tables.write_tables(made, out)
    found = tables.finite(front.front(made))
    write_json(Path(out) / FILE, found)
    return {**made, "frontier": found}
