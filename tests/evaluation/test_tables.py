"""Tables: paired speed-ups and differences, intervals, cells, and what stands under a table."""

import math

import pytest

from heart_attention.evaluation import tables


def row(method, prompt, attention, psnr=None, **more):
    return {"method": method, "prompt": prompt, "seed": 0, "attention_s": attention, "total_s": 2 * attention,
            "density": 0.5, "refresh_rate": 1.0, "psnr": psnr, "parts_s": {"attention": attention}, **more}  # fmt: skip


def test_differences_are_taken_prompt_by_prompt():
    rows = [
        {"method": m, "prompt": p, "seed": 0, "psnr": v}
        for m, values in {"a": (30.0, 20.0, None), "b": (29.0, 18.0, 5.0)}.items()
        for p, v in zip("xyz", values)
    ]
    mean, half = tables.difference({"rows": rows}, "a", "b")
    assert mean == pytest.approx(1.5) and half == pytest.approx(12.706 * 0.5, rel=1e-3)  # t of one degree of freedom
    assert tables.difference({"rows": rows}, "b", "a")[0] == pytest.approx(-1.5)


def test_speedup_is_paired_and_geometric():
    rows = [row("dense", "a", 4.0), row("dense", "b", 9.0), row("m", "a", 2.0, 30.0), row("m", "b", 3.0, 32.0)]
    entry = tables.summarise({"rows": rows, "conventions": {"psnr": ""}})[1]
    assert entry["attention_speedup"] == pytest.approx(math.sqrt(2 * 3))
    low, high = entry["attention_speedup_ci"]
    assert low < entry["attention_speedup"] < high and entry["psnr"] == 31.0


def test_a_speedup_is_over_the_dense_run_that_took_turns_with_it():
    rows = [row("dense", "a", 4.0), row("m", "a", 2.0, reference_s={"attention_s": 5.0, "total_s": 8.0})]
    entry = tables.summarise({"rows": rows})[1]
    assert entry["attention_speedup"] == pytest.approx(2.5) and entry["total_speedup"] == pytest.approx(2.0)


def test_one_video_has_the_interval_of_its_steps():
    steps = {"steps_s": [1.0, 1.1, 0.9, 1.0, 1.0], "reference_steps_s": [2.0, 2.0, 2.1, 1.9, 2.0]}
    rows = [row("dense", "a", 10.0), row("m", "a", 5.0, **steps)]
    low, high = tables.summarise({"rows": rows})[1]["total_speedup_ci"]
    assert 1.5 < low < 2 < high < 2.6


def test_how_sure_speed_ups_are_stands_under_the_table():
    steps = {"steps_s": [1.0, 1.1, 0.9, 1.0, 1.0], "reference_steps_s": [2.0, 2.0, 2.1, 1.9, 2.0]}
    rows = [row("dense", "a", 10.0), row("m", "a", 5.0, **steps), row("n", "a", 5.0)]
    results = {"rows": rows, "conventions": {}}
    summary = tables.summarise(results)
    (line,) = tables.spread_lines(summary)  # dense is the measure, and one video of n without steps has no interval
    low, high = summary[1]["attention_speedup_ci"]
    assert line.startswith(f"m: attention 2.00× ({low:.2f}–{high:.2f}), end to end 2.00× (") and "over steps" in line
    assert line in tables.markdown(summary, results) and tables.spread(summary[2], "attention") == ""


def test_what_reuse_took_off_is_said_in_a_line():
    parts = {"xattention": {"prediction": 3.0, "planning": 1.0}, "xattention+tmr": {"prediction": 0.9, "planning": 0.1}}
    rows = [row("dense", "a", 9.0)]
    rows += [{**row(m, "a", 5.0 if "+" in m else 6.0, 30.0), "parts_s": p} for m, p in parts.items()]
    results = {"rows": rows, "conventions": {"psnr": ""}}
    expected = "xattention+tmr against xattention: prediction and planning -75%, attention 1.20×, PSNR +0.00 dB"
    assert tables.reuse_lines(results) == [expected]
    assert tables.reuse_lines({**results, "rows": rows[:2]}) == []


