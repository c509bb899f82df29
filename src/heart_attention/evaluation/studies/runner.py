"""Runs the studies that are wanted, sharing what they can, in one folder: measurements first, then what they show."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import run as comparisons
from ..cases import Cluster
from . import adjacent, common, drift, frequency, interactions, iou, response, timesteps
from .tasks import Measurement, measured

# What is measured: the function, and what it is asked of the trained model or the control.
MEASURES: dict[str, Any] = {m.__name__.rpartition(".")[2]: m for m in (adjacent, response, frequency, interactions)}


@dataclass(frozen=True)
class Study:
    """What a study is made of: the measurements' kind, and what turns those of both sides into a finding."""

    kind: str
    finding: Callable[[list[dict], list[dict] | None, Path, int], dict]


def _of_tables(study: Callable[..., dict]) -> Callable[[list[dict], list[dict] | None, Path, int], dict]:
    """A study that reads tables of neighbouring steps."""

    def finding(trained: list[dict], control: list[dict] | None, out: Path, seed: int) -> dict:
        tables = (None if side is None else adjacent.Table.from_dicts(side) for side in (trained, control))
        return study(*tables, out, seed)

    return finding


STUDIES = {
    "iou": Study("adjacent", _of_tables(iou.run)),
    "drift": Study("adjacent", _of_tables(drift.run)),
    "timesteps": Study("adjacent", _of_tables(timesteps.run)),
    "response": Study("response", response.run),
    "frequency": Study("frequency", frequency.run),
    "interactions": Study("interactions", interactions.run),
}


def run(
    wanted: Sequence[str], pipe: Any, control: bool, call: dict, prompts: list[str], out: Path, seed: int = 0,
    cluster: Cluster | None = None,
) -> dict[str, dict]:  # fmt: skip
    """Name → finding; with `control`, each study is also made with random weights."""
    kinds = list(dict.fromkeys(STUDIES[name].kind for name in wanted))
    tasks = {(kind, side): _tasks(pipe, kind, side, call, prompts, seed) for kind in kinds for side in (False, control)}
    everything = [task for some in tasks.values() for task in some]
    found = measured(everything, pipe, {name: m.measure for name, m in MEASURES.items()}, out, cluster)

    def side(kind: str, of_control: bool) -> list[dict]:
        return [found[task] for task in tasks[kind, of_control]]

    return {
        name: STUDIES[name].finding(
            side(STUDIES[name].kind, False), side(STUDIES[name].kind, True) if control else None, out, seed
        )
        for name in wanted
    }


def _tasks(pipe: Any, kind: str, control: bool, call: dict, prompts: list[str], seed: int) -> list[Measurement]:
    """The measurements of one kind; the control gets fewer prompts."""
    settings = {name: config.to_dict() for name, config in common.configs(pipe).items()}
    model = json.dumps([comparisons.fingerprint(pipe), settings], sort_keys=True, default=str)
    planned = MEASURES[kind].plan(call, prompts, seed, control)
    return [
        Measurement(kind, prompt, prompts[prompt], control, json.dumps(more, sort_keys=True), model)
        for prompt, more in planned
    ]
