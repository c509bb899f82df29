"""`heart compare` on the embedded model's smallest call: table, files, judges' scores, plugins."""

import json

import pytest
from calibrations_for_tests import JOINT, paper_calibration

from heart_attention.cli import main

SMALL = ["--size", "64x64", "--frames", "4", "--steps", "7", "--limit", "1"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A finished comparison with the paper's row and ours, and what was printed."""
    out = tmp_path_factory.mktemp("compare")
    words = ["compare", *SMALL, "--force-sparse", "--methods", "xattention,xattention+heart,xattention+joint", "--calibration",
             paper_calibration(out / "p.heart.json"), "--metrics", "psnr,vmaf", "--out", str(out / "r"), "--judges",
             str(out / "j")]  # fmt: skip
    return out, words


def test_compare_writes_table_results_and_the_judges_folder(compared, capsys):
    out, words = compared
    assert main.main(words) == 0
    said = capsys.readouterr().out
    for text in (
        "xattention+heart",
        "ran dense",
        "VMAF",
        "vbench evaluate",
        "visionreward_scores.py",
        f"videos: {out / 'r'}",
    ):
        assert text in said
    rows = json.loads((out / "r" / "results.json").read_text())["rows"]
    assert [r["method"] for r in rows] == ["dense", "xattention", "xattention+heart", "xattention+joint"]
    assert all(r["vmaf"] > 10 for r in rows[1:]) and (out / "r" / "table.md").is_file()
    assert len(list((out / "j" / "xattention+joint" / "videos").glob("*.mp4"))) == 1


def test_scores_reach_results_table_and_report(compared, capsys):
    from heart_attention.evaluation.metrics import vbench

    out, words = compared
    main.main(words)
    for method in ("dense", "xattention"):
        folder = out / "j" / method
        name = next(iter(json.loads((folder / "prompts.json").read_text())))
        (folder / "visionreward.json").write_text(json.dumps([{"video": name, "score": 0.07}]))
        for dimension in vbench.DIMENSIONS:
            (folder / "vbench" / dimension).mkdir(parents=True, exist_ok=True)
            (folder / "vbench" / dimension / "r_eval_results.json").write_text(json.dumps({dimension: [0.9, []]}))
    capsys.readouterr()
    assert main.main([*words, "--scores", str(out / "j")]) == 0
    said = capsys.readouterr().out
    assert "VBench" in said and "no scores for xattention+heart, xattention+joint" in said
    assert json.loads((out / "r" / "results.json").read_text())["rows"][0]["visionreward"] == 0.07
    assert main.main(["report", str(out / "r")]) == 0
    assert "VReward" in (out / "r" / "report.html").read_text()


@pytest.mark.parametrize("words, sentence", [
    (["--methods", "xattention+heart", "--model", "owner/name", "--prompts", "p.txt"], "heart calibrate --model owner/name"),
    (["--methods", "flash"], "unknown method"),
    (["--methods", "svg2", "--calibration", str(JOINT)], "not among the methods"),
    (["--methods", "xattention+heart", "--model", "owner/name", "--prompts", "p.txt", "--calibration", str(JOINT)], "+joint"),
    (["--scores", "nowhere"], "there is no folder"),
    (["--docs", "nowhere.md"], "there is no page 'nowhere.md'"),
    (["--docs", "p.txt"], "the page has no lines '<!-- figures: made by heart compare -->'"),
    (["--prompts", "p.txt", "--model", "empty"], "model_index.json"),
    (["--out", "p.txt"], "which is a file"),
])  # fmt: skip
def test_wrong_arguments_are_told_before_anything_is_loaded(words, sentence, capsys, tmp_path, monkeypatch):
    from heart_attention.evaluation import pipelines

    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a cat\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(pipelines, "load", lambda *a: pytest.fail("loaded"))
    assert main.main(["compare", *words]) == 1
    assert sentence in capsys.readouterr().err


def test_a_plugin_is_imported_before_anything_else(tmp_path, monkeypatch, capsys):
    from heart_attention import plugins
    from heart_attention.evaluation import metrics

    monkeypatch.setattr(plugins, "_loaded", [])  # workers of later tests must not look for it
    (tmp_path / "my_heart_plugin.py").write_text(
        "from heart_attention.evaluation.metrics import register_metric\n"
        "register_metric('brighter', lambda v, r: float(v.mean() - r.mean()), 'difference of mean brightness')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert main.main(["--plugin", "my_heart_plugin", "compare", "--metrics", "brighter", "--limit", "0"]) == 1
        assert "--limit is 0" in capsys.readouterr().err  # the metric was known
        assert "brighter" in metrics.names()
    finally:
        metrics._METRICS.pop("brighter", None)
    assert main.main(["--plugin", "no_such_plugin", "info"]) == 1
    assert "'no_such_plugin' cannot be imported" in capsys.readouterr().err


def test_help_tells_description_and_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main.main(["compare", "--help"])
    said = capsys.readouterr().out
    assert "The paper's main table" in said and "(default runs/compare)" in said and "(default tiny)" not in said
