"""Killed, starved of disk space, or run twice at once: what is on disk is whole, and the result is the same bytes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from heart_attention import files
from heart_attention.calibration.workflow import calibrate
from heart_attention.errors import HeartError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")]
HELPERS = Path(__file__).parents[1] / "helpers"
METHODS = ("probes", "isolated", "joint")


def told_by(script: str, *arguments: str) -> dict:
    path = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(HELPERS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, env=env, cwd=HELPERS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_killed_calibrations_end_in_the_same_bytes(tmp_path, record_property, method, seed):
    told = told_by("killed_runs.py", str(tmp_path), method, str(seed))
    record_property("SIGKILLs", told["kills"])
    record_property("files compared after them", 1)
    assert told["equal"] and told["kills"] >= 3, told
    assert not list(tmp_path.rglob("*.part"))


def test_killed_comparisons_end_in_the_same_videos(tmp_path, record_property):
    told = told_by("killed_compare.py", str(tmp_path), "13")
    record_property("SIGKILLs", told["kills"])
    record_property("files compared after them", told["files"])
    assert told["kills"] >= 5 and told["files"] == 8 and not told["differ"], told


@pytest.fixture(scope="module")
def small():
    """A small pipeline, and what a calibration left alone gives."""
    import killed_runs
    from models_for_tests import wan_pipe

    return wan_pipe(layers=2), killed_runs.settings("probes")


@pytest.mark.parametrize("after", [0, 1, 3, 7])
def test_full_disk_is_one_sentence_and_work_goes_on_later(small, tmp_path, monkeypatch, after):
    """The disk is full after some writes; with space again, the same file comes out."""
    pipe, settings = small
    alone = calibrate.run(pipe, settings, tmp_path / "alone").to_bytes()
    real, writes = os.fsync, []

    def full(handle):
        writes.append(1)
        if len(writes) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises((HeartError, OSError), match="No space left") as caught:
        calibrate.run(pipe, settings, tmp_path / "full")
    assert len(str(caught.value)) <= 400
    assert not list((tmp_path / "full").rglob("*.tmp"))
    monkeypatch.undo()
    assert calibrate.run(pipe, settings, tmp_path / "full").to_bytes() == alone


def test_two_processes_on_one_work_folder(small, tmp_path):
    """They take turns by the folder's lock; both end with the bytes of a run left alone."""
    pipe, settings = small
    alone = calibrate.run(pipe, settings, tmp_path / "alone").to_bytes()
    children = []
    for i in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                (tmp_path / f"out{i}").write_bytes(calibrate.run(pipe, settings, tmp_path / "shared").to_bytes())
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert [(tmp_path / f"out{i}").read_bytes() for i in range(2)] == [alone, alone]
