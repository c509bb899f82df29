"""The way to VBench and VisionReward and back, up to the process boundary."""

import json
import runpy
import subprocess
import sys

import pytest

from heart_attention import HeartError
from heart_attention.evaluation.metrics import judges

RECORDED = {  # the shape of VBench's own file: a mean, then one entry a video
    "subject_consistency": [0.9612, [{"video_path": "a-0.mp4", "video_results": 0.9612}]],
    "motion_smoothness": [0.9871, []],
    "dynamic_degree": [0.6111, []],
    "aesthetic_quality": [0.6034, []],
    "imaging_quality": [0.6543, []],
    "overall_consistency": [0.2491, []],
}


def write(path, obj):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(obj))
    return path


def rows_of(folder, prompts, seeds=(0,), methods=("dense",)):
    (folder / "v.mp4").write_bytes(b"video")
    cases = [(m, p, s) for m in methods for p in prompts for s in seeds]
    return [{"method": m, "prompt": p, "seed": s, "video": str(folder / "v.mp4")} for m, p, s in cases]


def test_no_two_prompts_share_a_file(tmp_path):
    long = "word " * 60
    prompts = [
        "a cat",
        "a cat?",
        "a cat!",
        "a cat / dog",
        "a cat _ dog",
        long + "red",
        long + "blue",
        "猫が歩く",
        "猫が走る" * 60,
    ]
    folder = judges.export(rows_of(tmp_path, prompts, seeds=(7, 3)), tmp_path / "out")
    listing = json.loads((folder / "dense" / "prompts.json").read_text())
    assert len(listing) == 2 * len(prompts) == len(list((folder / "dense" / "videos").glob("*.mp4")))
    assert all(len(name.encode()) < 255 and "/" not in name for name in listing)
    assert listing["a cat-0.mp4"] == listing["a cat-1.mp4"] == "a cat"  # VBench's own form, seeds counted from 0


def test_videos_lie_alone_because_vbench_takes_the_ending_of_the_first_file_it_sees(tmp_path):
    folder = judges.export(rows_of(tmp_path, ["a cat", "a dog"]), tmp_path / "out")
    assert {p.suffix for p in (folder / "dense" / "videos").iterdir()} == {".mp4"}


def test_the_longest_prompt_of_vbench_keeps_its_name():
    """VBench looks for `<prompt>-<index>.mp4`, and its longest prompt has 210 characters."""
    assert judges.safe_name("w" * 210) == "w" * 210 and len(f"{judges.safe_name('w' * 999)}-4.mp4".encode()) < 255


def test_a_folder_that_vbenchs_shell_would_cut_is_refused(tmp_path):
    with pytest.raises(HeartError, match="without spaces"):
        judges.export(rows_of(tmp_path, ["a cat"]), tmp_path / "my videos")


def test_scores_come_back_into_the_rows(tmp_path):
    rows = rows_of(tmp_path, ["a cat", "a dog"], methods=("dense", "xattention"))
    folder = judges.export(rows, tmp_path / "out")
    for dimension, value in RECORDED.items():  # one run of VBench a dimension
        write(folder / "dense" / "vbench" / dimension / "results_2026_eval_results.json", {dimension: value})
    write(folder / "dense" / "visionreward.json", [{"video": "a cat-0.mp4", "score": 0.08}])
    made = judges.attach_scores({"rows": rows}, folder)
    cat, dog, other, _ = made["rows"]
    assert 0 < cat["vbench"] < 1 and cat["vbench_dimensions"]["dynamic_degree"] == 0.6111
    assert cat["visionreward"] == 0.08 and dog["visionreward"] is None and other["vbench"] is None
    assert "no scores for xattention" in made["empty"]["vbench"]


def test_a_judges_folder_holds_one_runs_videos(tmp_path):
    """Names tell prompt and sample only: of another run VBench would judge what is left, and its scores look like ours."""
    rows = rows_of(tmp_path, ["a cat", "a dog"])
    folder = judges.export(rows, tmp_path / "out")
    assert judges.export(rows, folder) == folder  # the same once more
    with pytest.raises(HeartError, match="holds 'a dog-0.mp4' of another run"):
        judges.export(rows[:1], folder)
    write(folder / "dense" / "vbench" / "x" / "r_eval_results.json", RECORDED)
    with pytest.raises(HeartError, match="are of fewer videos"):
        judges.export(rows_of(tmp_path, ["a cat", "a dog", "a cow"]), folder)
    assert judges.attach_scores({"rows": rows}, folder)["rows"][0]["vbench"] > 0
    (tmp_path / "v.mp4").write_bytes(b"other")
    for use in (judges.export, lambda rows, folder: judges.attach_scores({"rows": rows}, folder)):
        with pytest.raises(HeartError, match="is another video than"):
            use(rows, folder)


def test_a_judge_that_was_not_run_is_told(tmp_path):
    rows = rows_of(tmp_path, ["a cat"])
    with pytest.raises(HeartError, match="no judge's scores"):
        judges.attach_scores({"rows": rows}, judges.export(rows, tmp_path / "out"))


def test_missing_video_and_empty_scores(tmp_path):
    with pytest.raises(HeartError, match="is gone"):
        judges.export([{"method": "m", "prompt": "p", "seed": 0, "video": str(tmp_path / "no.mp4")}], tmp_path)
    with pytest.raises(HeartError, match="no VisionReward scores"):
        judges.read_visionreward(write(tmp_path / "e.json", []))
    with pytest.raises(HeartError, match="no finite score"):
        judges.read_visionreward(write(tmp_path / "n.json", [{"video": "a", "score": "good"}]))
    with pytest.raises(HeartError, match="no finite score") as caught:
        judges.read_visionreward(write(tmp_path / "n.json", [{"video": "a" * 9999, "score": 10**400}]))
    assert len(str(caught.value)) <= 300


STAND_IN = """
import numpy as np
def inference(video_path, query, temperature=0.1):
    return "yes" if "cat" in query else "no"
def score(video_path, prompt) -> float:
    open(video_path, "rb").close()
    open("calls.txt", "a").write(prompt + chr(10))
    answers = np.array([1 if inference(video_path, prompt) == "yes" else -1])
    return np.mean(answers * np.array([0.5])).item()
"""


def test_the_runner_scores_a_folder_by_visionrewards_contract(tmp_path):
    """In a process of its own, beside a stand-in with the call contract of VisionReward's `inference-video.py`."""
    folder = judges.export(rows_of(tmp_path, ["a cat", "a dog"]), tmp_path / "out")
    checkout = tmp_path / "VisionReward"
    checkout.mkdir()
    (checkout / "inference-video.py").write_text(STAND_IN)
    words = [sys.executable, *judges.commands(folder, "dense")[1].split()[1:]]
    for _ in range(2):  # the second time there is nothing left to do
        done = subprocess.run(words, cwd=checkout, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (checkout / "calls.txt").read_text().split("\n")[:-1] == ["a cat", "a dog"]
    assert judges.read_visionreward(folder / "dense" / "visionreward.json") == {"a cat-0.mp4": 0.5, "a dog-0.mp4": -0.5}


def test_the_runner_needs_nothing_of_ours():
    source = judges.Path(judges.__file__).with_name(judges.RUNNER)
    imports = [line for line in source.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert imports and not any("heart" in line for line in imports)
    assert callable(runpy.run_path(str(source), run_name="runner")["score_folder"])
