"""`heart generate` and `heart demo`: formats, options, and arguments that are judged before a model is loaded."""

import functools
import json
import logging

import pytest
from calibrations_for_tests import JOINT
from PIL import Image

from heart_attention.cli import main

PROMPT = "a red circle moves right on a blue background"
SMALL = ["--size", "64x64", "--frames", "4", "--steps", "3"]


@pytest.mark.parametrize("ending", ["mp4", "gif", "webp"])
def test_the_ending_says_the_format(ending, tmp_path, capsys):
    out = tmp_path / f"v.{ending}"
    words = ["generate", "--prompt", PROMPT, *SMALL, "--out", str(out), "--dense-steps", "1", "--force-sparse"]
    assert main.main([*words, "--guidance", "1.5", "--negative-prompt", "noise"]) == 0
    said = capsys.readouterr().out
    assert (
        f"{out}: 64×64, 4 frames" in said and "in the denoising model" in said and "attention of a sparse step" in said
    )
    if ending != "mp4":
        picture = Image.open(out)
        assert picture.n_frames == 4
        assert ending != "gif" or picture.info["duration"] == 120  # eight frames a second, in hundredths


def test_the_calibration_brings_its_backbone(tmp_path, capsys):
    out = tmp_path / "v.mp4"
    words = ["generate", "--prompt", PROMPT, *SMALL, "--out", str(out), "--calibration", str(JOINT), "--json"]
    assert main.main(words) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "xattention"


@pytest.mark.parametrize("command", [["generate"], ["generate", "--dense"]])
def test_compiling_is_announced(command, tmp_path, caplog, monkeypatch):
    from heart_attention.models import regional_compile

    tracing = functools.partial(regional_compile.compile_blocks, backend="aot_eager")
    monkeypatch.setattr(regional_compile, "compile_blocks", tracing)
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger(regional_compile.__name__)
    try:
        assert main.main([*command, "--prompt", PROMPT, *SMALL, "--compile"]) == 0
    finally:
        logger.setLevel(logging.NOTSET)
    assert [line.split()[0] for line in caplog.messages if "blocks of" in line] == ["compiling", "compiled"]


@pytest.mark.parametrize("words, sentence", [
    (["--preset", "svg2", "--calibration", str(JOINT)], "is a calibration for xattention but --preset is svg2"),
    (["--preset", "magic"], "there is no preset 'magic'"),
    (["--preset", "xattention@90"], "90"),
    (["--dense", "--preset", "svg2"], "--dense is without HEART: leave --preset out"),
    (["--dense", "--dense-steps", "3"], "leave --dense-steps out"),
    (["--dense", "--force-sparse"], "leave --force-sparse out"),
    (["--preset", "wan2.1-14b-svg2"], "the config is for wan2.1-14b (WanTransformer3DModel, 40 layers"),
    (["--image", "picture.png"], "WanPipeline takes no image: leave --image out"),
    (["--calibration", str(JOINT), "--model", "other"], "heads but other has MochiTransformer3DModel with 24"),
    (["--image", "picture.png", "--model", "other"], "MochiPipeline takes no image"),
    (["--calibration", "nowhere.heart.json"], "there is no file"),
    (["--steps", "0"], "--steps is 0: it must be 1 or more"),
    (["--size", "63x64"], "--size is 63x64: width and height must be multiples of 16"),
    (["--size", "64x36", "--model", "owner/name"], "multiples of 8"),
    (["--model", "/nowhere"], "there is no model '/nowhere'"),
    (["--model", "./nowhere"], "there is no model './nowhere'"),
    (["--model", "notes.txt"], "'notes.txt' is a file: give the folder"),
    (["--size", "big"], "WIDTHxHEIGHT"),
    (["--seed", "-1"], "--seed is -1"),
    (["--fps", "0"], "--fps is 0"),
    (["--dense-steps", "-2"], "--dense-steps is -2"),
    (["--image", "nowhere.png"], "there is no picture"),
    (["--image", "notes.txt"], "'notes.txt' is not a picture that can be read"),
    (["--out", "notes.txt/v.mp4"], "notes.txt' is a file"),
    (["--out", "taken.gif"], "it is a folder"),
    (["--guidance", "nan"], "--guidance is nan"),
    (["--preset", "heart", "--model", "owner/name"], "needs a calibration of operating points"),
    (["--dtype", "float8"], "--dtype is 'float8'"),
    (["--device", "cuda"], "no CUDA device"),
    (["--model", "folder"], "model_index.json"),
])  # fmt: skip
def test_wrong_arguments_are_told_before_anything_is_loaded(words, sentence, capsys, tmp_path, monkeypatch):
    import torch

    from heart_attention.evaluation import pipelines

    if torch.cuda.is_available() and "cuda" in words:
        pytest.skip("there is a CUDA device")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken.gif").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.png")
    (tmp_path / "other" / "transformer").mkdir(parents=True)
    index = {"_class_name": "MochiPipeline", "transformer": ["diffusers", "MochiTransformer3DModel"]}
    (tmp_path / "other" / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "other" / "transformer" / "config.json").write_text(json.dumps({"num_attention_heads": 24}))
    (tmp_path / "notes.txt").write_text("no picture")
    monkeypatch.setattr(pipelines, "load", lambda *a: pytest.fail("loaded"))
    assert main.main(["generate", "--prompt", "x", *words]) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and sentence in error[0] and len(error[0]) <= 320


def test_a_folder_that_may_not_be_written_to_is_told_before_anything_is_loaded(capsys, tmp_path, monkeypatch):
    from heart_attention.evaluation import pipelines

    monkeypatch.setattr(pipelines, "load", lambda *a: pytest.fail("loaded"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    assert main.main(["generate", "--prompt", "x", "--out", str(tmp_path / "new" / "v.mp4")]) == 1
    assert f"'{tmp_path}' may not be written to" in capsys.readouterr().err


def test_an_option_that_the_pipeline_does_not_take_is_named(tmp_path, capsys):
    picture = tmp_path / "p.png"
    Image.new("RGB", (8, 8)).save(picture)
    assert main.main(["generate", "--prompt", "x", "--image", str(picture), "--out", str(tmp_path / "v.mp4")]) == 1
    assert "takes no image: leave --image out" in capsys.readouterr().err


def test_demo_is_compare_with_a_report(tmp_path, monkeypatch, capsys):
    """The demo's own way, at the smallest size."""
    from heart_attention import tiny
    from heart_attention.evaluation import methods

    monkeypatch.setattr(tiny, "QUICK", {**tiny.QUICK, "height": 64, "width": 64, "num_frames": 4})
    monkeypatch.setattr(methods, "DEMO", ("dense", "xattention"))
    assert main.main(["demo", "--quick", "--steps", "3", "--out", str(tmp_path / "d")]) == 0
    said = capsys.readouterr().out
    assert "256 video tokens" in said and (tmp_path / "d" / "report.html").stat().st_size > 10_000
