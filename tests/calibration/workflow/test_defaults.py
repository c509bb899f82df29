"""What a calibration takes where nothing is said."""

from __future__ import annotations

import pytest
from models_for_tests import CALL, wan_pipe

from heart_attention.backbones import SVG2, XAttention
from heart_attention.calibration.workflow import defaults
from heart_attention.config import HeartConfig


@pytest.fixture(scope="module")
def pipe():
    return wan_pipe(layers=2)


def test_prompts_are_built_in():
    for tiny in (False, True):
        prompts, held_out = defaults.default_prompts(tiny)
        assert len(prompts) == 10 and len(held_out) == 6 and not set(prompts) & set(held_out)


def test_prompts_that_are_calibrated_on_are_not_held_out(pipe):
    made = defaults.settings_for(pipe, "xattention", ["a", "b"], ["b", "c"], CALL, {})
    assert made.prompts == ("a", "b") and made.held_out == ("c",)


def test_a_backbone_by_name_has_the_presets_settings(pipe, tiny_pipe):
    named = defaults.settings_for(tiny_pipe, "svg2", None, None, None, {})
    assert named.scale_clusters and named.backbone.q_clusters == 300 and named.steps == 50
    whole = defaults.settings_for(tiny_pipe, SVG2(8, 16), None, None, CALL, {})
    assert not whole.scale_clusters and whole.backbone == SVG2(8, 16)


def test_short_runs_have_fewer_contexts(pipe):
    made = defaults.settings_for(pipe, XAttention(), ["a"], ["b"], CALL | {"num_inference_steps": 3}, {})
    assert made.contexts == 2 and made.held_out_contexts == 2 and made.first_dense_steps == 1
    asked = defaults.settings_for(pipe, XAttention(), ["a"], [], CALL, {"contexts": 1, "rounds": None})
    assert asked.contexts == 1 and asked.held_out_contexts == 0 and asked.rounds == 1


def test_points_by_name(pipe, tiny_pipe, tmp_path):
    default = defaults.settings_for(tiny_pipe, "xattention", None, None, None, {"points": "default"})
    assert default.scale_clusters and len(default.candidate_points) == 17
    assert {(p.backbone.name, p.rest) for p in default.points} == {
        ("xattention", "drop"),
        ("svg2", "mean"),
        ("band", "mean"),
    }
    blocks = {p.backbone.block for p in default.points if p.backbone.name == "xattention"}
    assert blocks == {64}  # the embedded model's own
    paper = defaults.settings_for(pipe, "svg2", ["a"], [], CALL, {"points": "paper", "method": "probes"})
    assert paper.taus == (0.85, 0.9, 0.95) and paper.backbone.name == "svg2"
    assert (paper.strata, paper.mean, paper.realised) == ("paper", "plain", False)
    plain = defaults.settings_for(pipe, "svg2", ["a"], [], CALL, {"method": "probes"})
    assert plain.planned() == paper.planned()  # the same plan, so the same assignments to the last bit
    (tmp_path / "p.json").write_text('[{"backbone": "svg2", "threshold": [0.5, 0.6], "rest": "mean"}]')
    mine = defaults.settings_for(pipe, "xattention", ["a"], [], CALL, {"points": str(tmp_path / "p.json")})
    assert mine.taus == (0.5, 0.6) and mine.reference == 1


def test_an_order_may_come_from_a_config(pipe, tmp_path):
    table = (("raster", "4x2x1"), ("1x2x4", "raster"))
    HeartConfig("xattention", order=table).save(tmp_path / "c.json")
    made = defaults.settings_for(pipe, "xattention", ["a"], [], CALL, {"order": str(tmp_path / "c.json")})
    assert made.order == table
