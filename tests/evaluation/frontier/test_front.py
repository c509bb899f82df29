"""Fronts from made-up results: curves, what is unbeaten, and comparisons at equal speed and at equal quality."""

import math

import pytest

from heart_attention.evaluation.frontier import front, plot

CASES = [(prompt, seed) for prompt in ("a", "b", "c") for seed in (0, 1)]
HARDER = {"a": 0.0, "b": 1.0, "c": -2.0}  # dB that a prompt has more than others, in all methods


def row(method, prompt, seed, psnr, seconds, **more):
    return {"method": method, "prompt": prompt, "seed": seed, "psnr": psnr, "attention_s": seconds, "total_s": 5 + seconds,
            "density": 0.5, "refresh_rate": 0.5, "dense_share": 0.0, **more}  # fmt: skip


def results(**methods):
    """`name=(psnr, attention seconds)`; dense takes 10 seconds, "_" in a name stands for "@"."""
    rows = []
    for prompt, seed in CASES:
        rows.append(row("dense", prompt, seed, None, 10.0))
        for name, (psnr, seconds) in methods.items():
            rows.append(row(name.replace("_", "@0."), prompt, seed, psnr + HARDER[prompt] + 0.1 * seed, seconds))
    return {"rows": rows, "conventions": {"psnr": "as usual"}}


def test_a_curve_joins_the_budgets_of_a_method_by_speed():
    made = results(heart_3=(24, 4.0), heart_2=(20, 2.0), xattention=(22, 5.0))
    lines = front.curves(front.places(made))
    assert [place.name for place in lines["heart"]] == ["heart@0.3", "heart@0.2"] and len(lines["xattention"]) == 1
    assert lines["heart"][0].speed == pytest.approx(2.5)
    assert front.unbeaten(front.places(made)) == ["heart@0.3", "heart@0.2"]


def test_psnr_at_equal_speed_is_paired_and_interpolated_by_log_speed():
    made = results(heart_4=(26, 4.0), heart_1=(20, 1.0), other=(21, 2.0))
    found = front.compared(made, "heart", "other", "attention")
    assert found["psnr_gain"] == pytest.approx(2.0) and found["psnr_gain_ci"] == pytest.approx(0.0, abs=1e-9)
    assert found["speed"] == pytest.approx(5.0)


def test_speed_at_equal_psnr():
    made = results(heart_4=(26, 4.0), heart_1=(20, 1.0), other=(23, 8.0))
    found = front.compared(made, "heart", "other", "attention")
    assert found["speed_at_psnr"] == pytest.approx(5.0) and found["ratio"] == pytest.approx(4.0)
    low, high = found["ratio_ci"]
    assert low <= 4.0 <= high and math.log(high / low) < 1e-6  # prompts differ, but in both alike


def test_nothing_is_extrapolated():
    slow = results(heart_4=(26, 4.0), heart_2=(22, 2.0), quick=(10, 1.0), near=(40, 3.0))
    quick, near = (front.compared(slow, "heart", name, "attention") for name in ("quick", "near"))
    assert "psnr_gain" not in quick and quick["ratio"] == pytest.approx(0.5)  # its fastest is better and half as fast
    assert "ratio" not in near and near["psnr_gain"] < 0


def test_speed_at_a_psnr_takes_the_fast_side_of_a_curve_that_bends():
    made = results(heart_5=(20, 5.0), heart_4=(26, 4.0), heart_2=(22, 2.0))
    curve = front.curves(front.places(made))["heart"]
    found = front.speed_at(curve, 24 - 1 / 3 + 0.05)  # mean over prompts and seeds of a PSNR of 24
    assert found == pytest.approx(10 / math.sqrt(8))
    assert front.speed_at(curve, 99) is None


def test_rows_without_times_count_for_quality_alone():
    made = results(heart_3=(24, 4.0), other=(22, 5.0))
    for r in made["rows"]:
        if r["prompt"] != "a":
            r |= {"timed": False, "attention_s": 999.0}
    place = front.places(made)["heart@0.3"]
    assert place.speed == pytest.approx(2.5) and len(place.psnr) == 6
    for r in made["rows"]:
        r["timed"] = False
    assert front.places(made) == {} and front.front(made)["comparisons"] == []
    assert "no method has both" in plot.svg(made)


def test_the_front_as_json_and_words():
    made = results(heart_4=(26, 4.0), heart_1=(20, 1.0), xattention_8=(22, 5.0), xattention_9=(25, 6.0))
    found = front.front(made)
    assert [e["front_attention"] for e in found["methods"]] == [True, True, False, False]
    assert found["methods"][0]["psnr_ci"] > 0
    assert {(c["method"], c["against"]) for c in found["comparisons"]} >= {
        ("heart", "xattention@0.8"),
        ("xattention", "heart@0.1"),
    }
    said = front.lines(found["comparisons"])
    assert all(line.startswith("heart against") for line in said) and len(said) == 4
    assert "at its speed or quicker (attention 2.00×) +4.00 dB" in said[0]


def test_the_picture_names_every_family_and_budget(tmp_path):
    made = results(heart_4=(26, 4.0), heart_1=(20, 1.0), other=(22, 5.0))
    drawn = plot.write(made, tmp_path / "f.svg").read_text()
    assert drawn.count("<circle") == 3 and 'xmlns="http://www.w3.org/2000/svg"' in drawn
    for text in (">heart<", ">other<", ">0.4<", "PSNR dB", "attention speed-up"):
        assert text in drawn
    with pytest.raises(Exception, match=r"ends in \.svg"):
        plot.write(made, tmp_path / "f.png")
