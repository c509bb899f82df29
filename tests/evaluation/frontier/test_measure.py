"""A small front: videos first, times later in the same folder, velocity errors by themselves."""

import json

import pytest

from heart_attention import HeartError
from heart_attention.evaluation import results, timing
from heart_attention.evaluation.cases import CaseWorker
from heart_attention.evaluation.frontier import frontier, velocity
from heart_attention.evaluation.run import Folder

PROMPTS = ["a red circle moves right on a blue background", "a green square on a white background"]
METHODS = ["xattention@0.5", "xattention@0.9"]


@pytest.fixture(scope="module")
def made(tiny_pipe, small_call, tmp_path_factory):
    """Quality alone, of two prompts, and velocity errors of one."""
    out = tmp_path_factory.mktemp("front")
    more = {"call": small_call, "metrics": ["psnr"], "force_sparse": True, "model": "tiny"}
    found = frontier(tiny_pipe, METHODS, PROMPTS, out, timed=0, velocity_prompts=1, **more)
    return out, more, found


def test_quality_needs_no_times_and_dense_runs_once(made):
    out, _, found = made
    rows = results.load(out)["rows"]
    assert len(rows) == 6 and not any(row["timed"] for row in rows) and "reference_s" not in rows[0]
    assert timing.untimed(rows).startswith("times of 6 of 6 videos")
    entries = {e["method"]: e for e in found["frontier"]["methods"]}
    assert entries["xattention@0.9"]["psnr"] > entries["xattention@0.5"]["psnr"] and entries["xattention@0.9"]["n"] == 2
    assert json.loads((out / "frontier.json").read_text())["comparisons"] == []


def test_velocity_errors_are_of_sparse_steps_along_the_dense_trajectory(made):
    out, _, found = made
    rows = {(r["prompt"], r["method"]): r for r in found["rows"]}
    coarse, fine = (rows[PROMPTS[0], name][velocity.NAME] for name in METHODS)
    assert 0 < fine < coarse and rows[PROMPTS[1], METHODS[0]][velocity.NAME] is None
    name = rows[PROMPTS[0], METHODS[0]]["stats"][len("stats/") : -len(".json")]
    errors = velocity.errors_of(Folder(out), name)
    assert errors[0] == 0.0 and len(errors) == 5 and min(errors[1:]) > 0  # the first of so few steps stays dense
    assert velocity.NAME in found["conventions"]


@pytest.mark.parametrize(
    "text", ["", "[1", "{}", "[]", '{"errors": 3}', '{"errors": [0.1, "x"]}', '{"errors": [1e300]}']
)
def test_damaged_velocity_errors_count_as_absent(tmp_path, text):
    (tmp_path / "velocity").mkdir()
    (tmp_path / "velocity" / "a.json").write_text(text)
    assert velocity.errors_of(Folder(tmp_path), "a") is None


def test_times_come_later_from_the_same_folder(made, tiny_pipe, monkeypatch):
    out, more, found = made
    videos = {path: path.read_bytes() for path in (out / "videos").iterdir()}
    again = frontier(tiny_pipe, METHODS, PROMPTS, out, timed=1, times_only=True, **more)
    first = [r for r in again["rows"] if r["prompt"] == PROMPTS[0]]
    assert all(r["timed"] and r["reference_s"]["total_s"] > 0 for r in first) and len(first[1]["steps_s"]) == 5
    assert [r.get("psnr") for r in again["rows"]] == [r.get("psnr") for r in found["rows"]]
    assert sum(r["timed"] for r in again["rows"]) == 3 and {p: p.read_bytes() for p in videos} == videos
    monkeypatch.setattr(timing, "verdict", lambda rows: "")
    monkeypatch.setattr(CaseWorker, "run", lambda *a: pytest.fail("measured again"))
    assert frontier(tiny_pipe, METHODS, PROMPTS, out, timed=1, times_only=True, **more)["frontier"]["comparisons"] == []


def test_times_of_videos_that_do_not_exist_are_refused(made, tiny_pipe):
    out, more, _ = made
    with pytest.raises(HeartError, match="2 of 8 generations are missing in .*without --times-only"):
        frontier(tiny_pipe, [*METHODS, "xattention@0.7"], PROMPTS, out, times_only=True, **more)
