"""Calibration files: what goes in comes out, byte for byte; anything else is refused in one sentence."""

from __future__ import annotations

import copy
import json
import math
import random
import resource

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_calibrations import made
from thoroughness import examples

from heart_attention import SVG2, XAttention
from heart_attention.calibration import file
from heart_attention.calibration.file import Calibration
from heart_attention.errors import HeartError

# ---------------------------------------- round trips


def test_save_and_load_give_the_same(tmp_path, wan):
    one = made(wan)
    path = one.save(tmp_path / "a.heart.json")
    two = Calibration.load(path, wan)
    assert two == one and hash(two) == hash(one)
    for name in ("thresholds", "candidates", "E", "S", "bands"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert two.save(tmp_path / "b.heart.json").read_bytes() == path.read_bytes()
    assert json.loads(path.read_text())["schema"] == "heart-calibration/2"


def test_bytes_depend_on_the_content_alone(tmp_path):
    assert made().to_bytes() == made().to_bytes()
    assert made().to_bytes() != made(seed=8).to_bytes()
    assert not list(tmp_path.iterdir())


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6), st.booleans())
def test_any_tables_survive(layers, heads, count, seed, with_bands):
    rng = np.random.default_rng(seed)
    candidates = np.sort(rng.choice(np.arange(1, 1001), count, replace=False)) / 1000
    shape = (layers, heads, count)
    one = Calibration(
        thresholds=candidates[rng.integers(0, count, shape[:2])],
        backbone=SVG2().to_dict(),
        candidates=candidates,
        E=rng.lognormal(-15, 5, shape),
        S=rng.random(shape),
        bands=rng.random((*shape, 4)) if with_bands else None,
    )
    assert Calibration.from_dict(json.loads(one.to_bytes())) == one


def test_a_table_without_measurements(tmp_path):
    bare = Calibration([[0.9, 1.0]], {"name": "svg2"})
    assert Calibration.load(bare.save(tmp_path / "x.heart.json")) == bare
    assert bare.sparsity is None and bare.choice.tolist() == [[0, 1]] and bare.candidates is None
    with pytest.raises(HeartError, match="nothing to solve"):
        bare.resolve(0.5)


def test_arrays_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        made().thresholds[0, 0] = 0.5


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = made().save(tmp_path / "a.heart.json")
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises((OSError, HeartError), match="No space"):
        made(seed=9).save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.heart.json"]


# ---------------------------------------- refusals


def edited(change) -> dict:
    data = json.loads(made().to_bytes())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="heart-calibration/3"), "schema"),
        (lambda d: d.update(schema=["x"] * 1000), "schema"),
        (lambda d: d.pop("schema"), "no calibration"),
        (lambda d: d.update(colour="red"), "unknown fields"),
        (lambda d: d.update(thresholds=[[0.9]]), "unknown fields"),
        (lambda d: d.pop("points"), "lacks points"),
        (lambda d: d.pop("choice"), "lacks choice"),
        (lambda d: d.update(method="magic"), "must be one of joint"),
        (lambda d: d["choice"][0][0].pop(), "rectangular"),
        (lambda d: d["choice"][0].pop(), "has shape"),
        (lambda d: d.update(choice=[[[]]]), "has shape"),
        (lambda d: d["choice"][0][0].__setitem__(0, 3), "runs from"),
        (lambda d: d["choice"][0][0].__setitem__(0, -1), "runs from"),
        (lambda d: d["choice"][0][0].__setitem__(0, 0.5), "not whole"),
        (lambda d: d["choice"][0][0].__setitem__(0, "0"), "rectangular table of numbers"),
        (lambda d: d["choice"][0][0].__setitem__(0, None), "rectangular table of numbers"),
        (lambda d: d.update(choice=[[[True, True], [True, True], [True, True]]]), "table of numbers"),
        (lambda d: d.update(points=[]), "empty"),
        (lambda d: d.update(points={"a": 1}), "no list"),
        (lambda d: d["points"].append(3), "an operating point is an object"),
        (lambda d: d["points"][0].pop("rest"), "an operating point is an object"),
        (lambda d: d["points"][0].update(colour="red"), "an operating point is an object"),
        (lambda d: d["points"][0].update(threshold=1.5), "runs from"),
        (lambda d: d["points"][0].update(threshold=0), "must lie above 0"),
        (lambda d: d["points"][0].update(threshold="0.9"), "table of numbers"),
        (lambda d: d["points"][0].update(rest="forget"), "rest is 'forget'"),
        (lambda d: d["points"][0].update(rest=[]), "rest is"),
        (lambda d: d["points"][0].update(order="spiral"), "order is 'spiral'"),
        (lambda d: d["points"][0].update(order=7), "order is 7"),
        (lambda d: d["points"][0].update(backbone="xattention"), "backbone is str"),
        (lambda d: d["points"][0].update(backbone={"stride": 16}), "no name"),
        (lambda d: d["points"].append(d["points"][0]), "has shape"),
        (lambda d: d["E"][0][0][0].__setitem__(0, -1e-9), "runs from"),
        (lambda d: d["E"][0][0][0].__setitem__(0, 1e999), "not finite"),
        (lambda d: d["S"][0][0][0].__setitem__(0, 1.0001), "runs from"),
        (lambda d: d["S"][0][0].pop(), "rectangular"),
        (lambda d: d["S"].append(d["S"][0]), "not for one phase"),
        (lambda d: d.pop("S"), "all of them or none"),
        (lambda d: d.update(cost=d["S"][0]), "not for one phase"),
        (lambda d: d["bands"][0][0][0][0].pop(), "rectangular"),
        (lambda d: d.update(phases={"sigmas": [0.5]}), "sigmas, weights and steps"),
        (lambda d: d.update(phases={"sigmas": [0.5], "weights": [1.0], "steps": [5]}), "has shape"),
        (lambda d: d.update(phases=[1]), "phases is list"),
        (lambda d: d.update({name: [d[name]] for name in ("choice", "E", "S", "bands")}), "of one phase in three"),
        (lambda d: d["settings"].update(dense_steps="5"), "setting dense_steps is '5'"),
        (lambda d: d["settings"].update(grid=[1, 2]), "setting grid"),
        (lambda d: d["settings"].update(order="spiral"), "order is 'spiral'"),
        (lambda d: d.update(steps=0), "steps is 0"),
        (lambda d: d.update(steps=2.5), "steps is 2.5"),
        (lambda d: d.update(frames=True), "frames is True"),
        (lambda d: d.update(seed=-1), "seed is -1"),
        (lambda d: d.update(scheduler=3), "scheduler is 3"),
        (lambda d: d.update(model={"class": "Wan"}), "not a fingerprint"),
        (lambda d: d["solver"].update(objective=float("1e999")), "no finite number"),
        (lambda d: d["extra"].update(x=10**30), "no finite number"),
    ],
)
def test_damaged_contents_are_refused(change, words):
    with pytest.raises(HeartError, match=words) as caught:
        Calibration.from_dict(edited(change))
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "NaN", '{"schema": NaN}', "\x00", "[" * 100_000])
def test_files_of_another_kind_are_refused(tmp_path, text):
    path = tmp_path / "bad.heart.json"
    path.write_text(text)
    with pytest.raises(HeartError, match=r"bad\.heart\.json"):
        Calibration.load(path)


