"""`heart calibrate` from end to end on a small pipeline, and what it refuses."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from models_for_tests import CALL, wan_pipe

from heart_attention.calibration import file
from heart_attention.calibration.file import Calibration
from heart_attention.calibration.workflow import settings
from heart_attention.cli import calibrate
from heart_attention.errors import HeartError
from heart_attention.evaluation import pipelines


def heart(*argv) -> int:
    parser = argparse.ArgumentParser()
    calibrate.register(parser.add_subparsers(required=True))
    args = parser.parse_args([str(a) for a in argv])
    return args.func(args)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The command with a small random pipeline in place of a downloaded one."""
    pipe = wan_pipe(layers=2)
    monkeypatch.setattr(pipelines, "load", lambda *_: pipe)
    monkeypatch.setattr(pipelines, "call_arguments", lambda *_: dict(CALL))
    (tmp_path / "p.txt").write_text("# prompts\na red ball\n\na blue cube\n")
    (tmp_path / "q.txt").write_text("a green cone\n")
    return pipe


def options(tmp_path, *more) -> list:
    base = ["calibrate", "--model", "some/model", "--out", tmp_path / "a.heart.json", "--contexts", 2, "--rounds", 1]
    return [*base, "--prompts", tmp_path / "p.txt", "--held-out", tmp_path / "q.txt", *more]


def test_from_prompts_to_a_file(small, tmp_path, capsys):
    assert heart(*options(tmp_path, "--candidates", "0.5,0.9", "--budget", "shared=0.7", "--seed", 5, "--json")) == 0
    told, bars = capsys.readouterr()
    made = Calibration.load(tmp_path / "a.heart.json", small.transformer)
    assert json.loads(told)["file"] == str(tmp_path / "a.heart.json")
    assert made.candidates.tolist() == [0.5, 0.7, 0.9] and made.seed == 5 and made.method == "joint"
    assert made.prompts == {"count": 2, "hash": file.prompts_hash(["a red ball", "a blue cube"])}
    assert set(made.verification) == {"calibration", "held_out"}
    assert (tmp_path / "a.work" / "plan.json").exists()
    assert "trajectories" in bars and "100%" in bars

    before = (tmp_path / "a.heart.json").read_bytes()
    (tmp_path / "a.heart.json").unlink()
    heart(*options(tmp_path, "--candidates", "0.5,0.9", "--budget", "shared=0.7", "--seed", 5))
    assert (tmp_path / "a.heart.json").read_bytes() == before  # all of it from the work folder
    with pytest.raises(HeartError, match="resume, or give another folder"):
        heart(*options(tmp_path, "--candidates", "0.5,0.9", "--budget", "shared=0.7", "--seed", 5, "--no-resume"))
    with pytest.raises(HeartError, match="another calibration"):
        heart(*options(tmp_path, "--seed", 6))


def test_the_papers_protocol_on_the_command_line(small, tmp_path, capsys):
    heart(*options(tmp_path, "--method", "probes", "--dense-steps", 1, "--work", tmp_path / "w"))
    made = Calibration.load(tmp_path / "a.heart.json")
    assert made.method == "probes" and made.settings["strata"] == "paper"
    assert made.candidates.tolist() == [0.85, 0.9, 0.95]
    assert made.bands.shape == (2, 2, 3, 4)
    assert np.allclose(made.bands @ np.array((1, 0.5, 0.01, 0.01)), made.E, rtol=1e-9, atol=1e-18)
    assert "layer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--out", "x.json"], r"ends in \.heart\.json"),
        (["--workers", 2], "together with --ray"),
        (["--ray", "auto", "--workers", 0], "1 or more"),
        (["--seed", -1], "0 or more"),
        (["--candidates", "a,b"], "separated by commas"),
        (["--candidates", "0.5,1.5"], "0 … 1"),
        (["--budget", "fast"], "budget"),
        (["--contexts", 0], "1 or more"),
        (["--error", "beauty"], "choose one of spectral"),
        (["--prompts", "none.txt"], "there is no prompts file"),
        (["--dense-steps", 8], "take more steps"),
    ],
)
def test_refusals(small, tmp_path, more, words):
    with pytest.raises(HeartError, match=words) as caught:
        heart(*options(tmp_path), *more)
    assert "\n" not in str(caught.value)


def test_wrong_usage_ends_with_2(tmp_path):
    for argv in (["calibrate"], ["calibrate", "--out", "a.heart.json", "--method", "guess"], ["solve"]):
        with pytest.raises(SystemExit) as caught:
            heart(*argv)
        assert caught.value.code == 2


def test_every_setting_with_an_option_is_on_the_command_line(capsys):
    with pytest.raises(SystemExit):
        heart("calibrate", "--help")
    told = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in told for name in settings.options())
