"""Files of version 1 load as they did: the same thresholds, tables and figures."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

import heart_attention
from heart_attention.calibration.file import Calibration
from heart_attention.errors import HeartError

DATA = Path(__file__).parents[1] / "helpers" / "calibrations_v1"
FILES = sorted(DATA.glob("*.heart.json"))


def test_there_are_files_of_version_1():
    assert [p.name for p in FILES] == ["svg2.heart.json", "xattention.heart.json"]
    assert all(json.loads(p.read_text())["schema"] == "heart-calibration/1" for p in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_file_of_version_1_is_the_same_calibration(path, tmp_path):
    old, new = json.loads(path.read_text()), Calibration.load(path)
    for name in ("thresholds", "candidates", "E", "S"):
        assert np.array_equal(getattr(new, name), np.array(old[name])), name
    for name in ("backbone", "method", "error", "solver", "verification", "settings", "extra", "steps", "seed"):
        assert getattr(new, name) == old[name], name
    assert new.model == {**old["model"], "values_digest": None}
    assert new.simple and new.phase_count == 1 and new.rest == "drop" and len(new.points) == len(old["candidates"])
    saved = new.save(tmp_path / "new.heart.json")
    assert json.loads(saved.read_text())["schema"] == "heart-calibration/2"
    assert Calibration.load(saved) == new


def test_shipped_files_load_and_are_known_as_shipped():
    folder = Path(heart_attention.__file__).parent / "tiny" / "calibrations"
    files = sorted(folder.glob("*.heart.json"))
    assert files
    for path in files:
        assert Calibration.load(path).shipped
    assert not Calibration.load(FILES[0]).shipped


def test_orders_of_every_head_survive():
    data = json.loads(FILES[1].read_text())
    table = [["raster", "4x4x4", "raster", "1x8x8"]] * 6
    data["settings"]["order"] = table
    new = Calibration.from_dict(data)
    assert all(point["order"] == table for point in new.points) and new.simple
    assert Calibration.from_dict(json.loads(new.to_bytes())) == new


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("thresholds"), "lacks thresholds"),
        (lambda d: d.pop("backbone"), "lacks backbone"),
        (lambda d: d["thresholds"][0].pop(), "rectangular"),
        (lambda d: d["thresholds"].pop(), "5×4 heads but its model has 6×4"),
        (lambda d: d["thresholds"][0].__setitem__(0, 1.5), "runs from"),
        (lambda d: d["thresholds"][0].__setitem__(0, 0.87), "among its candidates"),
        (lambda d: d.update(candidates=[0.9, 0.85, 0.95]), "must ascend"),
        (lambda d: d.update(candidates="all"), "table of numbers"),
        (lambda d: d.update(colour="red"), "unknown fields"),
        (lambda d: d.update(backbone="xattention"), "backbone is str"),
        (lambda d: d.update(settings=3), "settings is int"),
        (lambda d: d.update(model=3), "not a fingerprint"),
    ],
)
def test_damage_in_version_1_is_refused(change, words):
    data = copy.deepcopy(json.loads(FILES[0].read_text()))
    change(data)
    with pytest.raises(HeartError, match=words) as caught:
        Calibration.from_dict(data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300
