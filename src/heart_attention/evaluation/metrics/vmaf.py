"""VMAF through the ffmpeg that imageio-ffmpeg brings along (its libvmaf has the default model built in)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from ...errors import HeartError
from .. import video as video_files
from .similarity import checked_pair


def vmaf_files(distorted: str | Path, reference: str | Path) -> float:
    """Mean VMAF of one video file against another of the same size."""
    import imageio_ffmpeg

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "vmaf.json"
        plain = "format=yuv420p,setpts=PTS-STARTPTS"
        graph = f"[0:v]{plain}[d];[1:v]{plain}[r];[d][r]libvmaf=log_fmt=json:log_path={log}"
        command = [
            imageio_ffmpeg.get_ffmpeg_exe(),
            "-v",
            "error",
            "-i",
            str(distorted),
            "-i",
            str(reference),
            "-lavfi",
            graph,
            "-f",
            "null",
            "-",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not log.is_file():
            reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise HeartError(f"ffmpeg could not compute VMAF ({reason[0]}): install imageio-ffmpeg ≥ 0.5 with libvmaf")
        return float(json.loads(log.read_text())["pooled_metrics"]["vmaf"]["mean"])


def vmaf(video, reference) -> float:
    """Mean VMAF of two videos in memory, uint8 [T, H, W, 3]."""
    video, reference = checked_pair(video, reference)
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            video_files.write_lossless(Path(folder) / f"{name}.mkv", frames)
            for name, frames in (("d", video), ("r", reference))
        ]
        return vmaf_files(*paths)
