"""Videos survive the disk; VMAF orders distortions as it should."""

import os
import time

import numpy as np
import pytest

from heart_attention import HeartError, files
from heart_attention.evaluation import video
from heart_attention.evaluation.metrics.vmaf import vmaf


def clip(noise: float) -> np.ndarray:
    random = np.random.default_rng(1)
    y, x = np.mgrid[0:64, 0:96]
    frames = [
        128 + 80 * np.sin((x + 3 * t) / 6.0)[..., None] * np.cos(y / 9.0)[..., None] * np.ones(3) for t in range(5)
    ]
    frames = np.stack(frames) + random.normal(scale=noise, size=(5, 64, 96, 3))
    return np.clip(frames, 0, 255).astype(np.uint8)


def test_lossless_is_bit_exact(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (4, 33, 47, 3), dtype=np.uint8)  # odd sizes too
    assert (video.read(video.write_lossless(tmp_path / "a.mkv", frames)) == frames).all()


def test_mp4_is_close_and_has_every_frame(tmp_path):
    frames = clip(0)
    back = video.read(video.write_mp4(tmp_path / "a.mp4", frames))
    assert back.shape == frames.shape
    assert np.abs(back.astype(int) - frames).mean() < 4
    assert not list(tmp_path.glob(".*"))


def test_vmaf_falls_with_noise():
    scores = [vmaf(clip(noise), clip(0)) for noise in (0, 8, 40)]
    assert scores[0] > 90 and scores[0] > scores[1] > scores[2]


def test_float_frames_and_bad_files(tmp_path):
    assert video.to_uint8(np.full((1, 2, 4, 4, 3), 0.5))[0, 0, 0, 0] == 128
    with pytest.raises(HeartError, match=r"\[T, H, W, 3\]"):
        video.to_uint8(np.zeros((2, 4, 4)))
    with pytest.raises(HeartError, match="there is no video"):
        video.read(tmp_path / "none.mp4")
    (tmp_path / "bad.mp4").write_bytes(b"not a video")
    with pytest.raises(HeartError, match="cannot be read|holds no frames"):
        video.read(tmp_path / "bad.mp4")


def test_a_video_of_too_many_frames_is_not_held(tmp_path, monkeypatch):
    path = video.write_lossless(tmp_path / "a.mkv", clip(0))
    monkeypatch.setattr(video, "LARGEST", 4 * 64 * 96 * 3)
    with pytest.raises(HeartError, match="more than 73728 bytes of frames"):
        video.read(path)
    os.truncate(path, 20 << 30)  # a hole: it takes no space, and ffmpeg minutes
    with pytest.raises(HeartError, match="bytes of frames"):
        video.read(path)


@pytest.mark.parametrize("name", ["x" * 5000, "\x1b[2J", "a\0b"])
def test_a_video_of_any_name_is_one_short_sentence(tmp_path, name):
    with pytest.raises(HeartError, match="there is no video") as caught:
        video.read(tmp_path / name)
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 300


def test_a_failing_encoder_leaves_nothing_behind(tmp_path, monkeypatch):
    import imageio_ffmpeg

    fake = tmp_path / "ffmpeg"
    lines = [
        "#!/bin/sh",
        "cat > /dev/null",
        "for last; do :; done",
        'echo half > "$last"',
        "echo No space left on device >&2",
        "exit 1",
    ]
    fake.write_text("\n".join(lines))
    fake.chmod(0o755)
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(fake))
    with pytest.raises(HeartError, match="No space left on device"):
        video.write_mp4(tmp_path / "o" / "a.mp4", clip(0))
    assert list((tmp_path / "o").iterdir()) == []


def test_a_video_with_too_few_frames_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "count_frames", lambda path: 3)
    with pytest.raises(HeartError, match="would hold 3 of 5 frames"):
        video.write_lossless(tmp_path / "a.mkv", clip(0))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_encoder_left_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_swept", set())
    with video._whole(tmp_path / "a.mkv") as left:
        left.write_bytes(b"half")
        old = left.rename(left.with_name(left.name.replace(".a.", ".b.")))  # as a process leaves it that is killed here
        left.write_bytes(b"whole")
    assert (tmp_path / "a.mkv").read_bytes() == b"whole" and old.suffix == ".mkv"
    os.utime(old, (time.time() - 2 * files.STALE,) * 2)
    monkeypatch.setattr(files, "_swept", set())
    video.write_animation(tmp_path / "c.gif", clip(0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mkv", "c.gif"]


def test_frames_are_counted(tmp_path):
    path = video.write_lossless(tmp_path / "a.mkv", clip(0))
    assert video.count_frames(path) == 5
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert video.count_frames(path) < 5
