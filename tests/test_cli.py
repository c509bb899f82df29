"""The command line: every command is there, errors are one sentence, exit codes are right."""

import json
import subprocess
import sys

import pytest

from heart_attention import cli

COMMANDS = ("demo", "generate", "calibrate", "solve", "show", "compare", "ablate", "study", "tune-delta", "report",
            "project", "fetch-weights", "info")  # fmt: skip


def test_every_command_of_the_design_has_help(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as done:
            cli.main([command, "--help"])
        assert done.value.code == 0 and command in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["nonsense"], ["generate"], ["study", "everything"]])
def test_wrong_usage_is_2(words, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(words)
    assert done.value.code == 2


@pytest.mark.parametrize("words, sentence", [
    (["report", "/nowhere"], "there is no file"),
    (["generate", "--prompt", "x", "--out", "a.avi"], "ends in .mp4"),
    (["generate", "--prompt", "x", "--model", "nonsense"], "there is no model"),
    (["generate", "--prompt", "x", "--size", "big"], "WIDTHxHEIGHT"),
    (["generate", "--prompt", "x", "--steps", "0"], "must be 1 or more"),
    (["compare", "--metrics", "fid"], "unknown metric"),
    (["compare", "--prompts", "/nowhere.txt"], "no prompts file"),
    (["fetch-weights", "lpips", "--file", "/nowhere"], "no archive"),
])  # fmt: skip
def test_failures_are_one_sentence_and_1(words, sentence, capsys):
    assert cli.main(words) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("heart: ") and sentence in error


def test_generate_writes_a_video(tmp_path, capsys):
    out = tmp_path / "v.mp4"
    words = ["generate", "--prompt", "a red circle moves right on a blue background", "--size", "64x64", "--frames", "3",
             "--steps", "2", "--out", str(out), "--json"]  # fmt: skip
    assert cli.main(words) == 0 and out.stat().st_size > 500
    assert json.loads(capsys.readouterr().out)["video"] == str(out)


def test_import_is_quick_and_light():
    """Importing the package alone brings in neither torch nor diffusers."""
    code = "import sys, heart_attention; print('torch' in sys.modules, 'diffusers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
