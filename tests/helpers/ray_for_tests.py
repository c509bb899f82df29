"""A real Ray cluster on this machine, for tests; its workers find the tests' helpers."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HELPERS = Path(__file__).parent


@contextlib.contextmanager
def local_cluster(threads: int = 1) -> Iterator[None]:
    """Two workers' worth of CPUs, `threads` each; this process has as many while it is up."""
    ray = pytest.importorskip("ray")
    before = torch.get_num_threads()
    path = os.pathsep.join(filter(None, (str(HELPERS), str(HELPERS.parents[1]), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # else workers starve on a machine that has other work
        torch.set_num_threads(threads)
        ray.init(
            num_cpus=2 * threads, num_gpus=0, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}},
        )  # fmt: skip
        try:
            yield
        finally:
            ray.shutdown()
            torch.set_num_threads(before)
