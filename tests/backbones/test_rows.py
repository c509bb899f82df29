"""Every backbone takes the paper's parts by name: `+tmr`, and after a calibration `+ebc`, `+heart`, `+joint`."""

import pytest
import torch
from models_for_tests import CALL, wan_pipe

import heart_attention as heart
from heart_attention import backbones
from heart_attention.calibration.workflow.settings import Settings, paper_candidates
from heart_attention.evaluation import methods
from heart_attention.online.reuse import TMR, Always

torch.set_num_threads(1)
SMALL = {
    "xattention": heart.XAttention(stride=4, block=8), "svg2": heart.SVG2(4, 8), "ear": heart.EAR(4, 8),
    "pisa": heart.PISA(block=8), "band": heart.Band(block=8), "sparge": heart.Sparge(16, 8, similarity=-0.1),
    "svg": heart.SVG(rows=8), "radial": heart.Radial(block=8), "exact": heart.ExactMass(8),
    "lite": heart.Lite(tile_q=8, tile_k=8),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipe():
    return wan_pipe(layers=1)


def calibrated(pipe, name, method, out):
    contexts = {"contexts": 1, "held_out_contexts": 0, "dense_steps": 2}
    return heart.calibrate(
        pipe, SMALL[name], prompts=["a cat"], held_out=[], call=CALL, method=method, out=out, **contexts
    )


@pytest.mark.parametrize("name", list(backbones.registry.BUILT_IN))
def test_rows_by_name(name, pipe, tmp_path):
    files = []
    for method in ("probes", "isolated"):
        path = str(tmp_path / f"{method}.heart.json")
        calibrated(pipe, name, method, path)
        files.append(path)
    sorted_ = methods.sort_calibrations(files)
    assert set(sorted_) == {(name, "paper"), (name, "joint")}
    for part, reuse, calibrates in (
        ("", False, False),
        ("+tmr", True, False),
        ("+ebc", False, True),
        ("+heart", True, True),
    ):
        config = methods.build(name + part, pipe, "other", sorted_).config
        assert (isinstance(config.reuse, TMR), isinstance(config.reuse, Always)) == (reuse, not reuse)
        assert isinstance(config.thresholds, heart.Calibration) == calibrates
        if calibrates:
            assert config.backbone == SMALL[name]
    config = methods.build(f"{name}+heart", pipe, "other", sorted_).config.replace(force_sparse=True)
    with heart.enabled(pipe, config):
        pipe("a dog", generator=torch.Generator().manual_seed(0), output_type="latent", **CALL)
        assert heart.stats(pipe)["density"] is not None


def test_three_candidates_around_the_shared_threshold():
    assert paper_candidates(heart.XAttention(), 0.9) == paper_candidates(heart.EAR(), 0.8) == (0.85, 0.9, 0.95)
    assert paper_candidates(heart.SVG(), 0.3) == (0.2, 0.3, 0.4)
    assert paper_candidates(heart.Sparge(), 0.98) == (0.95, 0.98, 0.99)
    assert paper_candidates(heart.Lite(), 1 - 2.0**-10) == (1 - 2.0**-8, 1 - 2.0**-10)
    made = Settings(heart.Sparge(), ("a",), CALL, method="probes", shared=0.9)
    assert made.candidates == (0.8, 0.9, 0.95) and made.budget.value == 0.9


def test_a_preset_brings_its_threshold(tiny_pipe):
    from heart_attention.calibration.workflow.defaults import settings_for

    made = settings_for(tiny_pipe, "sparge", ["a"], [], None, {"method": "probes"})
    assert made.shared == 0.9 and made.candidates == (0.8, 0.9, 0.95)
