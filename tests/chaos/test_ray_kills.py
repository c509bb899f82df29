"""Workers of a real Ray cluster killed again and again: the calibration is the local one to the byte."""

from __future__ import annotations

import logging
import os
import random
import signal

import pytest
from killed_runs import settings
from models_for_tests import wan_pipe
from ray_for_tests import local_cluster

from heart_attention.calibration.workflow import calibrate

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KILLS = 4


def load():
    """Makes the pipeline on a worker."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    return wan_pipe(layers=2)


@pytest.fixture(scope="module")
def cluster():
    with local_cluster():
        yield


@pytest.mark.parametrize("method", ["probes", "joint"])
def test_killed_workers_leave_no_trace(cluster, tmp_path, monkeypatch, record_property, method):
    from heart_attention.execution.ray import RayExecutor

    local = calibrate.run(load(), settings(method), tmp_path / "local").to_bytes()
    executors, killed, chance = [], set(), random.Random(7)
    original = RayExecutor.__init__
    monkeypatch.setattr(
        RayExecutor, "__init__", lambda self, *a, **kw: original(self, *a, **kw) or executors.append(self)
    )

    def kill_one(stage, done, total, left):
        if executors and len(killed) < KILLS and done < total:
            process = ray.get(chance.choice(executors[-1].actors).process.remote())
            if process not in killed:
                killed.add(process)
                os.kill(process, signal.SIGKILL)

    spread = calibrate.run(
        load(), settings(method), tmp_path / "ray", ray="auto", loader=load, workers=2, progress=kill_one
    )
    record_property("SIGKILLs", len(killed))
    record_property("files compared after them", 1)
    assert len(killed) >= 3 and spread.to_bytes() == local
    assert not list((tmp_path / "ray").rglob("*.tmp"))