def test_nan_inside_a_file_names_the_file(tmp_path):
    path = tmp_path / "bad.heart.json"
    path.write_bytes(made().to_bytes().replace(b'"seed": 7', b'"seed": NaN'))
    with pytest.raises(HeartError, match=r"bad\.heart\.json.*NaN"):
        Calibration.load(path)


def test_missing_and_oversized_files(tmp_path, monkeypatch):
    with pytest.raises(HeartError, match="there is no file"):
        Calibration.load(tmp_path / "none.heart.json")
    path = made().save(tmp_path / "a.heart.json")
    monkeypatch.setattr(file, "LIMIT", 100)
    with pytest.raises(HeartError, match="more than the 100 allowed"):
        Calibration.load(path)


def test_paths_that_lead_nowhere(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for name in ("loop", "a\0b", "x" * 5000):
        with pytest.raises(HeartError) as caught:
            Calibration.load(tmp_path / name)
        assert len(str(caught.value)) <= 300


def test_pickle_is_never_read(tmp_path):
    import pickle

    path = tmp_path / "a.heart.json"
    path.write_bytes(pickle.dumps({"schema": "heart-calibration/1"}))
    with pytest.raises(HeartError, match="not valid JSON"):
        Calibration.load(path)


GOOD = made().to_bytes()


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_random_corruption_is_refused_or_harmless(tmp_path, seed, blows):
    """Flip, cut, double or overwrite bytes: a HeartError, or a calibration that keeps every rule."""
    rng = random.Random(seed)
    data = bytearray(GOOD)
    for _ in range(blows):
        if not data:
            break
        at, kind = rng.randrange(len(data)), rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.randrange(1, 50)]
        elif kind == 2:
            data[at:at] = data[at : at + rng.randrange(1, 50)]
        elif kind == 3:
            data[at : at + 1] = rng.choice([b"1e999", b"-", b"NaN", b"null", b'"', b"[", b"}", b"9" * 400, b"\xff"])
        else:
            data = data[: max(1, at)]
    path = tmp_path / "c.heart.json"
    path.write_bytes(bytes(data))
    try:
        loaded = Calibration.load(path)
    except HeartError as error:
        assert "\n" not in str(error)
        return
    assert np.isfinite(loaded.thresholds).all() and (loaded.thresholds > 0).all() and (loaded.thresholds <= 1).all()
    assert Calibration.from_dict(json.loads(loaded.to_bytes())) == loaded


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(sorted(json.loads(GOOD))), json_values)
def test_any_value_in_any_field_is_refused_or_valid(name, value):
    data = copy.deepcopy(json.loads(GOOD))
    data[name] = value
    try:
        loaded = Calibration.from_dict(data)
    except HeartError:
        return
    assert Calibration.from_dict(json.loads(loaded.to_bytes())) == loaded


