"""The roofline projection: the paper's dense latencies as predictions, laws of the model, the command."""

import argparse
import json

import pytest

from heart_attention.errors import HeartError
from heart_attention.evaluation import projection

A800 = projection.DEVICES["a800"]
WAN = projection.MODELS["wan2.1-1.3b"]


def test_token_counts_are_the_papers():
    assert WAN.tokens == 32760
    assert projection.MODELS["wan2.1-1.3b-720p"].tokens == 75600
    assert projection.MODELS["hunyuanvideo-13b"].tokens == 33 * 30 * 45 + 256


@pytest.mark.parametrize("row", projection.validation(), ids=lambda r: f"{r['model']} {r['what']}")
def test_the_papers_dense_latencies(row):
    assert abs(row["error"]) <= 0.15


def test_only_one_latency_is_fitted():
    rows = projection.validation()
    assert [(r["model"], r["what"]) for r in rows if r["fitted"]] == [("wan2.1-1.3b", "attention")]
    assert len({device.efficiency for device in projection.DEVICES.values()}) == 1
    fit = projection.attention_flops(WAN) * 100 / 107 / 312e12
    assert projection.EFFICIENCY == pytest.approx(fit, abs=5e-4)


def test_attention_is_quadratic_and_the_rest_linear():
    double = projection.replace(WAN, tokens=2 * WAN.tokens)
    attention, other = projection.dense_times(WAN, A800)
    attention2, other2 = projection.dense_times(double, A800)
    assert attention2 == pytest.approx(4 * attention)
    assert other2 == pytest.approx(2 * other, rel=0.01)


def test_a_full_density_is_dense():
    p = projection.project(WAN, A800, density=1.0)
    assert (p.method, p.attention_speedup, p.total_speedup, p.prediction_s) == ("dense", 1.0, 1.0, 0.0)
    assert p.projected


@pytest.mark.parametrize("backbone", ["xattention", "svg2"])
@pytest.mark.parametrize("name", projection.MODELS)
def test_less_work_takes_less_time(name, backbone):
    model = projection.MODELS[name]
    times = [projection.project(model, A800, d, 0.5, backbone).total_s for d in (0.1, 0.2, 0.4, 0.7)]
    assert times == sorted(times)
    times = [projection.project(model, A800, 0.3, r, backbone).total_s for r in (0.0, 0.2, 0.5, 0.9)]
    assert times == sorted(times)


def test_reuse_can_save_no_more_than_prediction():
    every, reused = (projection.project(WAN, A800, 0.3, r) for r in (1.0, 0.0))
    assert 0 < every.attention_s - reused.attention_s < every.prediction_s


@pytest.mark.parametrize("backbone", ["xattention", "sparge"])  # one that was counted, one that was not
def test_a_given_prediction_share(backbone):
    p = projection.project(WAN, A800, 0.3, 1.0, backbone, prediction_share=0.1)
    dense, _ = projection.dense_times(WAN, A800)
    assert p.prediction_s == pytest.approx(0.1 * dense * 45 / 50)


@pytest.mark.parametrize(
    "wrong, named",
    [({"density": 0}, "density of 0"), ({"density": 1.5}, "1.5"), ({"refresh": -1}, "refresh rate of -1"),
     ({"dense_steps": 50}, "50 dense steps"), ({"backbone": "sparge"}, "'sparge'")],
)  # fmt: skip
def test_wrong_figures_are_refused(wrong, named):
    with pytest.raises(HeartError, match=named):
        projection.project(WAN, A800, **{"density": 0.5, **wrong})


def command(capsys, *words):
    parser = argparse.ArgumentParser()
    projection.add_arguments(parser)
    assert projection.run(parser.parse_args(words)) == 0
    return capsys.readouterr().out


def test_table_says_projected(capsys):
    text = command(capsys, "--model", "wan2.1-14b", "--gpu", "all", "--density", "0.25", "--refresh", "0.3")
    assert text.startswith("PROJECTED") and text.count("| wan2.1-14b |") == 2 * len(projection.DEVICES)


def test_json_marks_every_row(capsys):
    data = json.loads(command(capsys, "--json", "--steps", "30"))
    assert data["projected"] and all(row["projected"] for row in data["rows"])
    assert [row["method"] for row in data["rows"]] == ["dense", "xattention"]
    assert data["rows"][0]["attention_s"] == pytest.approx(projection.dense_times(WAN, A800)[0] * 30 / 50)


def test_validation_from_the_command(capsys):
    assert "107 s" in command(capsys, "--validate")
    assert len(json.loads(command(capsys, "--validate", "--json"))["rows"]) == 8


def test_measured_densities(capsys, tmp_path):
    path = tmp_path / "results.json"
    rows = [
        {"method": "dense", "density": None},
        {"method": "xattention", "density": 0.2, "refresh_rate": None},
        {"method": "svg2+heart", "density": 0.2, "refresh_rate": 0.5},
        {"method": "svg2+heart", "density": 0.4, "refresh_rate": 0.3},
    ]
    path.write_text(json.dumps({"rows": rows}))
    found = json.loads(command(capsys, "--results", str(path), "--json"))["rows"]
    fewer = json.loads(command(capsys, "--results", str(path), "--json", "--dense-steps", "0"))["rows"]
    assert fewer[1]["attention_s"] < found[1]["attention_s"]  # the option counts here too
    assert [r["method"] for r in found] == ["dense", "xattention", "svg2+heart"]
    assert (found[2]["density"], found[2]["refresh"]) == (pytest.approx(0.3), pytest.approx(0.4))
    assert (found[1]["density"], found[1]["refresh"]) == (0.2, 1.0)
    path.write_text(json.dumps({"rows": rows[:1]}))
    with pytest.raises(HeartError, match="no row with a density"):
        projection.from_results(path, [WAN], [A800])