def test_tables_have_all_methods_and_conventions(tmp_path):
    rows = [row("dense", "a", 2.0), row("m", "a", 1.0, 30.0, dense_share=0.25, dense_reasons={"too few tokens": 3})]
    results = {
        "rows": rows,
        "conventions": {"psnr": "as usual"},
        "provenance": {},
        "empty": {"vbench": "VBench: not run."},
    }
    summary = tables.write_tables(results, tmp_path)
    text = tables.text_table(summary)
    assert "ran dense" in text and "25%" in text
    page = (tmp_path / "table.md").read_text()
    assert "psnr: as usual." in page and "VBench: not run." in page
    assert all(n in page and n in (tmp_path / "table.csv").read_text() for n in ("dense", "m"))
    assert summary[0]["attention_speedup"] == pytest.approx(1.0) and summary[1]["dense_reasons"] == {
        "too few tokens": 3
    }


def test_a_registered_metric_has_a_column():
    rows = [row("dense", "a", 2.0), row("m", "a", 1.0, mine=0.5)]
    conventions = {"mine": "half"}
    head, body = tables.cells(tables.summarise({"rows": rows, "conventions": conventions}), conventions)
    assert "mine" in [c.heading for c in head] and "0.5000" in body[1]


def test_the_overhead_is_told():
    assert tables.overhead_line({"provenance": {"overhead": 0.031}}).startswith("overhead 3.1% of the generations")
    assert "every record was there already" in tables.overhead_line({"provenance": {}})


def test_every_empty_cell_has_a_reason():
    rows = [
        {**row("dense", "a", 2.0), "density": None, "refresh_rate": None, "vbench": 0.8, "visionreward": None},
        {**row("m", "a", 1.0, 30.0, dense_share=0.0, cost=0.6), "vbench": 0.7, "visionreward": 0.1},
        {**row("n", "a", 2.0, 99.0, dense_share=1.0), "density": 1.0, "refresh_rate": None, "vbench": None},
    ]
    results = {"rows": rows, "conventions": {"psnr": "as usual"}, "empty": {"vbench": "VBench: no scores for n."}}
    summary = tables.summarise(results)
    told = tables.empty_cells(summary, results)
    assert told[0] == (
        "Empty for dense: VReward (the judge has not been run there); PSNR dB (it is the reference); "
        "density, cost, ran dense, refreshed (it has no masks)."
    )
    assert told[1] == "Empty for n: VReward (the judge has not been run there); cost, refreshed (every call ran dense)."
    assert told[2:] == ["VBench: no scores for n."]
    head, body = tables.cells(summary, results["conventions"])
    empty = [(line[0], c.heading) for line in body for c, cell in zip(head, line) if cell == "–"]
    assert empty and all(heading in " ".join(told) for _, heading in empty)


def test_what_must_be_known_of_a_table_is_told_whole():
    rows = [
        row("dense", "a", 4.0, spread=0.9),
        row("m", "a", 2.0, 30.0),
        row("dense", "b", 4.0),
        row("m", "b", 2.5, 30.0),
    ]
    results = {"rows": rows, "conventions": {"psnr": ""}, "provenance": {"devices": {"A": 1}}}
    spread, empty, doubt, devices = tables.notes(tables.summarise(results), results)
    assert spread.startswith("m: attention 1.79× (") and empty.startswith("Empty for dense: PSNR dB")
    assert doubt.startswith("times cannot be trusted") and devices.startswith("made on 1 × A")


def test_times_that_were_not_measured_are_no_lost_record():
    rows = [
        {**row("dense", "a", 2.0), "density": None},
        row("m", "a", 1.0, 30.0),
        {**row("n", "a", 9.0), "timed": False},
    ]
    results = {"rows": rows, "conventions": {}}
    told = " ".join(tables.empty_cells(tables.summarise(results), results))
    assert "Empty for n: attention s, speed-up, end to end s (its times were not measured)." in told


def test_the_devices_are_told_by_kind():
    line = tables.devices_line({"provenance": {"devices": {"NVIDIA A100": 7, "NVIDIA H100": 1}}})
    assert line.startswith("made on 7 × NVIDIA A100 and 1 × NVIDIA H100") and tables.devices_line({}) == ""