# ---------------------------------------- points of several kinds, phases


def mixed(phases=2) -> Calibration:
    """Two backbones, two rests, two orders; the choice and all tables by phase."""
    rng, shape = np.random.default_rng(1), (phases, 3, 2, 4)
    x, s = XAttention().to_dict(), SVG2().to_dict()
    points = [
        {"backbone": x, "threshold": 0.9, "rest": "drop", "order": "raster"},
        {"backbone": x, "threshold": 0.5, "rest": "drop", "order": "4x4x4"},
        {"backbone": s, "threshold": 0.9, "rest": "drop", "order": "raster"},
        {"backbone": s, "threshold": 0.3, "rest": "mean", "order": "raster"},
    ]
    choice, E, S, cost = rng.integers(0, 4, shape[:3]), rng.random(shape), rng.random(shape), rng.random(shape)
    if phases == 1:
        choice, E, S, cost = choice[0], E[0], S[0], cost[0]
    known = (
        {"sigmas": [0.5 / 2**p for p in range(phases - 1)], "weights": [1.0] * phases, "steps": [5] * phases}
        if phases > 1
        else {}
    )
    return Calibration(points=points, choice=choice, E=E, S=S, cost=cost, phases=known)


@pytest.mark.parametrize("phases", [1, 2, 4])
def test_points_of_several_kinds_survive(tmp_path, phases):
    one = mixed(phases)
    again = Calibration.load(one.save(tmp_path / "a.heart.json"))
    assert again == one and again.phase_count == phases and not again.simple
    assert again.backbone is None and again.candidates is None and again.rest is None
    assert again.backbone_names == "xattention+svg2" and (again.layers, again.heads) == (3, 2)
    assert np.array_equal(again.thresholds, np.array([0.9, 0.5, 0.9, 0.3])[one.choice])
    assert again.sparsity == pytest.approx(np.take_along_axis(one.S, one.choice[..., None], -1).mean())
    assert json.loads(one.to_bytes())["choice"] == one.choice.reshape(phases, 3, 2).tolist()


def test_phases_must_fit_their_tables():
    data = json.loads(mixed(3).to_bytes())
    for change, words in (
        (lambda d: d.pop("phases"), "sigmas, weights and steps"),
        (lambda d: d["phases"].update(sigmas=[0.2, 0.5]), "must descend"),
        (lambda d: d["phases"].update(sigmas=[0.5]), "has shape"),
        (lambda d: d["phases"].update(weights=[1, 1, -1]), "runs from"),
        (lambda d: d["E"].pop(), "has shape"),
        (lambda d: d["choice"].pop(), "has shape"),
    ):
        harmed = copy.deepcopy(data)
        change(harmed)
        with pytest.raises(HeartError, match=words):
            Calibration.from_dict(harmed)


def test_one_backbone_in_points_is_the_simple_form():
    simple = made()
    again = Calibration(points=simple.points, choice=simple.choice, E=simple.E, S=simple.S)
    assert again.simple and again.backbone == simple.backbone and again.rest == "drop"
    assert np.array_equal(again.thresholds, simple.thresholds)
    assert np.array_equal(again.candidates, simple.candidates)


def test_non_finite_python_values_are_refused_too():
    with pytest.raises(HeartError, match="not finite"):
        made(E=np.full((3, 2, 3), math.nan))
    with pytest.raises(HeartError, match="no finite number"):
        made(settings={"x": math.inf})
    with pytest.raises(HeartError, match="key that is not text"):
        made(settings={1: 2})


# ---------------------------------------- numbers and texts of a hostile file


def test_errors_that_no_sum_can_hold_are_refused():
    data = made().to_dict()
    place = data["E"] if "E" in data else data["tables"]["E"]
    while isinstance(place[0], list):
        place = place[0]
    place[0] = 1e308
    with pytest.raises(HeartError, match="E runs from"):
        Calibration.from_dict(data)


@pytest.mark.parametrize("odd", ["x" * 300_000, "0.9", True])
def test_one_odd_value_in_a_table_of_numbers(odd):
    """Of one long text NumPy made every number as wide: gigabytes of a small file."""
    table = [[0.5] * 1000, [0.9] * 999 + [odd]]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(HeartError, match="not a rectangular table of numbers"):
        made(thresholds=table)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # kB


@pytest.mark.parametrize("size", [10**400, 7])
def test_a_model_of_another_size_is_one_short_sentence(wan, size):
    data = made(wan).to_dict()
    data["model"]["layers"] = size
    with pytest.raises(HeartError, match="it is damaged") as caught:
        Calibration.from_dict(data)
    assert len(str(caught.value)) <= 300


def test_no_text_of_a_file_steers_a_terminal():
    data = made().to_dict()
    data["method"] = data["scheduler"] = "\x1b[2J"
    try:
        told = repr(Calibration.from_dict(data))
    except HeartError as error:
        told = str(error)
    assert told.isprintable()
