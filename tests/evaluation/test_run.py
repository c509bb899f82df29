"""Comparisons: rows, resuming, tables, confidence intervals."""

import json
import math

import pytest

from heart_attention import HeartError
from heart_attention.evaluation import methods, run


@pytest.fixture(scope="module")
def finished(tiny_pipe, small_call, tmp_path_factory):
    """A comparison of three methods on one prompt, sparse even at this small size."""
    out = tmp_path_factory.mktemp("compare")
    names = ("dense", "xattention", "xattention+tmr")
    chosen = [methods.build(n, tiny_pipe, "tiny", **({} if n == "dense" else {"force_sparse": True})) for n in names]
    setting = run.Setting("tiny", small_call)
    results = run.run(tiny_pipe, chosen, ["a red circle moves right on a blue background"], [0], setting, out)
    return out, chosen, setting, results


def test_results_follow_the_schema(finished):
    out, _, _, results = finished
    stored = run.load_results(out)
    assert stored == json.loads(json.dumps(results))
    assert [r["method"] for r in stored["rows"]] == ["dense", "xattention", "xattention+tmr"]
    keys = {"method", "prompt", "seed", "attention_s", "total_s", "density", "refresh_rate", "psnr", "ssim"}
    for row in stored["rows"]:
        assert keys <= set(row) and 0 < row["attention_s"] <= row["total_s"]
        assert (out / row["video"]).is_file() and (out / row["lossless"]).is_file()
    dense, sparse, reused = stored["rows"]
    assert dense["psnr"] is None and sparse["psnr"] > 15 and 0 < sparse["density"] < 1
    assert sparse["refresh_rate"] == 1.0 and reused["refresh_rate"] < 1.0


def test_a_second_run_generates_nothing(finished, tiny_pipe, monkeypatch):
    out, chosen, setting, results = finished
    monkeypatch.setattr(run, "generate", lambda *a, **k: pytest.fail("generated again"))
    again = run.run(tiny_pipe, chosen, [results["rows"][0]["prompt"]], [0], setting, out)
    assert again["rows"] == results["rows"]
    assert "every record was there already" in run.overhead_line(again)


def test_the_overhead_is_told(finished):
    *_, results = finished
    share = results["provenance"]["overhead"]
    assert share > 0
    assert run.overhead_line(results).startswith(f"overhead {share:.1%} of the generations")


def test_a_lost_video_is_made_again(finished, tiny_pipe):
    out, chosen, setting, results = finished
    (out / results["rows"][1]["video"]).unlink()
    again = run.run(tiny_pipe, chosen, [results["rows"][0]["prompt"]], [0], setting, out, warm=False)
    assert again["rows"][1]["psnr"] == pytest.approx(results["rows"][1]["psnr"])
    assert (out / again["rows"][1]["video"]).is_file()


def test_tables_have_all_methods(finished):
    out, _, _, results = finished
    summary = run.write_tables(results, out)
    text = run.text_table(summary)
    for name in ("dense", "xattention", "xattention+tmr"):
        assert name in text and name in (out / "table.md").read_text() and name in (out / "table.csv").read_text()
    assert "Gaussian window" in (out / "table.md").read_text()
    assert summary[0]["attention_speedup"] == pytest.approx(1.0)


def test_dense_must_come_first(tiny_pipe, small_call, tmp_path):
    chosen = [methods.build("xattention", tiny_pipe, "tiny")]
    with pytest.raises(HeartError, match="must be dense"):
        run.run(tiny_pipe, chosen, ["x"], [0], run.Setting("tiny", small_call), tmp_path)


def row(method, prompt, attention, psnr=None):
    return {"method": method, "prompt": prompt, "seed": 0, "attention_s": attention, "total_s": 2 * attention,
            "density": 0.5, "refresh_rate": 1.0, "psnr": psnr, "parts_s": {"attention": attention}}  # fmt: skip


def test_differences_are_taken_prompt_by_prompt():
    rows = [
        {"method": m, "prompt": p, "seed": 0, "psnr": v}
        for m, values in {"a": (30.0, 20.0, None), "b": (29.0, 18.0, 5.0)}.items()
        for p, v in zip("xyz", values)
    ]
    mean, half = run.difference({"rows": rows}, "a", "b")
    assert mean == pytest.approx(1.5) and half == pytest.approx(12.706 * 0.5, rel=1e-3)  # t of one degree of freedom
    assert run.difference({"rows": rows}, "b", "a")[0] == pytest.approx(-1.5)


def test_speedup_is_paired_and_geometric():
    rows = [row("dense", "a", 4.0), row("dense", "b", 9.0), row("m", "a", 2.0, 30.0), row("m", "b", 3.0, 32.0)]
    entry = run.summarise({"rows": rows, "conventions": {"psnr": ""}})[1]
    assert entry["attention_speedup"] == pytest.approx(math.sqrt(2 * 3))
    low, high = entry["attention_speedup_ci"]
    assert low < entry["attention_speedup"] < high and entry["psnr"] == 31.0


def test_what_reuse_took_off_is_said_in_a_line():
    parts = {"xattention": {"prediction": 3.0, "planning": 1.0}, "xattention+tmr": {"prediction": 0.9, "planning": 0.1}}
    rows = [row("dense", "a", 9.0)]
    rows += [{**row(m, "a", 5.0 if "+" in m else 6.0, 30.0), "parts_s": p} for m, p in parts.items()]
    results = {"rows": rows, "conventions": {"psnr": ""}}
    expected = "xattention+tmr against xattention: prediction and planning -75%, attention 1.20×, PSNR +0.00 dB"
    assert run.reuse_lines(results) == [expected]
    assert run.reuse_lines({**results, "rows": rows[:2]}) == []


@pytest.mark.parametrize("content, sentence", [("{}", "schema"), ("[1", "not valid JSON")])
def test_a_bad_results_file_is_refused(tmp_path, content, sentence):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(HeartError, match=sentence):
        run.load_results(tmp_path)


@pytest.mark.parametrize("name", ["flash", "xattention+magic", "dense+tmr"])
def test_unknown_methods_are_refused(tiny_pipe, name):
    with pytest.raises(HeartError, match="unknown method"):
        methods.build(name, tiny_pipe, "tiny")


def test_warming_up_says_nothing_and_leaves_the_logger_as_it_was(caplog):
    import logging

    log = logging.getLogger("heart_attention.online.engine")
    with run._hushed():
        log.warning("not heard")
    log.warning("heard")
    assert [r.message for r in caplog.records] == ["heard"]
