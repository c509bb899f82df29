"""Methods' names: rows are what they are called."""

from pathlib import Path

import pytest
from calibrations_for_tests import paper_calibration

from heart_attention import Calibration, HeartError, tiny
from heart_attention.evaluation import methods

FOLDER = Path(tiny.path()).parent / "calibrations"
JOINT = str(FOLDER / "xattention.heart.json")


@pytest.fixture
def by_protocol(tmp_path):
    """A calibration that says it was made as the paper makes them."""
    return paper_calibration(tmp_path / "x.heart.json")


@pytest.mark.parametrize("name", ["flash", "xattention+magic", "dense+tmr", "xattention+"])
def test_unknown_methods_are_refused(tiny_pipe, name):
    with pytest.raises(HeartError, match="unknown method"):
        methods.build(name, tiny_pipe, "tiny")


def test_no_row_is_forced(tiny_pipe):
    for name in ("xattention", "svg2", "xattention+tmr", "xattention+joint"):
        assert not methods.build(name, tiny_pipe, "tiny").config.force_sparse


@pytest.mark.parametrize("part", ["ebc", "heart"])
def test_the_papers_rows_need_a_calibration_by_its_protocol(tiny_pipe, part, by_protocol):
    with pytest.raises(HeartError, match="heart calibrate --model other --backbone xattention --method probes"):
        methods.build(f"xattention+{part}", tiny_pipe, "other")
    with pytest.raises(HeartError, match=r"name it xattention\+joint"):
        methods.build(f"xattention+{part}", tiny_pipe, "other", methods.sort_calibrations([JOINT]))
    config = methods.build(f"xattention+{part}", tiny_pipe, "other", methods.sort_calibrations([by_protocol])).config
    assert config.thresholds.method == "probes"
    assert type(config.reuse).__name__ == ("TMR" if part == "heart" else "Always")


def test_joint_is_a_row_of_its_own(tiny_pipe):
    config = methods.build("xattention+joint", tiny_pipe, "tiny").config
    assert config.thresholds.method == "joint" and type(config.reuse).__name__ == "TMR"


def test_a_calibration_brings_its_whole_operating_point(tiny_pipe, tmp_path):
    from dataclasses import replace

    made = Calibration.load(JOINT)
    settings = {**made.settings, "order": "tiles", "dense_steps": 3}
    other = replace(made, points=None, choice=None, settings=settings, backbone={**made.backbone, "stride": 4})
    files = methods.sort_calibrations([str(other.save(tmp_path / "o.heart.json"))])
    config = methods.build("xattention+joint", tiny_pipe, "tiny", files).config
    assert (config.order, config.dense_steps, config.backbone.stride) == ("tiles", 3, 4)


def test_a_file_that_no_method_uses_is_refused(by_protocol):
    with pytest.raises(HeartError, match=r"is for xattention\+joint, not among the methods"):
        methods.check(["dense", "svg2"], methods.sort_calibrations([JOINT]), "tiny")
    methods.check(["xattention+heart"], methods.sort_calibrations([by_protocol]), "other")


def test_kinds_of_calibration(by_protocol):
    assert methods.kind_of(Calibration.load(JOINT)) == "joint"
    assert methods.kind_of(Calibration.load(by_protocol)) == "paper"


def test_heart_takes_points_of_several_kinds(tiny_pipe, tmp_path):
    """A file whose heads have different backbones is the row `heart`, at whatever budget its name tells."""
    from dataclasses import replace

    import numpy as np

    made = Calibration.load(JOINT)
    points = [
        {"backbone": made.backbone, "threshold": 0.9, "rest": "drop", "order": "raster"},
        {"backbone": {**made.backbone, "stride": 4}, "threshold": 0.8, "rest": "drop", "order": "tiles"},
    ]
    choice = np.arange(24).reshape(6, 4) % 2
    mixed = replace(
        made, thresholds=None, backbone=None, candidates=None, E=None, S=None, bands=None, cost=None, points=points,
        choice=choice, settings={}, shipped=False,
    )  # fmt: skip
    files = methods.sort_calibrations([str(mixed.save(tmp_path / "m.heart.json"))])
    assert list(files) == [("heart", "points")]
    methods.check(["dense", "heart@0.25"], files, "other")
    config = methods.build("heart@0.25", tiny_pipe, "tiny", files).config
    assert config.points is not None and type(config.reuse).__name__ == "TMR"
    with pytest.raises(HeartError, match="needs a calibration of operating points"):
        methods.check(["heart"], {}, "other")
