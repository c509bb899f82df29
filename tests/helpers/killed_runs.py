"""Calibrates a small model in child processes that are killed (SIGKILL) at random moments, until one gets through.

Run by tests/chaos in a process of its own: `python killed_runs.py FOLDER METHOD SEED`. Prints one JSON line: how often
it was killed, how many records each attempt found and left, and whether the file equals that of a run left alone.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)

from models_for_tests import CALL, wan_pipe  # noqa: E402

from heart_attention.backbones import XAttention  # noqa: E402
from heart_attention.calibration.workflow import calibrate as workflow  # noqa: E402


def settings(method: str) -> workflow.Settings:
    return workflow.Settings(
        XAttention(stride=4, block=8), ("a red ball", "a cat"), CALL, method=method, held_out=("blue sky",),
        contexts=3, held_out_contexts=2, dense_steps=2, rounds=1, candidates=(0.6, 0.9, 0.95),
    )  # fmt: skip


def calibrate(pipe, method: str, work: Path) -> bytes:
    return workflow.run(pipe, settings(method), work).to_bytes()


def count(work: Path) -> int:
    return len(list(work.glob("records/*.json"))) + len(list(work.glob("trajectories/*.json")))


def killed(pipe, folder: Path, method: str, seed: int, most: int = 6) -> dict:
    """Calibrate alone, then in children of which up to `most` are killed: how often, records found and left, equal?"""
    chance = random.Random(seed)
    began = time.monotonic()
    alone = calibrate(pipe, method, folder / "alone")
    length, work, out = time.monotonic() - began, folder / "killed", folder / "killed.json"
    kills, seen, total = 0, [], count(folder / "alone")
    while not out.exists():
        found, child = count(work), os.fork()
        if child == 0:
            try:
                out.with_suffix(".part").write_bytes(calibrate(pipe, method, work))
                os.replace(out.with_suffix(".part"), out)
            finally:
                os._exit(0)  # whatever happened: the caller's own code must not go on here
        goal = found + chance.randint(1, 4) if kills < most else 1 << 30  # killed a moment after some more records
        while count(work) < goal:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                break
            time.sleep(0.001)
        else:
            time.sleep(chance.uniform(0, 0.5) * length / total)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
        seen.append((found, count(work)))
    return {"kills": kills, "records": seen, "equal": out.read_bytes() == alone, "total": total}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(killed(wan_pipe(layers=2), Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
