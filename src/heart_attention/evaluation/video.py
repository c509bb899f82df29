"""Videos in and out of files: mp4 to look at, lossless FFV1 to measure; frames are uint8 [T, H, W, 3]."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..errors import HeartError


def to_uint8(frames) -> np.ndarray:
    """Frames as a pipeline returns them (floats in 0..1, PIL images or uint8) as one array uint8 [T, H, W, 3]."""
    array = (
        np.stack([np.asarray(frame) for frame in frames]) if isinstance(frames, list | tuple) else np.asarray(frames)
    )
    if array.ndim == 5 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 4 or array.shape[-1] != 3:
        raise HeartError(f"a video must have shape [T, H, W, 3], not {list(array.shape)}: pass the frames of one video")
    if array.dtype == np.uint8:
        return array
    return np.rint(np.clip(np.nan_to_num(array), 0.0, 1.0) * 255.0).astype(np.uint8)


def _write(path: Path, frames: np.ndarray, fps: int, codec: str, pix_fmt: str, params: list[str]) -> Path:
    import imageio_ffmpeg

    frames = to_uint8(frames)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    writer = imageio_ffmpeg.write_frames(
        str(temporary), (frames.shape[2], frames.shape[1]), fps=fps, codec=codec, pix_fmt_in="rgb24",
        pix_fmt_out=pix_fmt, macro_block_size=1, quality=None, output_params=params, ffmpeg_log_level="error",
    )  # fmt: skip
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()
    os.replace(temporary, path)
    return path


def write_mp4(path: str | os.PathLike, frames, fps: int = 8, crf: int = 16) -> Path:
    """Write an H.264 mp4 that every browser plays (odd sizes lose their last row or column)."""
    frames = to_uint8(frames)
    frames = frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]
    params = ["-crf", str(crf), "-preset", "medium", "-movflags", "+faststart"]
    return _write(Path(path), frames, fps, "libx264", "yuv420p", params)


def write_lossless(path: str | os.PathLike, frames, fps: int = 8) -> Path:
    """Write FFV1 in RGB (`.mkv`): what is read back equals what was written, bit for bit."""
    return _write(Path(path), frames, fps, "ffv1", "gbrp", [])


def read(path: str | os.PathLike) -> np.ndarray:
    """All frames of a video file as uint8 [T, H, W, 3]."""
    import imageio_ffmpeg

    if not Path(path).is_file():
        raise HeartError(f"there is no video {str(path)!r}: check the path")
    try:
        reader = imageio_ffmpeg.read_frames(str(path), pix_fmt="rgb24", output_params=["-fps_mode", "passthrough"])
        meta = next(reader)
        width, height = meta["size"]
        frames = [np.frombuffer(data, np.uint8).reshape(height, width, 3) for data in reader]
    except (OSError, StopIteration, ValueError, RuntimeError) as error:
        raise HeartError(f"{path} cannot be read as a video ({error}): it is damaged or of another kind") from None
    if not frames:
        raise HeartError(f"{path} holds no frames: it is damaged or of another kind")
    return np.stack(frames)
