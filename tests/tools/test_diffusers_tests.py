"""The script that runs diffusers' own tests with HEART on, on a checkout of three tests."""

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


def test_what_passes_only_without_heart_is_told(tmp_path, capfd):
    (tmp_path / "test_wan.py").write_text(CHECKOUT)
    assert diffusers_tests.main([str(tmp_path), "--files", "test_wan.py"]) == 1
    told = capfd.readouterr().out
    assert "3 tests: 3 pass without HEART, 2 with it" in told
    assert "passes only without HEART: test_wan::test_that_heart_breaks" in told


def test_the_same_set_passes(tmp_path, capfd):
    (tmp_path / "test_wan.py").write_text(CHECKOUT)
    assert diffusers_tests.main([str(tmp_path), "--files", "test_wan.py", "--", "-k", "not breaks"]) == 0
    assert "2 tests: 2 pass without HEART, 2 with it" in capfd.readouterr().out
