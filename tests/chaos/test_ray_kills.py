"""Workers of a real Ray cluster killed again and again: the calibration is the local one to the byte."""

from __future__ import annotations

import logging
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from killed_runs import settings
from models_for_tests import wan_pipe

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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["RAY_worker_niceness"] = "0"  # else workers starve on a machine that has other work
    here = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(here / "tests" / "helpers"), str(here), os.environ.get("PYTHONPATH"))))
    ray.init(
        num_cpus=2, num_gpus=0, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    yield
    ray.shutdown()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("method", ["probes", "joint"])
def test_killed_workers_leave_no_trace(cluster, tmp_path, monkeypatch, method):
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
    print(f"SIGKILLs: {len(killed)}")
    assert len(killed) >= 3 and spread.to_bytes() == local
    assert not list((tmp_path / "ray").rglob("*.tmp"))
