"""What many tests use: one thread for torch, a cache folder of their own, the embedded pipeline loaded once."""

import collections
import os

import pytest
from hypothesis import HealthCheck, settings
from thoroughness import examples

# A busy machine must not fail a test: no deadlines, and no complaint that examples come slowly.
settings.register_profile(
    "untimed", deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")

COUNTED = ("hostile inputs", "SIGKILLs", "files compared after them")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded


@pytest.fixture(scope="session")
def tiny_pipe():
    """The embedded model; tests must leave it as they found it."""
    from heart_attention.evaluation import pipelines

    return pipelines.load("tiny", device="cpu")


@pytest.fixture(scope="session")
def small_call():
    """A call of the embedded model that takes less than a second: 4 × 8 × 8 = 256 video tokens, 5 steps."""
    return {"height": 64, "width": 64, "num_frames": 4, "num_inference_steps": 5, "guidance_scale": 4.0,
            "max_sequence_length": 64}  # fmt: skip


def pytest_terminal_summary(terminalreporter):
    """How many of what a test counted (`record_property`) there were over all tests that passed, on all workers."""
    totals = collections.Counter()
    for report in terminalreporter.stats.get("passed", []):
        totals.update({name: value for name, value in report.user_properties if name in COUNTED})
    for name, total in totals.items():
        terminalreporter.write_line(f"{name}: {total:,}")
