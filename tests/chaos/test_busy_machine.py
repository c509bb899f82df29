"""One seed on an idle and on a busy machine: no bit differs, and the same calls run dense."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import models_in_parallel as small
import pytest
import torch

import heart_attention as heart
from heart_attention.cli.main import SPIN
from heart_attention.models.attachment import attachment_of

HELPERS = Path(__file__).parents[1] / "helpers"


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that take whatever the machine gives them."""
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@pytest.mark.parametrize("force_sparse", [False, True])
def test_a_small_model_beside_a_busy_neighbour(force_sparse):
    def outputs():
        heart.enable(model := small.model(), small.config(force_sparse=force_sparse))
        found = small.generate(model)
        return found, [(row.layer, row.step, row.reason) for row in attachment_of(model).handler.recorder.rows]

    idle = outputs()
    with neighbours(1):
        busy = outputs()
    assert torch.equal(idle[0], busy[0]) and idle[1] == busy[1]


def one_seed() -> dict[str, dict]:
    """What a process of its own makes of one seed, on two threads that spin as the command line's do, by every method."""
    path = os.pathsep.join(filter(None, (str(HELPERS), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": SPIN, "PYTHONPATH": path}
    command = [sys.executable, str(HELPERS / "one_seed.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_seed_is_the_same_video_beside_busy_neighbours():
    """As many neighbours as the run has threads, so that no core is its own."""
    idle = one_seed()
    with neighbours(2):
        busy = one_seed()
    assert busy == idle
    assert all(row["dense"] < row["calls"] for name, row in idle.items() if "not forced" not in name), "all ran dense"
