"""Methods' names: rows are what they are called."""

from pathlib import Path

import pytest
from calibrations_for_tests import paper_calibration, points_calibration

import heart_attention as heart
from heart_attention import Calibration, HeartError, presets, tiny
from heart_attention.api import resolve
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
    """A file whose heads have different backbones is the row `heart`; a budget in the name solves it anew."""
    path = points_calibration(tmp_path / "m.heart.json")
    files = methods.sort_calibrations([path])
    assert list(files) == [("heart", "points")]
    methods.check(["dense", "heart@0.3"], files, "other")
    plain, again, other = (
        methods.build(n, tiny_pipe, "tiny", files).config for n in ("heart", "heart@0.5", "heart@0.3")
    )
    assert plain.points is not None and type(plain.reuse).__name__ == "TMR"
    assert again.points == plain.points and other.points != plain.points  # 0.5 is what the file was made for
    assert other.thresholds.solver["time"] <= other.thresholds.solver["budget"]["max_time"]
    with pytest.raises(HeartError, match="needs a calibration of operating points.*--points default"):
        methods.check(["heart"], {}, "other")


def test_of_files_for_several_budgets_the_nearest_is_taken(tiny_pipe, tmp_path):
    paths = [
        points_calibration(tmp_path / f"{b}.heart.json", budget=f"time={b}", seed=i) for i, b in enumerate((0.3, 0.6))
    ]
    files = methods.sort_calibrations(paths)
    for name, path in (("heart@0.3", paths[0]), ("heart@0.35", paths[0]), ("heart@0.6", paths[1])):
        made_for = Calibration.load(path)
        config = methods.build(name, tiny_pipe, "tiny", files).config
        assert (config.thresholds.E == made_for.E).all()
        assert config.thresholds.settings["budget"] == f"time={name[6:]}"
    with pytest.raises(HeartError, match="are for one method"):
        methods.build("heart", tiny_pipe, "tiny", files)


def test_a_budget_after_the_name(tiny_pipe):
    assert methods.build("xattention@0.8", tiny_pipe, "tiny").config.thresholds == 0.8
    assert type(methods.build("svg2+tmr@0.5", tiny_pipe, "tiny").config.reuse).__name__ == "TMR"
    shared, sparser = (methods.build(f"xattention+joint{b}", tiny_pipe, "tiny").config for b in ("", "@0.7"))
    assert sparser.thresholds.sparsity > shared.thresholds.sparsity
    for name in ("heart@", "xattention@many", "heart@1.5", "dense@0.5"):
        with pytest.raises(HeartError):
            methods.parse(name)


def test_a_budget_out_of_reach_names_what_is_reachable(tiny_pipe, tmp_path):
    files = methods.sort_calibrations([points_calibration(tmp_path / "m.heart.json")])
    with pytest.raises(
        HeartError, match=r"the least that these points reach with 5 dense steps of 50 is 0\.\d+"
    ) as told:
        methods.build("heart@0.12", tiny_pipe, "tiny", files)
    methods.build(f"heart@{str(told.value).rsplit(' ', 1)[1]}", tiny_pipe, "tiny", files)


def test_every_row_that_is_run_unless_told_ships_with_its_calibration():
    methods.check(methods.DEFAULT, {}, "tiny")
    methods.check(methods.FULL, {}, "tiny")
    methods.check(methods.shipped_rows(), {}, "tiny")
    assert methods.shipped_rows()[:5] == methods.DEMO


# What the paper's protocol gains for SVG2 is not found again on other prompts (docs/reproduction.md).
WORST = {"hunyuan-svg2-paper.heart.json": 1.1}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*-paper.heart.json")), ids=lambda p: p.name)
def test_shipped_calibrations_by_the_papers_protocol_are_what_they_say(path, tiny_pipe):
    made = Calibration.load(path)
    assert methods.kind_of(made) == "paper" and made.shipped and made.method == "probes"
    assert made.solver["proven"] and made.solver["sparsity"] >= made.solver["budget"]["min_sparsity"]
    for contexts, worst in {"calibration": 1.0, "held_out": WORST.get(path.name, 1.0)}.items():
        shared, chosen = (made.verification[contexts][side] for side in ("shared", "chosen"))
        assert chosen["error"] < worst * shared["error"] and abs(chosen["sparsity"] - shared["sparsity"]) < 0.02
    row = methods.build(f"{made.backbone['name']}+heart", tiny_pipe, "tiny")
    assert row.config.thresholds.method == "probes"


def test_the_students_operating_points_ship_and_are_found_by_name(tiny_pipe):
    made, student = Calibration.load(FOLDER / "student.heart.json"), tiny.load("student")
    assert methods.kind_of(made) == "points" and made.shipped and made.steps == 8 and made.solver["proven"]
    shared, chosen = (made.verification["held_out"][side] for side in ("shared", "chosen"))
    assert chosen["cost"] < shared["cost"]
    config = methods.build("heart", student, "tiny-student").config
    assert resolve("heart", student)[0].points == config.points is not None
    assert Path(presets.shipped_heart(student.transformer)).name == "student.heart.json"
    with pytest.raises(HeartError, match="own weights and this model has others"):
        heart.enable(tiny_pipe, str(FOLDER / "student.heart.json"))
