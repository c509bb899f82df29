"""Compares methods in child processes that are killed (SIGKILL) at random moments, until one gets through.

`python killed_compare.py FOLDER SEED` prints one JSON line: how often it was killed, and which lossless videos and figures
differ from a run that was left alone.
"""

from __future__ import annotations

import hashlib
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

from heart_attention.evaluation import methods, pipelines, results, run, video  # noqa: E402

CALL = {
    "height": 64,
    "width": 64,
    "num_frames": 4,
    "num_inference_steps": 4,
    "guidance_scale": 4.0,
    "max_sequence_length": 64,
}


def compare(pipe, out: Path) -> None:
    made = [methods.build(name, pipe, "tiny", force_sparse=True, dense_steps=1) for name in ("dense", "xattention+tmr")]
    run.run(pipe, made, ["a red ball"], [0, 1], run.Setting("tiny", CALL, metrics=("psnr",)), out)


def digests(out: Path) -> dict[str, str]:
    """What must not depend on where a run was killed: the frames of the lossless videos, and the metric of every row."""
    # Frames, not files: a Matroska file has random numbers of its own in its head.
    found = {p.name: hashlib.sha256(video.read(p).tobytes()).hexdigest() for p in sorted(out.glob("videos/*.mkv"))}
    rows = results.load(out)["rows"]
    assert all(row["density"] < 1 for row in rows if row["method"] != "dense"), "nothing ran sparse"
    return found | {f"{r['method']} {r['seed']}": str(r.get("psnr")) for r in rows}


def main(folder: Path, seed: int) -> None:
    pipe, chance = pipelines.load("tiny", device="cpu"), random.Random(seed)
    began = time.monotonic()
    compare(pipe, folder / "alone")
    length, work, kills = time.monotonic() - began, folder / "killed", 0
    while True:
        child = os.fork()
        if child == 0:
            compare(pipe, work)
            os._exit(0)
        end = time.monotonic() + (chance.uniform(0.02, 0.3) * length if kills < 8 else 1e9)
        status = (0, 0)
        while status == (0, 0) and time.monotonic() < end:
            time.sleep(0.002)
            status = os.waitpid(child, os.WNOHANG)
        if status != (0, 0):
            assert os.waitstatus_to_exitcode(status[1]) == 0
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
    alone, killed = digests(folder / "alone"), digests(work)
    print(json.dumps({"kills": kills, "files": len(alone), "differ": [k for k in alone if killed.get(k) != alone[k]]}))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(Path(sys.argv[1]), int(sys.argv[2]))
