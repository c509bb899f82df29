"""Pictures of a calibration, and `heart show` and `heart solve`."""

from __future__ import annotations

import argparse
import json
import re

import numpy as np
import pytest
from PIL import Image

from heart_attention.calibration import show
from heart_attention.calibration.file import Calibration
from heart_attention.calibration.solve import solver
from heart_attention.cli import calibrate
from heart_attention.errors import HeartError

TAU = np.array([0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98])


@pytest.fixture(scope="module")
def made() -> Calibration:
    rng = np.random.default_rng(0)
    S = (1 - TAU) ** (0.3 + 0.4 * rng.random((6, 4, 1)))
    bands = rng.lognormal(-16, 2, (6, 4, 1, 4)) * ((1 - TAU) ** 2)[:, None]
    E = bands @ np.array((1, 0.5, 0.01, 0.01))
    found = solver.solve(E, S, thresholds=TAU)
    return Calibration(
        found.thresholds,
        {"name": "xattention", "stride": 16, "block": 128},
        "joint",
        candidates=TAU,
        E=E,
        S=S,
        bands=bands,
        solver=found.to_dict(),
        verification={
            "calibration": {"shared": {"error": 4.0}, "chosen": {"error": 3.0}},
            "held_out": {"shared": {"error": 2.0}, "chosen": {"error": 1.0}},
        },
        width=160,
        height=96,
        frames=13,
        steps=25,
        scheduler="UniPCMultistepScheduler",
        prompts={"count": 10, "hash": "ab" * 32},
        seed=3,
    )


@pytest.fixture
def path(made, tmp_path):
    return str(made.save(tmp_path / "a.heart.json"))


def heart(*argv) -> int:
    parser = argparse.ArgumentParser()
    calibrate.register(parser.add_subparsers(required=True))
    args = parser.parse_args([str(a) for a in argv])
    return args.func(args)


# ---------------------------------------- the pictures


def test_the_terminal_picture_tells_every_head(made):
    text = show.text(made)
    rows = [line for line in text.splitlines() if re.match(r" +\d+ .*  0\.\d{3}$", line)]
    ranks = [[int(c) for c in re.findall(r"[ ░▒▓█](\d)", row[5:].split("  0.")[0])] for row in rows]
    assert np.array_equal(TAU[np.array(ranks)], made.thresholds)


def test_the_terminal_picture_has_the_facts(made):
    text = show.text(made)
    for words in ("6 layers × 4 heads", "160×96, 13 frames, 25 steps", "optimum proved", "0.500 of the shared",
                  "shared 0.9", "seed 3", "10 prompts", "xattention stride=16"):  # fmt: skip
        assert words in text


def test_colours_only_when_asked_for(made):
    assert "\x1b[" not in show.text(made)
    coloured = show.text(made, colours=True)
    assert coloured.count("\x1b[48;2;") == made.thresholds.size + len(TAU)


def test_a_bare_table_can_be_shown():
    bare = Calibration(np.linspace(0.5, 1, 24).reshape(4, 6), {"name": "svg2"})
    assert "τ from 0.5 to 1" in show.text(bare)
    assert "τ 0.9" in show.text(Calibration([[0.9]], {"name": "svg2"}))


@pytest.mark.parametrize("matplotlib", [True, False])
def test_png(made, tmp_path, matplotlib):
    if matplotlib:
        pytest.importorskip("matplotlib")
    path = show.picture(made, tmp_path / "deep" / "p.png", matplotlib)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and len(pixels) > 20_000
    found = {tuple(c) for c in np.unique(pixels, axis=0).tolist()}
    share = (np.unique(made.thresholds) - TAU[0]) / (TAU[-1] - TAU[0])
    for wanted in show.colour(share).astype(int):  # every threshold's colour is in the picture
        assert min(max(abs(a - b) for a, b in zip(wanted, c)) for c in found) <= 6


def test_pictures_are_the_same_each_time(made, tmp_path):
    one, two = (show.picture(made, tmp_path / f"{i}.png").read_bytes() for i in (1, 2))
    assert one == two


def test_a_picture_needs_a_png_name(made, tmp_path):
    with pytest.raises(HeartError, match=r"must end in \.png"):
        show.picture(made, tmp_path / "p.jpg")


