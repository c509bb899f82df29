"""Times of generations whose videos exist already, measured again: only they depend on what else the machine does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...errors import HeartError
from ...execution.executor import Executor
from ...files import write_json
from .. import cases, timing
from ..cases import Case, Progress
from ..methods import DENSE
from ..run import Folder

# What of a row is a time, or tells of the machine while it was taken.
TIMES = (
    "attention_s", "total_s", "wall_s", "steps_s", "parts_s", "reference_s", "reference_steps_s", "spread", "waited",
    "device", "place",
)  # fmt: skip


def check_made(whole: Sequence[Case], folder: Folder) -> None:
    """Raise unless the records of all cases are there."""
    names = [name for case in whole for _, name in case.methods]
    missing = [name for name in names if folder.read(name) is None]
    if missing:
        raise HeartError(
            f"{len(missing)} of {len(names)} generations are missing in {str(folder.out)!r}, {missing[0]} for one: "
            "make them first, without --times-only"
        )


def retime(
    pipe: Any,
    whole: Sequence[Case],
    folder: Folder,
    progress: Progress | None = None,
    executor: Executor[Case] | None = None,
) -> int:
    """Take the times anew of what was never timed or cannot be trusted; how many generations were repeated."""
    left = [case for case in (_untimed(case, folder) for case in whole) if case.wanted]
    count = 0
    for _, (name, made) in (executor or cases.local(pipe, progress)).do(left, lambda key: b""):
        again = {key: made["row"][key] for key in TIMES if key in made["row"]}
        write_json(folder.times_path(name), again | {"timed": True})
        count += 1
    return count


def _untimed(case: Case, folder: Folder) -> Case:
    """The methods of a case that need their times; dense takes turns with them, for comparison."""
    wanted = {name for _, name in case.methods if not _trusted(folder.read(name))}
    left = tuple((m, name) for m, name in case.methods if m.name == DENSE or name in wanted)
    setting = dataclasses.replace(case.setting, metrics=(), timed=True)
    return dataclasses.replace(case, methods=left, wanted=frozenset(wanted), setting=setting)


def _trusted(row: dict | None) -> bool:
    return row is not None and row.get("timed", True) and not timing.verdict([row])
