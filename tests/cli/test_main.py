"""The command line: every command is there, errors are one sentence, exit codes are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from heart_attention import HeartError, tiny
from heart_attention.cli import main

COMMANDS = ("demo", "generate", "calibrate", "solve", "show", "compare", "ablate", "study", "tune-delta", "tune-order", "report",
            "project", "fetch-weights", "info")  # fmt: skip


def test_every_command_of_the_design_has_help(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as done:
            main.main([command, "--help"])
        assert done.value.code == 0 and command in capsys.readouterr().out


def test_every_command_and_every_argument_is_explained():
    (commands,) = (a.choices for a in main.build_parser()._actions if a.dest == "command")
    assert {*COMMANDS, "frontier", "tune-costs"} <= set(commands)
    silent = [f"{name} {a.dest}" for name, command in commands.items() for a in command._actions if not a.help]
    assert not silent and all(command.description for command in commands.values())


@pytest.mark.parametrize("words", [[], ["nonsense"], ["generate"], ["study", "everything"]])
def test_wrong_usage_is_2(words, capsys):
    with pytest.raises(SystemExit) as done:
        main.main(words)
    assert done.value.code == 2


@pytest.mark.parametrize("words, sentence", [
    (["report", "/nowhere"], "there is no file"),
    (["generate", "--prompt", "x", "--out", "a.avi"], "ends in .mp4, .gif, .webp"),
    (["generate", "--prompt", "x", "--model", "nonsense"], "there is no model"),
    (["generate", "--prompt", "x", "--size", "big"], "WIDTHxHEIGHT"),
    (["generate", "--prompt", "x", "--steps", "0"], "must be 1 or more"),
    (["compare", "--metrics", "fid"], "unknown metric"),
    (["compare", "--prompts", "/nowhere.txt"], "no prompts file"),
    (["fetch-weights", "lpips", "--file", "/nowhere"], "no archive"),
    (["generate", "--prompt", "x", "--device", "abacus"], "use cpu, cuda"),
])  # fmt: skip
def test_failures_are_one_sentence_and_1(words, sentence, capsys):
    assert main.main(words) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("heart: ") and sentence in error


@pytest.fixture
def bad_files(tmp_path, monkeypatch):
    """Files that are not what a command expects, in the present folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEART_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    for name, rows in (("numbers", [1]), ("none", []), ("parts", [{"method": "dense", "prompt": "x"}])):
        (tmp_path / name).mkdir()
        results = {"schema": "heart-results/1", "provenance": {}, "rows": rows}
        (tmp_path / name / "results.json").write_text(json.dumps(results))


CALIBRATION = str(Path(tiny.path()).parent / "calibrations" / "xattention.heart.json")


@pytest.mark.parametrize("words, sentence", [
    (["report", "numbers"], "incomplete"),
    (["report", "none"], "no rows"),
    (["report", "parts"], "incomplete"),
    (["project", "--results", "numbers/results.json"], "no row with a density"),
    (["project", "--prediction-share", "-1"], "prediction share"),
    (["show", "folder"], "there is no file"),
    (["show", CALIBRATION, "--export", "csv", "--out", "folder"], "is a folder"),
    (["solve", CALIBRATION, "--budget", "much"], "is not shared=τ, sparsity=S"),
    (["compare", "--prompts", "latin.txt"], "UTF-8"),
    (["compare", "--limit", "0"], "must be 1 or more"),
    (["compare", "--seeds", ","], "numbers separated by commas"),
    (["compare", "--metrics", "lpips_vgg"], "heart fetch-weights lpips"),
    (["compare", "--calibration", "folder"], "there is no file"),
    (["ablate", "objective", "--objectives", "mse"], "NAME=FILE"),
    (["ablate", "delta", "--deltas", "small"], "numbers separated by commas"),
    (["study", "iou", "--docs", "nowhere.md"], "no page"),
])  # fmt: skip
def test_bad_input_is_told_before_the_work(bad_files, words, sentence, capsys):
    assert main.main(words) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("heart: ") and sentence in error[0]


def test_debug_shows_the_traceback(bad_files):
    with pytest.raises(HeartError):
        main.main(["--debug", "report", "folder"])


def test_generate_writes_a_video(tmp_path, capsys):
    out = tmp_path / "v.mp4"
    words = ["generate", "--prompt", "a red circle moves right on a blue background", "--size", "64x64", "--frames", "4",
             "--steps", "2", "--out", str(out), "--json"]  # fmt: skip
    assert main.main(words) == 0 and out.stat().st_size > 500
    assert json.loads(capsys.readouterr().out)["video"] == str(out)


def test_import_is_quick_and_light():
    """Importing the package alone brings in neither torch nor diffusers."""
    code = "import sys, heart_attention; print('torch' in sys.modules, 'diffusers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_reader_that_goes_away_is_no_error():
    shipped = Path(tiny.path()).parent / "calibrations" / "xattention.heart.json"
    code = f"import sys; from heart_attention.cli import main; sys.exit(main.main(['show', {str(shipped)!r}]))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0


@pytest.mark.parametrize(
    "said, found",
    [
        ({}, "1000"),
        ({"HEART_SPIN": "5000"}, "5000"),
        ({"HEART_SPIN": "much"}, "1000"),
        ({"HEART_SPIN": "-1"}, "1000"),
        ({"HEART_SPIN": "5000", "GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, "None"),
        ({"HEART_SPIN": "5000", "OMP_WAIT_POLICY": "passive"}, "5000"),
    ],
)
def test_spin_reaches_libgomp_before_torch_is_loaded(said, found):
    """libgomp reads GOMP_SPINCOUNT once, when torch loads it; what the user said of it stands above ours."""
    code = (
        "import os, sys\nfrom heart_attention.cli import main\n"
        "assert 'torch' not in sys.modules\nmain._set_spin()\nprint(os.environ.get('GOMP_SPINCOUNT'))"
    )
    ours = ("GOMP_SPINCOUNT", "HEART_SPIN", "OMP_WAIT_POLICY")
    env = {k: v for k, v in os.environ.items() if k not in ours} | said
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == found, done.stderr
