"""Stored ratios: what counts as a fall, and what a file holds. No benchmark runs here, and nothing is timed."""

import json

import pytest
from benchmarks.ratios import Ratio, settle

from benchmarks import ratios


def stored(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("higher", "now", "fell"), [(True, 1.79, True), (True, 1.81, False), (False, 2.23, True), (False, 2.22, False)]
)
def test_more_than_a_tenth_worse_is_a_regression(tmp_path, capsys, higher, now, fell):
    settle("b", [Ratio("a", 2.0, "×", higher)], True, tmp_path)
    told = settle("b", [Ratio("a", now, "×", higher), Ratio("new", 1.0, "×")], False, tmp_path)
    assert len(told) == fell and ("REGRESSION a" in capsys.readouterr().out) == fell
    assert stored(tmp_path)["ratios"].keys() == {"a"}  # comparing stores nothing


def test_storing_keeps_what_was_not_measured_and_says_where_it_comes_from(tmp_path):
    settle("b", [Ratio("a", 2.0, "×"), Ratio("b", 3.0, "× less", False)], True, tmp_path)
    settle("b", [Ratio("a", 1.0, "×")], True, tmp_path)
    found = stored(tmp_path)
    assert {name: r["value"] for name, r in found["ratios"].items()} == {"a": 1.0, "b": 3.0}
    assert found["machine"]["kind"] == ratios.kind() and found["machine"]["cores"] >= 1
    assert found["versions"].keys() == {found["ratios"]["a"]["day"]}
    assert {"torch", "heart_attention", "python"} <= found["versions"][found["ratios"]["a"]["day"]].keys()


def test_another_kind_of_machine_has_nothing_to_compare_with(tmp_path, capsys, monkeypatch):
    settle("b", [Ratio("a", 2.0, "×")], True, tmp_path)
    monkeypatch.setattr(ratios, "kind", lambda: "other")
    assert settle("b", [Ratio("a", 0.1, "×")], False, tmp_path) == []
    assert "no stored ratios for this kind of machine (other)" in capsys.readouterr().out


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_ratio_that_could_not_be_measured_is_not_stored(tmp_path, value):
    with pytest.raises(SystemExit, match="not stored: a is not above 0"):
        settle("b", [Ratio("a", value, "×")], True, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_coarse_clock_stores_nothing(tmp_path, monkeypatch):
    ticks = iter([0.0, 0.0, 0.004])
    monkeypatch.setattr(ratios.time, "process_time", lambda: next(ticks))
    with pytest.raises(SystemExit, match=r"moves by 4\.0 ms; run it without ulimit -t"):
        settle("b", [Ratio("a", 1.0, "×")], True, tmp_path)


def test_stored_files_are_whole():
    for path in ratios.FOLDER.glob("*.json"):
        found = json.loads(path.read_text())
        assert path.name == f"{found['benchmark']}.{found['machine']['kind']}.json"
        assert all(r["value"] > 0 and r["unit"] and r["day"] in found["versions"] for r in found["ratios"].values())
