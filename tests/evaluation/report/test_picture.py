"""Pictures for a front page: an animation of the videos, and the plot."""

import json

import numpy as np
import pytest
from PIL import Image

from heart_attention import HeartError
from heart_attention.cli import main
from heart_attention.evaluation import video
from heart_attention.evaluation.report import picture


@pytest.fixture
def folder(tmp_path):
    rows = []
    for i, method in enumerate(("dense", "xattention", "xattention+joint")):
        frames = np.full((4, 32, 32, 3), 40 * i, np.uint8)
        frames[:, :, : 8 * (i + 1)] = 255
        video.write_lossless(tmp_path / f"{i}.mkv", frames)
        video.write_mp4(tmp_path / f"{i}.mp4", frames)
        rows.append({"method": method, "prompt": "p", "seed": 0, "attention_s": 3.0 - i, "total_s": 5.0, "density": 0.5,
                     "refresh_rate": 1.0, "psnr": 30.0 + i if i else None, "video": f"{i}.mp4",
                     "lossless": f"{i}.mkv"})  # fmt: skip
    whole = {"schema": "heart-results/1", "provenance": {}, "conventions": {"psnr": "usual"}, "rows": rows}
    (tmp_path / "results.json").write_text(json.dumps(whole))
    return tmp_path


@pytest.mark.parametrize("ending", ["gif", "webp"])
def test_the_animation_has_every_method_and_frame(folder, ending):
    made = Image.open(picture.animation(folder, folder / f"a.{ending}", width=64))
    assert made.n_frames >= 1 and made.size == (3 * 70 - 6, 64 + 24)


@pytest.mark.parametrize("told, used", [(16, 16), (None, 8), ("fast", 8)])
def test_the_animation_has_the_models_frame_rate(folder, told, used, monkeypatch):
    made = json.loads((folder / "results.json").read_text()) | {"provenance": {"fps": told}}
    (folder / "results.json").write_text(json.dumps(made))
    rates = []
    monkeypatch.setattr(picture.video, "write_animation", lambda out, frames, fps: rates.append(fps))
    picture.animation(folder, folder / "a.webp", width=32)
    assert rates == [used]


def test_what_ran_dense_all_the_time_is_no_point_of_the_plot(folder):
    made = json.loads((folder / "results.json").read_text())
    made["rows"][1]["dense_share"] = 1.0
    (folder / "results.json").write_text(json.dumps(made))
    text = picture.front(folder, folder / "p.svg").read_text()
    assert ">xattention<" not in text and ">xattention+joint<" in text


def test_the_plot_stands_alone(folder):
    text = picture.front(folder, folder / "p.svg").read_text()
    assert text.startswith("<svg xmlns=") and "<style>" in text and "xattention+joint" in text


def test_the_command_writes_both(folder, capsys):
    words = ["report", str(folder), "--animation", str(folder / "a.webp"), "--plot", str(folder / "p.svg")]
    assert main.main(words) == 0 and len(capsys.readouterr().out.split()) == 3


def test_other_endings_are_refused(folder):
    with pytest.raises(HeartError, match=r"\.gif or \.webp"):
        picture.animation(folder, folder / "a.png")
    with pytest.raises(HeartError, match=r"\.svg"):
        picture.front(folder, folder / "a.png")
