"""Times of points from a table of costs, and budgets of a whole generation."""

from __future__ import annotations

import numpy as np
import pytest

from heart_attention.backbones import SVG2, XAttention
from heart_attention.calibration.solve.times import TimeModel, table_for
from heart_attention.errors import HeartError
from heart_attention.online import cost_model

MODEL = TimeModel("cpu-c", "x", tokens=4096, heads=4, head_dim=32, refresh=0.25, steps=50, dense_steps=5)


def point(backbone, threshold=0.5, rest="drop"):
    return {"backbone": backbone.to_dict(), "threshold": threshold, "rest": rest, "order": "raster"}


def test_a_point_takes_what_the_table_says():
    table = table_for("cpu-c")
    x = XAttention(stride=8, block=64)
    (fixed, rate), dense = MODEL.lines([point(x), point(x, 1.0)], table)
    assert dense.tolist() == [1.0, 0.0]
    costs, shape = table.costs(x, 32), (1, 4, 4096, 32)
    seconds = costs.sparse_seconds(shape, 0.3, 0.25, x, "drop") + costs.first_extra(shape, x) / 45
    assert fixed + 0.3 * rate == pytest.approx(seconds / costs.dense_seconds(shape))


def test_more_refreshes_and_the_rest_cost_time():
    table, s = table_for("cpu-c"), SVG2(38, 125)
    often = TimeModel(**{**MODEL.to_dict(), "refresh": 1.0})
    (rare,), (frequent,) = MODEL.lines([point(s)], table), often.lines([point(s)], table)
    assert frequent[0] > rare[0] and frequent[1] == pytest.approx(rare[1])
    dropped, approximated = MODEL.lines([point(s), point(s, rest="mean")], table)
    assert approximated[0] >= dropped[0]


def test_a_budget_counts_the_dense_steps():
    limit = MODEL.limit(0.25)
    assert limit == pytest.approx((0.25 * 50 - 5) / 45) and MODEL.whole(limit) == pytest.approx(0.25)
    with pytest.raises(HeartError, match="5 dense steps of 50 take more than 0.1"):
        MODEL.limit(0.1)


def test_models_go_through_json_and_damage_is_refused():
    assert TimeModel.from_dict(MODEL.to_dict()) == MODEL
    for harm in ({"tokens": -1}, {"tokens": 1.5}, {"refresh": "x"}, {"kind": None}, {"heads": True}):
        with pytest.raises(HeartError, match="time model"):
            TimeModel.from_dict({**MODEL.to_dict(), **harm})
    with pytest.raises(HeartError, match="times need"):
        TimeModel.from_dict({"kind": "cpu-c"})


def test_a_table_of_ones_own_is_taken(tmp_path):
    from heart_attention.files import write_json

    table = cost_model.shipped("cpu-c")
    write_json(tmp_path / "t.json", table.to_dict())
    assert table_for("cpu-portable", str(tmp_path / "t.json")).digest == table.digest
    assert np.isfinite(MODEL.lines([point(XAttention())], table)).all()
