"""Tasks on a real local Ray cluster of two workers, one of which is killed in the middle."""

from __future__ import annotations

import functools
import logging
import os
import signal

import pytest
from killed_runs import settings
from models_for_tests import wan_pipe
from ray_for_tests import local_cluster

from heart_attention.calibration.workflow import calibrate, tasks
from heart_attention.errors import HeartError

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def load():
    """Makes the pipeline on a worker."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    return wan_pipe(layers=2)


@pytest.fixture(scope="module")
def cluster():
    with local_cluster():
        yield


def test_two_workers_one_killed_give_the_local_bytes(cluster, tmp_path, monkeypatch):
    from heart_attention.execution.ray import RayExecutor

    local = calibrate.run(load(), settings("probes"), tmp_path / "local")
    executors, replaced, killed = [], [], []
    original, replace = RayExecutor.__init__, RayExecutor._replace

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        executors.append(self)

    monkeypatch.setattr(RayExecutor, "__init__", remember)
    monkeypatch.setattr(RayExecutor, "_replace", lambda self, *a: replaced.append(1) or replace(self, *a))

    def kill_one(stage, done, total, left):
        if stage == "probes" and done >= 2 and not killed:
            killed.append(ray.get(executors[0].actors[0].process.remote()))
            os.kill(killed[0], signal.SIGKILL)

    spread = calibrate.run(
        load(), settings("probes"), tmp_path / "ray", ray="auto", loader=load, workers=2, progress=kill_one
    )
    assert len(executors[0].resources) == 1 and executors[0].count == 2
    assert killed and replaced
    assert spread.to_bytes() == local.to_bytes()


def test_a_failing_task_is_one_sentence(cluster, tmp_path):
    from heart_attention.execution.ray import RayExecutor

    executor = RayExecutor("auto", functools.partial(tasks.set_up, load, settings("probes").job()), workers=1)
    try:
        with pytest.raises(HeartError, match="a Ray worker failed at verify_p000_s001"):
            list(executor.do([tasks.Task("verify", 0, 1, choice=((0,),))], lambda _: b"no context"))
    finally:
        executor.close()


def test_a_task_that_kills_every_worker_is_given_up(cluster):
    from heart_attention.execution.ray import RayExecutor

    executor = RayExecutor("auto", functools.partial(os._exit, 1), workers=1)
    try:
        with pytest.raises(HeartError, match="lost 4 Ray workers in a row"):
            list(executor.do([tasks.Task("verify", 0, 1, choice=((0,),))], lambda _: b""))
    finally:
        executor.close()


def test_ray_needs_a_loader(cluster, tmp_path):
    with pytest.raises(HeartError, match="needs a loader"):
        calibrate.run(load(), settings("probes"), tmp_path, ray="auto")
