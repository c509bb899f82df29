"""Tables of costs: what they decide, how they are read, and that shipped ones are sound."""

import json

import pytest
import torch

from heart_attention.backbones import SVG2, XAttention
from heart_attention.errors import HeartError
from heart_attention.online import cost_model
from heart_attention.online.cost_model import Costs, CostTable, Line, Share

SHAPE = (1, 4, 4096, 32)
FREE = Line(0.0, 0.0)


def table(**changes):
    free = dict.fromkeys(("prediction", "drift", "first", "means"), FREE)
    costs = Costs(**{"dense": Line(0, 1e-11), "kernel": Line(0, 1e-11), **free, **changes})
    return CostTable("made up", "a test", 0.0, {"block": {32: costs}, "cluster": {32: costs}})


def test_a_first_clustering_is_bounded_by_its_iterations():
    svg2 = SVG2(38, 125, init_iters=50, step_iters=2)
    later = Line(0, 1e-4 / svg2.prediction_work(SHAPE))
    costs = Costs(Line(0, 1e-11), Line(0, 1e-11), later, FREE, Line(9.0, 0), FREE)
    busy = CostTable("made up", "", 0.0, {"block": {32: costs}, "cluster": {32: costs}})
    assert busy.first_pays([Share(SHAPE, svg2, "drop", 0.5)], 0.3, calls=20)  # 25 times 0.1 ms, not 9 s
    assert not busy.first_pays([Share(SHAPE, svg2, "drop", 1.0)], 0.3, calls=20)  # nothing to be won


def test_densities_are_rounded_before_they_are_compared():
    costs = table()
    a, b = (costs.seconds([Share(SHAPE, XAttention(), "drop", x)], 0.3) for x in (0.5001, 0.4999))
    assert a == b


def test_heads_of_different_backbones_add_up():
    costs = table()
    one = costs.seconds([Share(SHAPE, XAttention(), "drop", 0.25)], 1.0)
    two = costs.seconds([Share((1, 2, 4096, 32), x, "drop", 0.25) for x in (XAttention(), SVG2())], 1.0)
    assert one == pytest.approx(two)


def test_inside_a_generation_fixed_parts_count_twice():
    costs = table(drift=Line(2e-3, 1e-9), prediction=Line(1e-3, 1e-12), means=Line(5e-4, 0.0))
    one, both = Share(SHAPE, XAttention(), "drop", 0.5), Share(SHAPE, SVG2(), "mean", 0.5)
    assert costs.cold_seconds([one], 0.5) == pytest.approx(2e-3 + 0.5e-3)
    assert costs.cold_seconds([one, both], 0.0) == pytest.approx(2e-3 + 2e-3 + 5e-4)


def test_what_a_mask_is_likely_to_cost():
    assert XAttention(8, 64).expected_cost(4096, 0.9) == SVG2(38, 125).expected_cost(4096, 0.9) == 0.5
    assert XAttention(8, 64).expected_cost(64, 0.9) == 1.0  # a single block
    assert SVG2(128, 256, rank="error").expected_cost(4096, 0.1) == pytest.approx(0.1 + 256 / 4096)


def test_the_margin_counts():
    assert table().pays(0.99, 1.0)
    assert not CostTable("made up", "", 0.05, table().entries).pays(0.99, 1.0)


@pytest.mark.parametrize("path", sorted(cost_model.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_shipped_tables_are_sound(path):
    found = cost_model.shipped(path.stem)
    assert found.kind == path.stem and found.origin.startswith(("measured", "reasoned")) and 0 <= found.margin <= 0.1
    assert CostTable.from_dict(json.loads(json.dumps(found.to_dict()))) == found and len(found.digest) == 12
    long, short = (1, 12, 32760, 128), (1, 12, 64, 128)
    for backbone in (XAttention(), SVG2()):
        assert found.pays(*found.seconds([Share(long, backbone, "drop", 0.1)], 0.3))
        assert not found.pays(*found.seconds([Share(short, backbone, "drop", 0.9)], 1.0))


def test_every_kind_of_device_has_a_table():
    assert {"cpu-c", "cpu-portable", "cuda-sm80", "cuda-sm90", "cuda-sm100"} <= {
        p.stem for p in cost_model.FOLDER.glob("*.json")
    }
    assert cost_model.kind_of(torch.device("cpu"), "cpu") == "cpu-c"
    assert cost_model.kind_of(torch.device("cpu"), "gather") == "cpu-portable"
    with pytest.raises(HeartError, match="no table of costs for 'abacus'"):
        cost_model.shipped("abacus")


@pytest.mark.parametrize("change", [
    {"schema": 9}, {"entries": {}}, {"entries": 3}, {"margin": float("nan")}, {"margin": -1}, {"extra": 1},
    {"entries": {"block": {"32": {}}, "cluster": {"32": {}}}},
    {"entries": {"block": {"0": None}, "cluster": {}}},
    *({"entries": {name: {size: parts["32"]} for name, parts in table().to_dict()["entries"].items()}}
      for size in ("0", "-32", "1" + "0" * 400)),
])  # fmt: skip
def test_an_odd_table_is_refused_in_one_sentence(change):
    with pytest.raises(HeartError) as caught:
        CostTable.from_dict({**table().to_dict(), **change})
    assert len(str(caught.value)) < 300
