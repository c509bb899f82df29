"""Videos in and out of files: mp4, GIF or WebP to look at, lossless FFV1 to measure; frames are uint8 [T, H, W, 3]."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from pathlib import Path

import numpy as np

from ..errors import HeartError, named, printable
from ..files import sweep, temporary_name

LARGEST = 4 << 30  # bytes of a video's frames
SUFFIXES = (".mp4", ".gif", ".webp")  # of videos to look at


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


def check_suffix(path: str | os.PathLike) -> Path:
    """The path, if its ending is one that `write` knows and it can lie where it is meant to."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise HeartError(f"a video cannot be written to {str(path)!r}: give a name that ends in {', '.join(SUFFIXES)}")
    there = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if Path(path).is_dir() or not there.is_dir():
        taken = "it is a folder" if Path(path).is_dir() else f"{str(there)!r} is a file"
        raise HeartError(f"a video cannot be written to {str(path)!r}: {taken}, give another name")
    if not os.access(there, os.W_OK):
        raise HeartError(
            f"no video can be written to {str(path)!r}: {str(there)!r} may not be written to, name another folder"
        )
    return Path(path)


def write(path: str | os.PathLike, frames, fps: int = 8) -> Path:
    """Write a video to look at; the ending (.mp4, .gif, .webp) says how."""
    path = check_suffix(path)
    return write_mp4(path, frames, fps) if path.suffix.lower() == ".mp4" else write_animation(path, frames, fps)


def write_mp4(path: str | os.PathLike, frames, fps: int = 8, crf: int = 16) -> Path:
    """Write an H.264 mp4 that every browser plays (odd sizes lose their last row or column)."""
    frames = to_uint8(frames)
    frames = frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]
    codec = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", str(crf), "-preset", "medium", "-movflags", "+faststart"]
    return _write(Path(path), frames, fps, codec)


def write_lossless(path: str | os.PathLike, frames, fps: int = 8) -> Path:
    """Write FFV1 in RGB (`.mkv`): what is read back equals what was written, bit for bit."""
    return _write(Path(path), to_uint8(frames), fps, ["-c:v", "ffv1", "-pix_fmt", "gbrp"])


def write_animation(path: str | os.PathLike, frames, fps: int = 8) -> Path:
    """Write an animated GIF or WebP that plays for ever."""
    from PIL import Image

    images = [Image.fromarray(frame) for frame in to_uint8(frames)]
    options = {"quality": 85, "method": 4} if Path(path).suffix.lower() == ".webp" else {}
    with _whole(Path(path)) as temporary:
        images[0].save(
            temporary, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0, **options
        )
    return Path(path)


@contextlib.contextmanager
def _whole(path: Path):
    """A temporary name beside `path` that becomes it if all goes well and is removed if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    temporary = temporary_name(path, path.suffix)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, frames: np.ndarray, fps: int, codec: list[str]) -> Path:
    """Encode by ffmpeg; a failure, or a file with too few frames, leaves nothing behind and is told."""
    with _whole(path) as temporary:
        size = f"{frames.shape[2]}x{frames.shape[1]}"
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "-"]
        _ffmpeg(["-y", *source, "-an", *codec, str(temporary)], path, np.ascontiguousarray(frames).tobytes())
        if (count := count_frames(temporary)) != len(frames):
            raise HeartError(f"{path} would hold {count} of {len(frames)} frames: is the disk full?")
    return path


def _ffmpeg(arguments: list[str], path: Path, data: bytes = b"") -> bytes:
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *arguments]
    done = subprocess.run(command, input=data, capture_output=True)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise HeartError(f"ffmpeg failed on {path} ({reason[0][:200]}): check the disk's free space and the folder")
    return done.stdout


def count_frames(path: str | os.PathLike) -> int:
    """How many frames a video file really holds: each is decoded."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-f", "framemd5", "-"]
    done = subprocess.run(command, capture_output=True)
    return sum(not line.startswith(b"#") for line in done.stdout.splitlines() if line.strip())


def read(path: str | os.PathLike) -> np.ndarray:
    """All frames of a video file as uint8 [T, H, W, 3]."""
    import imageio_ffmpeg

    if not os.path.isfile(path):
        raise HeartError(f"there is no video {named(path)!r}: check the path")
    if os.path.getsize(path) > LARGEST:
        raise _too_large(path)
    try:
        reader = imageio_ffmpeg.read_frames(str(path), pix_fmt="rgb24", output_params=["-fps_mode", "passthrough"])
        meta = next(reader)
        width, height = meta["size"]
        most = LARGEST // (3 * height * width)
        frames = [
            np.frombuffer(data, np.uint8).reshape(height, width, 3) for data in itertools.islice(reader, most + 1)
        ]
    except (OSError, StopIteration, ValueError, RuntimeError) as error:
        reason = printable((str(error).strip().splitlines() or ["no message"])[-1])[:100]
        raise HeartError(
            f"{named(path)} cannot be read as a video ({reason}): it is damaged or of another kind"
        ) from None
    if len(frames) > most:
        raise _too_large(path)
    if not frames:
        raise HeartError(f"{named(path)} holds no frames: it is damaged or of another kind")
    return np.stack(frames)


def _too_large(path: str | os.PathLike) -> HeartError:
    return HeartError(f"{named(path)} holds more than {LARGEST} bytes of frames: give a shorter video")


def strip(videos: list[tuple[str, np.ndarray]], path: str | os.PathLike, columns: int = 6, height: int = 120) -> Path:
    """The qualitative figure as a PNG: a row a method, `columns` frames from first to last, names at the left."""
    from PIL import Image, ImageDraw, ImageFont

    count, h, w = videos[0][1].shape[:3]
    picks = sorted({round(i * (count - 1) / max(columns - 1, 1)) for i in range(min(columns, count))})
    scale = max(1, round(height / h)) if h <= height else height / h
    tile = (max(1, round(w * scale)), max(1, round(h * scale)))
    smooth = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS
    font = ImageFont.load_default(size=14)
    left = 12 + max(round(font.getlength(name)) for name, _ in videos)
    picture = Image.new("RGB", (left + len(picks) * (tile[0] + 4), 22 + len(videos) * (tile[1] + 4)), "white")
    draw = ImageDraw.Draw(picture)
    for j, frame in enumerate(picks):
        draw.text((left + j * (tile[0] + 4), 2), f"frame {frame}", fill="black", font=font)
    for i, (name, frames) in enumerate(videos):
        top = 22 + i * (tile[1] + 4)
        draw.text((4, top + tile[1] // 2 - 8), name, fill="black", font=font)
        for j, frame in enumerate(picks):
            image = Image.fromarray(frames[frame]).resize(tile, smooth)
            picture.paste(image, (left + j * (tile[0] + 4), top))
    with _whole(Path(path)) as temporary:
        picture.save(temporary)
    return Path(path)
