"""Measurements of studies as tasks: kept, resumed, the control beside the trained model, on a cluster too."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from ray_for_tests import local_cluster

from heart_attention.evaluation import cases, pipelines
from heart_attention.evaluation.studies import runner, tasks

PROMPTS = ["a red circle moves right on a blue background", "a green square moves up on a white background"]


def seen(pipe, text, prompt, factor):
    """A measure that takes no time and says what it was given."""
    return {"model": pipelines.name_of(pipe), "text": text, "value": prompt * factor}


def _tasks(settings='{"factor": 3}'):
    return [tasks.Measurement("seen", i, t, c, settings, "m") for i, t in enumerate(PROMPTS) for c in (False, True)]


def test_a_measurement_is_kept_and_not_made_twice(tiny_pipe, tmp_path):
    found = tasks.measured(_tasks(), tiny_pipe, {"seen": seen}, tmp_path)
    assert [(f["value"], f["text"]) for f in found.values()] == [
        (i * 3, t) for i, t in enumerate(PROMPTS) for _ in "tc"
    ]
    assert len(list((tmp_path / "records").iterdir())) == 4
    assert tasks.measured(_tasks(), tiny_pipe, {}, tmp_path) == found  # nothing left to measure
    with pytest.raises(KeyError):
        tasks.measured(_tasks('{"factor": 4}'), tiny_pipe, {}, tmp_path)


def test_the_control_has_random_weights(tiny_pipe, tmp_path):
    found = tasks.measured(_tasks(), tiny_pipe, {"seen": lambda pipe, *a, **k: _weight(pipe)}, tmp_path)
    trained, control = list(found.values())[:2]
    assert trained == _weight(tiny_pipe) and control != trained


def _weight(pipe):
    return {"weight": float(next(pipe.transformer.parameters()).detach().flatten()[0])}


class Small(torch.nn.Linear):
    """A model that can be made again from its config."""

    config, dtype = {}, torch.float32

    def __init__(self):
        super().__init__(1, 1)

    @classmethod
    def from_config(cls, config):
        return cls()


class Offloaded:
    """A pipeline whose models wait in main memory; it tells which transformer it was asked to offload."""

    _execution_device, _all_hooks, config = (
        torch.device("meta"),
        ["a hook"],
        SimpleNamespace(_name_or_path="owner/name"),
    )

    def __init__(self, transformer, seen):
        self.transformer, self.seen = transformer, seen

    def register_modules(self, transformer):
        self.transformer = transformer

    def enable_model_cpu_offload(self, device):
        self.seen.append((self.transformer, device.type))


def test_the_control_of_an_offloaded_model_is_offloaded_too():
    trained, seen = Small(), []
    with tasks.random_weights(Offloaded(trained, seen)) as control:
        assert control.transformer is not trained and seen == [(control.transformer, "meta")]
    assert seen[-1] == (trained, "meta") and trained.weight.device.type == "cpu"


def test_a_damaged_record_is_measured_again(tiny_pipe, tmp_path):
    before = tasks.measured(_tasks(), tiny_pipe, {"seen": seen}, tmp_path)
    next((tmp_path / "records").iterdir()).write_text('{"value": ')
    assert tasks.measured(_tasks(), tiny_pipe, {"seen": seen}, tmp_path) == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_studies_on_two_ray_workers_equal_the_local_ones(tiny_pipe, small_call, tmp_path):
    pytest.importorskip("ray")
    call, wanted = {**small_call, "num_inference_steps": 4}, ["drift", "frequency"]
    local = runner.run(wanted, tiny_pipe, True, call, PROMPTS, tmp_path / "local")
    cluster = cases.Cluster("auto", functools.partial(pipelines.load, "tiny", device="cpu"), 2)
    with local_cluster():
        spread = runner.run(wanted, tiny_pipe, True, call, PROMPTS, tmp_path / "ray", cluster=cluster)
    assert json.dumps(spread) == json.dumps(local)