def test_a_model_of_1600_heads_fits(tmp_path):
    big = Calibration(np.random.default_rng(0).choice(TAU, (40, 40)), {"name": "xattention"}, candidates=None)
    for name, own in (("a.png", None), ("b.png", False)):
        assert show.picture(big, tmp_path / name, own).stat().st_size < 300_000
    assert max(map(len, show.text(big).splitlines())) < 110


# ---------------------------------------- heart show


def test_heart_show(path, tmp_path, capsys):
    assert heart("show", path, "--png", tmp_path / "p.png") == 0
    out = capsys.readouterr().out
    assert "joint error" in out and "p.png" in out and (tmp_path / "p.png").exists()


def test_heart_show_json(path, made, capsys):
    heart("show", path, "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["thresholds"] == {f"{t:g}": int((made.thresholds == t).sum()) for t in TAU}
    assert data["joint_error_of_shared"] == {"calibration": 0.75, "held_out": 0.5}
    assert data["solver"]["proven"] is True and data["layers"] == 6


def test_heart_show_refusals(path, tmp_path):
    with pytest.raises(HeartError, match="give a calibration file"):
        heart("show")
    with pytest.raises(HeartError, match="give a calibration file"):
        heart("show", path, "--import", "x.csv")
    with pytest.raises(HeartError, match="there is no file"):
        heart("show", tmp_path / "none.heart.json")


# ---------------------------------------- heart solve


def test_heart_solve(path, made, tmp_path, capsys):
    out = tmp_path / "b.heart.json"
    assert heart("solve", path, "--budget", "sparsity=0.45", "--out", out) == 0
    assert "min sparsity 0.45" in capsys.readouterr().out
    new = Calibration.load(out)
    assert new.sparsity >= 0.45 - 1e-9 and not np.array_equal(new.thresholds, made.thresholds)


def test_heart_solve_json_and_cbc(path, capsys):
    heart("solve", path, "--budget", "shared=0.9", "--json")
    mine = json.loads(capsys.readouterr().out)
    heart("solve", path, "--budget", "shared=0.9", "--solver", "cbc", "--json")
    theirs = json.loads(capsys.readouterr().out)
    assert mine["changed"] == 0
    assert mine["solver"]["objective"] == pytest.approx(theirs["solver"]["objective"], rel=1e-9)


def test_heart_solve_with_other_weights(path, made, tmp_path):
    heart("solve", path, "--weights", "1,1,1,1", "--out", tmp_path / "w.heart.json")
    new = Calibration.load(tmp_path / "w.heart.json")
    assert np.allclose(new.E, made.bands.sum(-1)) and new.error["weights"] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "nothing to change"),
        (["--budget", "0.999"], "greatest reachable is"),
        (["--budget", "speed=2"], "a budget is"),
        (["--weights", "a,b"], "separated by commas"),
        (["--weights", "1,2"], "four finite numbers"),
        (["--budget", "0.4", "--out", "x.json"], r"ends in \.heart\.json"),
    ],
)
def test_heart_solve_refusals(path, more, words):
    with pytest.raises(HeartError, match=words):
        heart("solve", path, *more)


def test_points_of_several_kinds_are_told_by_phase(tmp_path):
    points = [
        {"backbone": {"name": "xattention"}, "threshold": 0.9, "rest": "drop", "order": "tiles"},
        {"backbone": {"name": "svg2"}, "threshold": 0.3, "rest": "mean", "order": "raster"},
        {"backbone": {"name": "svg2"}, "threshold": 0.5, "rest": "mean", "order": "raster"},
    ]
    mixed = Calibration(
        points=points, choice=[[[0, 1], [1, 1]], [[1, 0], [1, 1]]],
        phases={"sigmas": [0.5], "weights": [1.5, 0.5], "steps": [3, 4]},
    )  # fmt: skip
    told = show.text(mixed)
    assert "phase 0, σ 1 … 0.5, weight 1.5" in told and "xattention τ 0.9, rest drop, tiles" in told
    assert "    0 a b" in told and "τ 0.5" not in told  # nobody took it
    figures = show.summary(mixed)
    assert [p["heads"] for p in figures["points"]] == [2, 6, 0] and figures["phases"]["sigmas"] == [0.5]
    for matplotlib in (True, False):
        if matplotlib:
            pytest.importorskip("matplotlib")
        assert show.picture(mixed, tmp_path / f"{matplotlib}.png", matplotlib).stat().st_size > 1000
