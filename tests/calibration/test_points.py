"""Lists of operating points, from files and for configs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from models_for_tests import wan_context, wan_transformer

import heart_attention as heart
from heart_attention.backbones import SVG2, XAttention
from heart_attention.calibration.experts import Experts
from heart_attention.calibration.file import Calibration, fingerprint
from heart_attention.calibration.points import distinct, point_table, points_of, read_points
from heart_attention.errors import HeartError

X, S = XAttention(stride=4, block=8), SVG2(6, 10, init_iters=5, min_ratio=0.0)
POINTS = (*points_of(X, (0.5,)), *points_of(S, (0.5,), rest="mean"), *points_of(X, (0.7,), order="2x4x1"))


def calibration(choice, sigmas=(), **more) -> Calibration:
    phases = (
        {"sigmas": list(sigmas), "weights": [1.0] * (len(sigmas) + 1), "steps": [5] * (len(sigmas) + 1)}
        if sigmas
        else {}
    )
    return Calibration(points=[p.to_dict() for p in POINTS], choice=choice, phases=phases, **more)


def test_points_from_a_file(tmp_path):
    rows = [{"backbone": "xattention", "threshold": [0.5, 0.9]}, POINTS[1].to_dict(), POINTS[1].to_dict()]
    (tmp_path / "p.json").write_text(json.dumps(rows))
    points = read_points(tmp_path / "p.json")
    assert [p.threshold for p in points] == [0.5, 0.9, 0.5] and points[2] == POINTS[1]
    (tmp_path / "q.json").write_text(json.dumps({"points": rows}))
    assert read_points(tmp_path / "q.json") == points == distinct([*points, *points])


@pytest.mark.parametrize(
    "data", [[], {}, [3], [{"threshold": 0.5}], [{"backbone": "nobody", "threshold": 0.5}], [{"backbone": "svg2"}],
             [{"backbone": "svg2", "threshold": 0.5, "colour": 1}], [{"backbone": "svg2", "threshold": 0.5, "rest": 3}]],
)  # fmt: skip
def test_other_files_are_refused_in_one_sentence(tmp_path, data):
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(HeartError) as caught:
        read_points(tmp_path / "p.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300


def test_a_choice_as_a_config_holds_it():
    table = calibration([[[0, 1]], [[1, 2]]], (0.5,)).point_table()
    assert table.phases == (0.5,) and table.phase(0.9) == 0 and table.phase(0.5) == table.phase(0.1) == 1
    chosen = [[table.points[k] for k in phase[0]] for phase in table.choice[0]]
    assert chosen == [[POINTS[0], POINTS[1]], [POINTS[1], POINTS[2]]]


def test_orders_of_every_head_become_points():
    one = Calibration([[0.5, 0.5]], X.to_dict(), settings={"order": [["raster", "2x4x1"]]})
    table = one.point_table()
    assert [table.points[k].order for k in table.choice[0][0][0]] == ["raster", "2x4x1"]


def test_two_transformers_with_phases_of_their_own():
    first = calibration([[[0, 0]], [[1, 1]]], (0.8,), settings={"transformer": "transformer"})
    second = calibration([[[2, 2]], [[0, 0]]], (0.3,), settings={"transformer": "transformer_2"})
    table = point_table([first, second])
    assert table.phases == (0.8, 0.3)
    names = [[table.points[phase[0][0]].backbone.name for phase in one] for one in table.choice]
    assert names == [["xattention", "svg2", "svg2"], ["xattention", "xattention", "xattention"]]
    assert not Experts((second, first)).simple and Experts((first, second)).point_table() == table


def test_a_calibration_of_points_is_enabled(tmp_path):
    model = wan_transformer(layers=2)
    made = calibration([[0, 1], [2, 1]], model=fingerprint(model), settings={"dense_steps": 0})
    path = made.save(tmp_path / "a.heart.json")
    inputs = wan_context(model).branches[0].inputs
    with torch.no_grad():
        dense = model(**inputs, return_dict=False)[0]
        with heart.enabled(model, str(path), force_sparse=True):
            sparse = model(**inputs, return_dict=False)[0]
    assert not torch.equal(sparse, dense) and torch.isfinite(sparse).all()


def test_a_calibration_with_the_rest_brings_it(tmp_path):
    from heart_attention import api

    model = wan_transformer(layers=2)
    points = [p.to_dict() for p in points_of(S, (0.3, 0.7), rest="mean")]
    made = Calibration(points=points, choice=np.zeros((2, 2), int), model=fingerprint(model))
    config, _ = api.resolve(str(made.save(tmp_path / "a.heart.json")), model)
    assert config.rest == "mean" and config.points is None
