"""A calibration beside the model and the run it is used with: refused, warned of, or silent."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from small_calibrations import WAN, made

from heart_attention import SVG2, XAttention
from heart_attention.calibration import file
from heart_attention.calibration.file import Calibration
from heart_attention.errors import HeartError


def test_check_refuses_another_model_and_force_overrides(tmp_path, wan):
    other = WanTransformer3DModel(**{**WAN, "ffn_dim": 24})
    path = made(wan).save(tmp_path / "a.heart.json")
    with pytest.raises(HeartError, match="another model.*config hash.*force=True"):
        Calibration.load(path, other)
    Calibration.load(path, other, force=True)
    forced = Calibration.load(path, force=True)
    forced.check(other)  # remembered, so that enabling with it works
    made(wan).check(wan)
    made(None).check(other)  # nothing is known of its model: only the shape must fit


def test_other_weights_warn_and_refuse_a_shipped_file(wan, caplog):
    torch.manual_seed(5)
    other = WanTransformer3DModel(**WAN)
    made(wan).check(wan)
    assert not caplog.records
    made(wan).check(other)
    assert "other weights" in caplog.text
    with pytest.raises(HeartError, match="ships for the embedded model's own weights"):
        made(wan, shipped=True).check(other)
    unknown = {**file.fingerprint(wan), "values_digest": None}
    caplog.clear()
    made(model=None, **{}).check(other)
    Calibration.from_dict({**json.loads(made(wan).to_bytes()), "model": unknown}, shipped=True).check(other)
    assert not caplog.records  # nothing is known of the values: nothing is said


def test_force_does_not_override_the_number_of_heads(wan):
    other = WanTransformer3DModel(**{**WAN, "num_layers": 2})
    with pytest.raises(HeartError, match="3 layers of 2 heads.*2 of 2"):
        made(wan).check(other, force=True)


def test_thresholds_and_fingerprint_must_fit(wan):
    data = json.loads(made(wan).to_bytes())
    data["model"]["layers"] = 4
    with pytest.raises(HeartError, match="3×2 heads but its model has 4×2"):
        Calibration.from_dict(data)


def test_warnings_say_what_changed():
    c = made()
    assert c.warnings_for(steps=50, height=480, width=832, frames=81) == [] == c.warnings_for()
    (size,) = c.warnings_for(height=720, width=1280)
    assert "832×480, 81 frames" in size and "1280×720, 81 frames" in size
    (steps,) = c.warnings_for(steps=30)
    assert "50 steps" in steps and "with 30" in steps
    assert len(c.warnings_for(steps=30, frames=41)) == 2
    assert c.warnings_for(grid=(21, 30, 52)) == []  # tokens are not known of this one
    known = made(settings={"grid": [21, 30, 52]})
    assert known.warnings_for(grid=(21, 30, 52), steps=50) == []
    (tokens,) = known.warnings_for(grid=(21, 45, 80))
    assert "21×30×52 video tokens (832×480, 81 frames)" in tokens and "21×45×80" in tokens
    assert made(settings={"order": "tiles"}).warnings_for(order="tiles", backbone=XAttention().to_dict()) == []
    (order,) = made(settings={"order": "tiles"}).warnings_for(order="raster")
    assert "token order 'tiles', used in 'raster'" in order
    (backbone,) = c.warnings_for(backbone=XAttention(block=64).to_dict())
    assert "block 128, used 64" in backbone
    (backbone,) = c.warnings_for(backbone=SVG2().to_dict())
    assert "name xattention, used svg2" in backbone


def test_it_serves_as_the_thresholds_of_a_config(wan):
    from heart_attention.config import HeartConfig
    from heart_attention.online.thresholds import table as threshold_table

    config = HeartConfig("xattention", thresholds=made(wan))
    assert hash(config) == hash(HeartConfig("xattention", thresholds=made(wan)))
    table = threshold_table(config.thresholds, 1, 3, 2)
    assert np.array_equal(np.array(table[0]), made().thresholds)


def test_use_at_another_size_is_told_once(caplog):
    import heart_attention as heart

    model = WanTransformer3DModel(**WAN).eval()
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([600]),
        "encoder_hidden_states": torch.randn(1, 4, 8),
    }
    for grid, told in (([2, 4, 4], 0), ([2, 8, 8], 1)):
        thresholds = made(model, settings={"grid": grid})
        with heart.enabled(model, heart.HeartConfig("xattention", thresholds=thresholds)), torch.no_grad():
            caplog.clear()
            model(**inputs)
            model(**inputs)
            assert sum("video tokens" in r.message for r in caplog.records) == told
            assert ("used at 2×4×4" in str(heart.stats(model))) == bool(told)


def test_a_file_brings_what_it_was_measured_with(tmp_path):
    import heart_attention as heart
    from heart_attention import api

    model = WanTransformer3DModel(**WAN).eval()
    settings_ = {"order": "tiles", "scale_clusters": False, "dense_steps": 3, "strata": "paper"}
    path = made(model, settings=settings_, backbone=XAttention(block=64).to_dict()).save(tmp_path / "a.heart.json")
    config, _ = api.resolve(str(path), model)
    assert (config.order, config.dense_steps, config.backbone.block) == ("tiles", 3, 64)
    with heart.enabled(model, str(path)):
        assert heart.stats(model) is not None


def test_a_pipeline_tells_its_steps():
    import heart_attention as heart

    class Pipe:
        def __init__(self, transformer):
            self.transformer = transformer
            self.scheduler = SimpleNamespace(num_inference_steps=30, step_index=None, timesteps=None)

    pipe = Pipe(WanTransformer3DModel(**WAN).eval())
    with heart.enabled(pipe, heart.HeartConfig("xattention", thresholds=made(pipe.transformer))), torch.no_grad():
        pipe.transformer(torch.randn(1, 4, 2, 8, 8), torch.tensor([600]), torch.randn(1, 4, 8))
        assert "calibrated with 50 steps, used with 30" in str(heart.stats(pipe))


def test_another_rest_is_told():
    (told,) = made().warnings_for(rest="mean")
    assert "rest 'drop', used with 'mean'" in told and made().warnings_for(rest="drop") == []
