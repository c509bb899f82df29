"""Configs, presets, thresholds and their JSON."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from heart_attention import config as configs
from heart_attention.backbones import SVG2, XAttention
from heart_attention.config import HeartConfig
from heart_attention.errors import HeartError
from heart_attention.online.reuse import TMR, Always, Interval, Warmup
from heart_attention.online.thresholds import PlainThresholds
from heart_attention.online.thresholds import table as threshold_table
from heart_attention.presets import MODELS, PRESETS, check_model, find_preset, preset


def model(name, cls=None, **config):
    """An object that looks like a diffusers transformer of those dimensions."""
    m = MODELS[name]
    single = 40 if name.startswith("hunyuan") else 0
    values = {"num_layers": m.layers - single, "num_attention_heads": m.heads, "attention_head_dim": m.head_dim}
    if single:
        values["num_single_layers"] = single
    made = type(cls or m.cls, (), {})()
    made.config = {**values, **config}
    return made


# ---------------------------------------------------------------- presets: the paper's values


@pytest.mark.parametrize("name", [k for k in PRESETS if k.endswith(("-xattention", "-svg2")) and "tiny" not in k])
def test_presets_have_the_papers_values(name):
    p = PRESETS[name]
    c = p.config
    if name.endswith("xattention"):
        assert c.backbone == XAttention(stride=16, block=128) and c.reuse.delta == 30.0
    else:
        assert c.backbone == SVG2(300, 1000, 0.10, 50, 2)
        assert c.reuse.delta == (30.0 if name.startswith("hunyuan") else 8.0)
    assert (c.reuse.gate, c.reuse.relative, c.thresholds) == ((0.4, 0.8), None, 0.9)
    assert (c.first_dense_steps(p.steps), c.dense_layers, c.order, c.force_sparse, p.steps) == (
        5,
        0,
        "raster",
        False,
        50,
    )
    size = (720, 480, 129) if name.startswith("hunyuan") else (1280, 720, 81) if "720p" in name else (832, 480, 81)
    assert (p.width, p.height, p.frames) == size
    assert bool(p.ours) == (name.startswith("wan2.2") or name == "hunyuanvideo-13b-xattention")


def test_presets_of_other_backbones_are_their_authors():
    """Warm-up and dense layers as the originals ship them, at 50 steps."""
    settings = {name: (p.config.thresholds, p.config.dense_steps, p.config.dense_layers) for name, p in PRESETS.items()}
    assert settings["wan2.1-1.3b-480p-svg"] == (0.3, 10, 0) and settings["wan2.1-14b-svg"] == (0.3, 10, 1)
    assert settings["hunyuanvideo-13b-svg"] == (0.25, 5, 1) and settings["hunyuanvideo-13b-radial"] == (0.5, 12, 0)
    assert settings["wan2.1-14b-radial"] == (0.5, 12, 1) and settings["wan2.1-14b-lite"][0] == 1 - 2.0**-10
    assert settings["wan2.1-14b-sparge"][0] == 0.98
    assert all(p.ours for name, p in PRESETS.items() if name.rsplit("-", 1)[1] not in ("xattention", "svg2"))


def test_every_model_has_both_backbones():
    for name in ("wan2.1-1.3b-480p", "wan2.1-1.3b-720p", "wan2.1-14b", "wan2.2-a14b", "hunyuanvideo-13b", "tiny"):
        assert {f"{name}-xattention", f"{name}-svg2"} <= set(PRESETS)
    assert PRESETS["tiny-xattention"].config.backbone == XAttention(stride=8, block=64)
    assert PRESETS["tiny-svg2"].config.scale_clusters


@pytest.mark.parametrize("name", [m for m in MODELS if m != "wan2.2-a14b"])
def test_a_preset_is_found_from_the_models_config(name):
    known_as = "tiny" if name == "tiny-student" else name  # one architecture, and so one preset
    for backbone in ("xattention", "svg2"):
        found, note = find_preset(backbone, model(name))
        assert (found.model, found.backbone.name, note) == (known_as, backbone, "")
        assert known_as == name or found.replace(model=name) == PRESETS[f"{name}-{backbone}"].config


def test_wan22_is_told_by_its_second_transformer():
    pipe = SimpleNamespace(transformer=model("wan2.1-14b"), transformer_2=model("wan2.1-14b"))
    assert preset("svg2", pipe).model == "wan2.2-a14b"
    assert preset("svg2", SimpleNamespace(transformer=model("wan2.1-14b"), transformer_2=None)).model == "wan2.1-14b"


def test_an_unknown_model_gets_safe_values_and_says_so(caplog):
    for unknown in (model("wan2.1-1.3b", num_layers=7), model("wan2.1-1.3b", cls="MochiTransformer3DModel")):
        c, note = find_preset("svg2", unknown)
        assert c.reuse.relative is not None and c.reuse.delta is None and c.scale_clusters and c.model is None
        assert type(unknown).__name__ in note and "tune-delta" in note and note in caplog.text


def test_a_config_for_another_model_is_one_sentence():
    c = PRESETS["hunyuanvideo-13b-svg2"].config
    check_model(c, model("hunyuanvideo-13b"))
    with pytest.raises(HeartError, match="is for hunyuanvideo-13b .* but the model is WanTransformer3DModel with 30"):
        check_model(c, model("wan2.1-1.3b"))
    check_model(c.replace(model=None), model("wan2.1-1.3b"))


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "c",
    [
        HeartConfig(),
        HeartConfig("svg2", [0.5, 1.0], Interval(3), order="tiles", dense_steps=0, kernel="cpu", force_sparse=True),
        HeartConfig(XAttention(8, 64, "chunk"), np.full((2, 3), 0.8), TMR(delta=math.inf)),
        HeartConfig(reuse=TMR(relative=[0.1, 0.2])),
        HeartConfig(reuse=TMR(delta=-math.inf, drift="tokens", gate=(0, 1)), model="tiny"),
        HeartConfig(reuse=Warmup(9)),
        HeartConfig(reuse=Always()),
        *[p.config for p in PRESETS.values()],
    ],
)
def test_json_there_and_back(c, tmp_path):
    assert HeartConfig.from_dict(json.loads(json.dumps(c.to_dict(), allow_nan=False))) == c
    c.save(tmp_path / "c.json")
    assert HeartConfig.load(tmp_path / "c.json") == c


def test_default_delta_is_the_papers_for_the_backbone():
    assert HeartConfig("xattention").reuse == TMR(delta=30.0)
    assert HeartConfig("svg2").reuse == TMR(delta=8.0)


def damage(**changes):
    d = HeartConfig().to_dict()
    d["_data"].update(changes)
    return d


@pytest.mark.parametrize(
    "data, message",
    [
        ({}, "no saved HeartConfig"),
        ([], "no saved HeartConfig"),
        ({"_type": "Other", "_version": 1, "_data": {}}, "holds a 'Other'"),
        ({"_type": "HeartConfig", "_version": 99, "_data": {}}, "version 99"),
        ({"_type": "HeartConfig", "_version": 1, "_data": []}, "must be an object"),
        (damage(speed=9), "unknown field 'speed'"),
        (damage(reuse={"_type": "os.system", "_version": 1, "_data": {}}), "'os.system'"),
        (damage(reuse={"_type": "Interval", "_version": 1, "_data": {"m": 1}}), "wrong fields"),
        (damage(backbone={"name": "other"}), "no backbone 'other'"),
        (damage(thresholds=[0.5, "x"]), "a threshold is 'x'"),
    ],
)
def test_damaged_json_is_one_sentence(data, message):
    with pytest.raises(HeartError, match=message) as error:
        HeartConfig.from_dict(data)
    assert "\n" not in str(error.value)


def test_a_policy_of_ones_own_works_but_has_no_json():
    class Mine:
        features = None

        def refresh(self, drift, state):
            return state.cached

    c = HeartConfig(reuse=Mine())
    with pytest.raises(HeartError, match="Mine has no JSON form"):
        c.to_dict()


# ---------------------------------------------------------------- wrong values


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"backbone": "fastest"}, "no backbone 'fastest'"),
        ({"backbone": 3}, "backbone is 3"),
        ({"reuse": 0.5}, "reuse is 0.5"),
        ({"order": "zigzag"}, "'zigzag'"),
        ({"dense_steps": -1}, "dense_steps is -1"),
        ({"dense_layers": 1.5}, "dense_layers is 1.5"),
        ({"kernel": None}, "kernel is None"),
        ({"model": "sora"}, "model is 'sora'"),
        ({"thresholds": 0.0}, "above 0"),
        ({"thresholds": math.nan}, "above 0"),
        ({"thresholds": math.inf}, "above 0"),
        ({"thresholds": [[0.5, 0.6], [0.7]]}, "ragged"),
        ({"thresholds": []}, "ragged or empty"),
        ({"thresholds": "0.9"}, "'0.9'"),
    ],
)
def test_wrong_fields_are_one_sentence(fields, message):
    with pytest.raises(HeartError, match=message) as error:
        HeartConfig(**fields)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- thresholds


@pytest.mark.parametrize(
    "value",
    [0.9, [0.9] * 3, [[0.9] * 3] * 2, torch.full((2, 3), 0.9, dtype=torch.float64), np.full((2, 2, 3), 0.9)],
)
def test_every_form_of_thresholds_makes_the_same_table(value):
    assert threshold_table(HeartConfig(thresholds=value).thresholds, 2, 2, 3) == [[(0.9,) * 3] * 2] * 2


def test_a_calibration_serves_as_thresholds():
    calibration = PlainThresholds([[0.5, 0.6], [0.7, 0.8]])
    c = HeartConfig(thresholds=calibration)
    assert threshold_table(c.thresholds, 1, 2, 2) == [[(0.5, 0.6), (0.7, 0.8)]]
    assert HeartConfig.from_dict(c.to_dict()).thresholds == ((0.5, 0.6), (0.7, 0.8))


@pytest.mark.parametrize("shape", [(4,), (3, 2), (3, 2, 3), (2, 4), (1, 1, 1, 1)])
def test_thresholds_of_the_wrong_shape_are_one_sentence(shape):
    with pytest.raises(HeartError, match="the model has 2 layers of 3 heads: give one number"):
        threshold_table(np.full(shape, 0.9), 1, 2, 3)


def test_configs_do_not_change():
    table = [[0.5, 0.6]]
    c = HeartConfig(thresholds=table)
    table[0][0] = 0.9
    assert c.thresholds == ((0.5, 0.6),)
    with pytest.raises(AttributeError):
        c.order = "tiles"
    assert configs.VERSION == c.to_dict()["_version"]


def test_dense_steps_of_older_configs_are_five_where_they_say_nothing():
    old = {"_type": "HeartConfig", "_version": 2, "_data": {}}
    assert HeartConfig.from_dict(old).dense_steps == 5
    assert HeartConfig.from_dict({**old, "_data": {"dense_steps": 2}}).dense_steps == 2
    assert HeartConfig.from_dict({**old, "_version": configs.VERSION}).dense_steps == "auto"
    last = HeartConfig(dense_last_steps=1)
    assert HeartConfig.from_dict(last.to_dict()) == last
