"""What a study measures on one prompt as a task for an executor; its numbers are kept, so that a stopped study goes on."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import HeartError
from ...execution.executor import Executor, LocalExecutor, Record, Worker
from ...files import read_json, write_json
from .. import pipelines
from ..cases import Cluster
from ..generation import device_of

Measure = Callable[..., dict[str, Any]]  # (pipe, text, prompt, **settings) -> plain JSON


@dataclass(frozen=True)
class Measurement:
    """One prompt of a study, on the trained model or on the control with random weights.

    Args:
        kind: which measure.
        prompt: number of the prompt `text`.
        control: with random weights.
        settings: everything else that the measure takes, as JSON.
        model: stands for the weights and settings of the model.
    """

    kind: str
    prompt: int
    text: str
    control: bool
    settings: str
    model: str

    data_key = None

    def names(self) -> list[str]:
        """The one record of this task."""
        key = hashlib.sha256(json.dumps([astuple(self), __version__]).encode()).hexdigest()[:12]
        return [f"{self.kind}-{'random' if self.control else 'trained'}-{self.prompt:03d}-{key}"]


class StudyWorker(Worker[Measurement]):
    """Measures on a pipeline."""

    def __init__(self, pipe: Any, measures: Mapping[str, Measure]) -> None:
        self.pipe, self.measures = pipe, measures

    def run(self, task: Measurement, data: bytes | None = None) -> Iterator[Record]:
        """One measurement."""
        with random_weights(self.pipe) if task.control else contextlib.nullcontext(self.pipe) as pipe:
            found = self.measures[task.kind](pipe, task.text, task.prompt, **json.loads(task.settings))
        yield task.names()[0], found


def set_up(loader: Callable[[], Any], measures: Mapping[str, Measure]) -> StudyWorker:
    """What a Ray worker calls."""
    return StudyWorker(loader(), measures)


@contextlib.contextmanager
def random_weights(pipe: Any, seed: int = 0) -> Iterator[Any]:
    """The same pipeline with random weights in its transformer; the trained one waits in main memory meanwhile.

    Where models are offloaded, the random one is too.
    """
    import torch

    if embedded := pipelines.control_of(pipe):
        yield pipelines.load(embedded, device="cpu")
        return
    trained, device, offloaded = pipe.transformer, device_of(pipe), bool(getattr(pipe, "_all_hooks", None))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = type(trained).from_config(trained.config).to(trained.dtype).eval()
    trained.to("cpu")
    try:
        control = copy.copy(pipe)
        control.register_modules(transformer=fresh)
        _to(control, fresh, device, offloaded)
        yield control
    finally:
        fresh.to("cpu")
        _to(pipe, trained, device, offloaded)


def _to(pipe: Any, transformer: Any, device: Any, offloaded: bool) -> None:
    """Let a pipeline compute on the device: its transformer goes there, or only when it is needed."""
    if offloaded:
        pipe.enable_model_cpu_offload(device=device)
    else:
        transformer.to(device)


def measured(
    tasks: Sequence[Measurement],
    pipe: Any,
    measures: Mapping[str, Measure],
    folder: Path,
    cluster: Cluster | None = None,
) -> dict[Measurement, dict[str, Any]]:
    """Every task's numbers, from the folder where they are there, else measured now."""
    found = {task: _stored(folder, task) for task in tasks}
    left = [task for task, value in found.items() if value is None]
    if left:
        with _executor(pipe, measures, cluster) as executor:
            for task, (name, value) in executor.do(left, lambda key: b""):
                write_json(_path(folder, name), value)
                found[task] = json.loads(json.dumps(value))
    return {task: value for task, value in found.items() if value is not None}


def _executor(pipe: Any, measures: Mapping[str, Measure], cluster: Cluster | None) -> Executor[Measurement]:
    if cluster is None:
        return LocalExecutor(StudyWorker(pipe, measures))
    from ...execution.ray import RayExecutor

    return RayExecutor(cluster.ray, functools.partial(set_up, cluster.loader, measures), cluster.workers)


def _path(folder: Path, name: str) -> Path:
    return folder / "records" / f"{name}.json"


def _stored(folder: Path, task: Measurement) -> dict[str, Any] | None:
    path = _path(folder, task.names()[0])
    try:
        value = read_json(path, limit=1 << 30) if path.is_file() else None
    except HeartError:
        return None  # damaged: measured anew
    return value if isinstance(value, dict) else None
