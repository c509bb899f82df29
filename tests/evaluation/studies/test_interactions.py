"""The study of interactions: its sums are those of probes and full forwards, and it writes what it promises."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from models_for_tests import CALL, wan_context, wan_pipe

from heart_attention import HeartConfig
from heart_attention.backbones import XAttention
from heart_attention.calibration.measure import probes, velocity_error
from heart_attention.calibration.measure.candidates import Spec
from heart_attention.calibration.measure.replay import Replay
from heart_attention.evaluation.studies import interactions


def test_joint_and_additive_errors_are_those_of_forwards_and_probes():
    pipe = wan_pipe(layers=2)
    context, spec = wan_context(pipe.transformer), Spec.of(XAttention(stride=4, block=8), (0.6,))
    with Replay(pipe.transformer) as replay:
        found = interactions._context(replay, context, spec, orders=2, seed=0)
        single = [
            record["heads"][str(h)]["error"][0]
            for _, record in probes.probe(replay, context, {0: [0, 1], 1: [0, 1]}, spec, velocity_error.Spectral())
            for h in (0, 1)
        ]
        both = probes.full_forward(replay, context, spec, {0: [0, 0], 1: [0, 0]})
    assert found["sizes"] == [1, 2, 3, 4]
    assert found["additive"][:, -1] == pytest.approx(sum(single), rel=1e-5)
    assert found["joint"][:, -1] == pytest.approx(velocity_error.spectral(both, context.reference()))
    np.testing.assert_allclose(found["joint"][:, 0], found["additive"][:, 0], rtol=1e-5)  # one head: no interaction
    assert -1 <= found["within"] <= 1 and -1 <= found["between"] <= 1


def test_orthogonal_errors_have_no_cosine_and_equal_ones_have_one():
    assert interactions._cosines(np.eye(4), 2) == {"within": 0.0, "between": 0.0}
    told = interactions._cosines(np.ones((4, 4)), 2)
    assert told == pytest.approx({"within": 1.0, "between": 1.0})


def test_the_study_writes_numbers_figure_and_paragraph(tmp_path, monkeypatch):
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    config = HeartConfig(XAttention(4, 8))
    monkeypatch.setattr("heart_attention.presets.preset", lambda name, pipe: config)
    sides = []
    for pipe in (wan_pipe(layers=1), wan_pipe(layers=1, seed=5)):
        planned = interactions.plan(CALL, ["a cat"], 0, False)[:1]
        sides.append([interactions.measure(pipe, "a cat", p, **settings) for p, settings in planned])
    made = interactions.run(json.loads(json.dumps(sides[0])), sides[1], tmp_path)
    assert made["trained"]["heads"] == [1, 2] and len(made["random"]["ratio"]) == 2
    stored = json.loads((tmp_path / "interactions.json").read_text())
    assert f"{stored['trained']['ratio'][-1]:.2f} times the sum" in stored["finding"]
    assert {p.suffix for p in tmp_path.iterdir()} >= {".json", ".md", ".svg", ".png"}
