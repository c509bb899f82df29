"""The script that runs diffusers' own tests with HEART on, on a checkout of three tests."""

import pytest

from tools import diffusers_tests

CHECKOUT = """
import torch
from diffusers import WanTransformer3DModel


def model():
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=8, ffn_dim=16,
        num_layers=2,
    )


def test_runs():
    x, text = torch.randn(1, 4, 2, 8, 8), torch.randn(1, 3, 8)
    with torch.no_grad():
        assert model()(x, torch.tensor([5.0]), text)[0].shape == x.shape


def test_saves(tmp_path):
    model().save_pretrained(tmp_path)
    WanTransformer3DModel.from_pretrained(tmp_path)


def test_that_heart_breaks():
    assert not hasattr(model(), "_heart_clock")
"""


def test_outcomes_and_what_differs(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='a' name='x'/><testcase classname='a' name='y'><skipped/></testcase>"
        "<testcase classname='a' name='z'><failure/></testcase><testcase classname='b' name='x'><error/></testcase>"
        "</testsuite></testsuites>"
    )
    found = diffusers_tests.outcomes(report)
    assert found == {"a::x": "passed", "a::y": "skipped", "a::z": "failed", "b::x": "failed"}
    assert diffusers_tests.compare({**found, "a::z": "passed", "c::x": "passed"}, found) == ["a::z", "c::x"]


def test_a_folder_without_tests_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        diffusers_tests.main([str(tmp_path)])
    assert "holds no tests of video models: give a checkout of diffusers" in capsys.readouterr().err


def test_all_tests_that_name_a_served_class_are_run(tmp_path):
    pipelines, models = tmp_path / "tests" / "pipelines" / "any", tmp_path / "tests" / "models" / "transformers"
    for folder in (pipelines, models):
        folder.mkdir(parents=True)
    (pipelines / "test_video.py").write_text("from diffusers import WanTransformer3DModel")
    (pipelines / "test_image.py").write_text("from diffusers import FluxTransformer2DModel")
    (pipelines / "helper.py").write_text("from diffusers import WanTransformer3DModel")
    (models / "test_new.py").write_text("cls = diffusers.MiniMaxH3Transformer3DModel")
    (models / "test_longer.py").write_text("class TestWanTransformer3DModelOfMine: pass")
    assert diffusers_tests.default_files(tmp_path) == [
        "tests/pipelines/any/test_video.py",
        "tests/models/transformers/test_new.py",
    ]


@pytest.mark.slow
def test_what_passes_only_without_heart_is_told(tmp_path, capfd):
    (tmp_path / "test_wan.py").write_text(CHECKOUT)
    assert diffusers_tests.main([str(tmp_path), "--files", "test_wan.py"]) == 1
    told = capfd.readouterr().out
    assert "3 tests: 3 pass without HEART, 2 with it" in told
    assert "passes only without HEART: test_wan::test_that_heart_breaks" in told


@pytest.mark.slow
def test_the_same_set_passes(tmp_path, capfd):
    (tmp_path / "test_wan.py").write_text(CHECKOUT)
    assert diffusers_tests.main([str(tmp_path), "--files", "test_wan.py", "--", "-k", "not breaks"]) == 0
    assert "2 tests: 2 pass without HEART, 2 with it" in capfd.readouterr().out
