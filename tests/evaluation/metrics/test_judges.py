"""The way to VBench and VisionReward and back, up to the process boundary."""

import json

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


def test_vbench_total_is_the_official_weighting(tmp_path):
    scores = judges.read_vbench(write(tmp_path / "r.json", RECORDED))
    quality = ((0.9612 - 0.1462) / 0.8538 + (0.9871 - 0.706) / 0.2915 + 0.5 * 0.6111 + 0.6034 + 0.6543) / 4.5
    assert scores["total"] == pytest.approx((4 * quality + 0.2491 / 0.364) / 5)


@pytest.mark.parametrize("change, sentence", [
    ({"motion_smoothness": None}, "no finite score"),
    ({"drop": "dynamic_degree"}, "lacks the VBench dimension 'dynamic_degree'"),
])  # fmt: skip
def test_a_bad_vbench_file_is_refused(tmp_path, change, sentence):
    data = {**RECORDED, **change}
    data.pop(data.pop("drop", ""), None)
    with pytest.raises(HeartError, match=sentence):
        judges.read_vbench(write(tmp_path / "r.json", data))


def test_round_trip(tmp_path):
    (tmp_path / "v.mp4").write_bytes(b"video")
    rows = [{"method": "dense", "prompt": "a cat / dog?", "seed": 3, "video": str(tmp_path / "v.mp4")}]
    folder = judges.export(rows, tmp_path / "out")
    name = next(iter(json.loads((folder / "dense" / "prompts.json").read_text())))
    assert (folder / "dense" / name).read_bytes() == b"video" and "/" not in name
    vbench, reward = judges.commands(folder, "dense")
    assert "overall_consistency" in vbench and "visionreward.json" in reward
    write(folder / "dense" / "vbench" / "x_eval_results.json", RECORDED)
    write(folder / "dense" / "visionreward.json", [{"video": name, "score": 0.08}])
    row = judges.attach_scores({"rows": rows}, folder)["rows"][0]
    assert 0 < row["vbench"] < 1 and row["visionreward"] == 0.08


def test_missing_video_and_empty_scores(tmp_path):
    with pytest.raises(HeartError, match="is gone"):
        judges.export([{"method": "m", "prompt": "p", "seed": 0, "video": str(tmp_path / "no.mp4")}], tmp_path)
    with pytest.raises(HeartError, match="no VisionReward scores"):
        judges.read_visionreward(write(tmp_path / "e.json", []))
