"""The report's pictures as data: right marks, right values on hover, right Pareto front."""

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from heart_attention.evaluation.report import heads, plots


def tips(svg: str) -> list[str]:
    return [e.attrib["data-tip"] for e in ET.fromstring(svg).iter() if "data-tip" in e.attrib]


def test_heat_map_has_a_cell_for_each_value():
    svg = plots.heat_map([[0.1, None], [0.5, 1.0]], lambda i, j, v: f"{i},{j}={v}", "x <y>", "layer", "head")
    assert tips(svg) == ["0,0=0.1", "0,1=None", "1,0=0.5", "1,1=1.0"]


def test_timeline_names_states():
    assert tips(plots.timeline([("0.0", "dnr")], "x"))[1:] == ["0.0, step 1: new mask", "0.0, step 2: mask reused"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_pareto_front_is_exactly_the_unbeaten(points):
    front = {points[i] for i in plots.pareto(points)}
    beaten = {p for p in points if any(o != p and o[0] >= p[0] and o[1] >= p[1] for o in points)}
    assert front == set(points) - beaten


def test_scatter_and_bars_are_well_formed():
    points = [{"name": "a", "x": 1.2, "y": 30.0}, {"name": "b+heart", "x": 1.5, "y": 31.0}]
    assert len(tips(plots.scatter(points, "speed", "PSNR", "l"))) == 2
    assert len(tips(plots.scatter(points[:1], "speed", "PSNR", "l"))) == 1
    assert tips(plots.stacked_bars([("a", [("drift", 0.5), ("x", 0.0)])], "s", "l")) == ["a, drift: 0.50 s"]


def test_heads_view_from_engine_records():
    record = {
        "branch": "cond", "dense": [[True, False, False]],
        "density": [[[1.0, 1.0], [0.5, 0.2], [0.7, 0.4]]], "refreshed": [[[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]],
    }  # fmt: skip
    found = heads.view({"records": [record], "config": {"_data": {"thresholds": [[0.8, 0.9]]}}})
    assert found["threshold"] == [[0.8, 0.9]]
    assert found["density"] == [[0.6, 0.30000000000000004]]
    assert found["timeline"] == [["dnr", "dnn"]]
    assert heads.view({"records": []}) is None
    assert heads.thresholds({"config": {"thresholds": 0.9}}, 1, 2) == [[0.9, 0.9]]
