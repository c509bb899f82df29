"""The Ray executor's contract with Ray, by a stand-in; `test_ray_cluster.py` has a real cluster."""

from __future__ import annotations

import functools
import logging
import sys

import pytest
import torch
from models_for_tests import CALL, wan_pipe
from stand_ins import Ray

from heart_attention.backbones import XAttention
from heart_attention.calibration.workflow import calibrate
from heart_attention.errors import HeartError
from heart_attention.execution.ray import PATIENCE, RayExecutor

from .test_executor import DATA, Count, Counter

TASKS = [Count("an"), Count("p", "other"), Count("a", None), Count("b")]
EXPECTED = {"count-a": {3, 0}, "count-n": {2}, "count-p": {2}, "count-b": {1}}


@pytest.fixture
def ray(monkeypatch):
    cluster = Ray(cpus=2 * torch.get_num_threads())
    monkeypatch.setitem(sys.modules, "ray", cluster)
    return cluster


def found(executor, tasks=TASKS):
    records: dict[str, set] = {}
    with executor:
        for task, (name, value) in executor.do(tasks, DATA.__getitem__):
            assert name in task.names()
            records.setdefault(name, set()).add(value)
    return records


def test_every_task_is_done_once_by_as_many_workers_as_fit(ray):
    executor = RayExecutor("auto", Counter)
    assert executor.count == 2 and len(ray.started) == 2
    assert all(actor.resources == {"num_cpus": torch.get_num_threads()} for actor in ray.started)
    assert found(executor) == EXPECTED
    assert not ray.connected and not any(actor.alive for actor in ray.started)


def test_data_is_stored_once_for_a_key(ray):
    read = []
    with RayExecutor("auto", Counter) as executor:
        list(executor.do([Count("a"), Count("b"), Count("n")], lambda key: read.append(key) or DATA[key]))
    assert read == ["text"]


@pytest.mark.parametrize("lost", [1, PATIENCE])
def test_a_lost_workers_task_goes_to_another(ray, caplog, lost):
    executor = RayExecutor("auto", Counter, workers=1)
    ray.lose = lost
    with caplog.at_level(logging.WARNING):
        assert found(executor) == EXPECTED
    assert caplog.text.count("another takes over") == lost and len(ray.started) == 1 + lost


def test_a_task_that_loses_every_worker_is_given_up(ray):
    executor = RayExecutor("auto", Counter, workers=1)
    ray.lose = PATIENCE + 1
    with pytest.raises(HeartError, match=f"count-a lost {PATIENCE + 1} Ray workers in a row"):
        found(executor)


def test_a_failing_task_is_one_sentence(ray):
    with pytest.raises(HeartError, match="a Ray worker failed at count-a: 'nowhere'"):
        found(RayExecutor("auto", functools.partial(Absent)), [Count("a")])


class Absent(Counter):
    def run(self, task, data):
        raise KeyError("nowhere")


def test_without_a_cluster_auto_starts_one_and_an_address_is_refused(ray):
    ray.answers = ()
    RayExecutor("auto", Counter).close()
    assert ray.address is None
    with pytest.raises(HeartError, match=r"no Ray cluster answers at 'ray://head:10001' \(nobody there\)"):
        RayExecutor("ray://head:10001", Counter)


def test_a_connection_that_was_there_stays(ray):
    ray.init("auto")
    RayExecutor("auto", Counter).close()
    assert ray.connected


def test_workers_take_a_gpu_each(ray, monkeypatch):
    ray.total["GPU"] = 3.0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with RayExecutor("auto", Counter) as executor:
        assert executor.count == 3 and executor.resources == {"num_gpus": 1}


def test_ray_not_installed_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HeartError, match="Ray is not installed"):
        RayExecutor("auto", Counter)


# -- a calibration -----------------------------------------------------------------------------------------
def load():
    """Makes the pipeline on a worker."""
    return wan_pipe(layers=1)


def test_a_calibration_over_workers_gives_the_local_bytes(ray, tmp_path):
    settings = calibrate.Settings(
        XAttention(stride=4, block=8), ("a red ball",), CALL, method="probes", held_out=("blue sky",),
        contexts=2, held_out_contexts=1, dense_steps=2, rounds=1, candidates=(0.6, 0.9),
    )  # fmt: skip
    local = calibrate.run(load(), settings, tmp_path / "local")
    ray.lose = 1
    spread = calibrate.run(load(), settings, tmp_path / "ray", ray="auto", loader=load, workers=2)
    assert spread.to_bytes() == local.to_bytes() and len(ray.started) == 3


def test_ray_needs_a_loader(ray, tmp_path):
    settings = calibrate.Settings(XAttention(stride=4, block=8), ("a red ball",), CALL)
    with pytest.raises(HeartError, match="needs a loader"):
        calibrate.run(load(), settings, tmp_path, ray="auto")
