"""Comparisons: rows, turns, resuming, damaged records, metrics that are asked for later."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from heart_attention import HeartError
from heart_attention.evaluation import generation, methods, results, run, video

PROMPT = "a red circle moves right on a blue background"


@pytest.fixture(scope="module")
def finished(tiny_pipe, small_call, tmp_path_factory):
    """A comparison of three methods on one prompt, sparse even at this small size."""
    out = tmp_path_factory.mktemp("compare")
    names = ("dense", "xattention", "xattention+tmr")
    chosen = [methods.build(n, tiny_pipe, "tiny", **({} if n == "dense" else {"force_sparse": True})) for n in names]
    setting = run.Setting("tiny", small_call)
    return out, chosen, setting, run.run(tiny_pipe, chosen, [PROMPT], [0], setting, out)


def test_results_follow_the_schema(finished):
    out, _, _, made = finished
    stored = results.load(out)
    assert stored == json.loads(json.dumps(made))
    assert [r["method"] for r in stored["rows"]] == ["dense", "xattention", "xattention+tmr"]
    keys = {
        "method",
        "prompt",
        "seed",
        "attention_s",
        "total_s",
        "density",
        "refresh_rate",
        "dense_share",
        "psnr",
        "ssim",
    }
    for row in stored["rows"]:
        assert keys <= set(row) and 0 < row["attention_s"] <= row["total_s"]
        assert all((out / row[k]).is_file() for k in ("video", "lossless", "strip", "stats"))
        assert row["reference_s"]["total_s"] == stored["rows"][0]["total_s"] and len(row["steps_s"]) == 5
    dense, sparse, reused = stored["rows"]
    assert dense["psnr"] is None and sparse["psnr"] > 15 and 0 < sparse["density"] < 1
    assert sparse["refresh_rate"] == 1.0 and reused["refresh_rate"] < 1.0 and sparse["dense_share"] == 0


def test_turns_change_nothing_but_times(finished, tiny_pipe):
    out, chosen, setting, made = finished
    assert made["provenance"]["in_turns"] and made["provenance"]["fps"] == setting.fps
    before = tiny_pipe.scheduler
    frames, row = run.generate(tiny_pipe, chosen[2], PROMPT, 0, setting)
    assert (frames == video.read(out / made["rows"][2]["lossless"])).all()
    same = ("density", "dense_share", "refresh_rate", "dense_reasons")
    assert [row[k] for k in same] == [made["rows"][2][k] for k in same]
    assert tiny_pipe.scheduler is before and not tiny_pipe.transformer._forward_hooks


def test_a_second_run_generates_nothing(finished, tiny_pipe, monkeypatch):
    out, chosen, setting, made = finished
    monkeypatch.setattr(generation, "generate", lambda *a, **k: pytest.fail("generated again"))
    again = run.run(tiny_pipe, chosen, [PROMPT], [0], setting, out)
    assert again["rows"] == made["rows"] and "overhead" not in again["provenance"]


def test_a_metric_asked_for_later_comes_from_the_stored_videos(finished, tiny_pipe, monkeypatch):
    out, chosen, setting, made = finished
    monkeypatch.setattr(generation, "generate", lambda *a, **k: pytest.fail("generated again"))
    more = run.Setting("tiny", setting.call, ("psnr", "psnr_pooled"))
    again = run.run(tiny_pipe, chosen, [PROMPT], [0], more, out)
    frames = [video.read(out / made["rows"][i]["lossless"]) for i in (1, 0)]
    from heart_attention.evaluation.metrics import psnr_pooled

    assert again["rows"][1]["psnr_pooled"] == pytest.approx(psnr_pooled(*frames))
    assert set(again["conventions"]) == {"psnr", "psnr_pooled"} and again["rows"][0]["psnr_pooled"] is None


@pytest.mark.parametrize("damage", ["gone", "cut", "record"])
def test_what_is_damaged_is_made_anew(finished, tiny_pipe, damage):
    out, chosen, setting, made = finished
    row = made["rows"][1]
    if damage == "gone":
        (out / row["video"]).unlink()
    elif damage == "cut":
        (out / row["lossless"]).write_bytes((out / row["lossless"]).read_bytes()[:500])
    else:
        next((out / "records").glob("xattention-*.json")).write_text('{"method": "xatt')
    again = run.run(tiny_pipe, chosen[:2], [PROMPT], [0], setting, out, warm=False)
    assert again["rows"][1]["psnr"] == pytest.approx(row["psnr"])
    assert again["rows"][0]["attention_s"] == made["rows"][0]["attention_s"]  # dense ran along for its time only
    assert len(video.read(out / again["rows"][1]["lossless"])) == setting.call["num_frames"]


GOOD = {
    "method": "svg2", "prompt": "p", "seed": 0, "attention_s": 1.0, "total_s": 2.0, "density": 0.5, "refresh_rate": 0.5,
    "psnr": 9.0, "stats": "stats/a.json", "video": "videos/a.mp4", "lossless": "videos/a.mkv",
    "bytes": {"videos/a.mp4": 2, "videos/a.mkv": 3},
}  # fmt: skip


def put(out, row):
    files = {"videos/a.mp4": b"12", "videos/a.mkv": b"123"}
    (folder := run.Folder(out)).put("a", {"row": row, "stats": {"records": []}, "files": files})
    return folder


@pytest.mark.parametrize("odd", [
    {"attention_s": "1"}, {"attention_s": -1.0}, {"method": None}, {"psnr": "high"}, {"seed": 0.5}, {"steps_s": [None]},
    {"lossless": "videos/b.mkv"}, {"stats": "../a.json"}, {"bytes": {"videos/a.mkv": 3}}, {"bytes": {}},
])  # fmt: skip
def test_a_record_with_an_odd_field_counts_as_absent(tmp_path, odd):
    folder = put(tmp_path / "out", GOOD)
    record = folder.read("a")
    assert record["psnr"] == 9.0
    folder.path("a").write_text(json.dumps(record | odd))
    assert folder.read("a") is None
    folder.path("a").write_text(json.dumps({k: v for k, v in record.items() if k not in odd}))
    assert folder.read("a") is None or odd.keys() <= {"psnr", "steps_s"}  # not every record has these


def test_damaged_statistics_and_repeated_times_are_made_anew(tmp_path):
    folder = put(tmp_path, GOOD)
    again = folder.times_path("a")
    again.parent.mkdir()
    for text, total in (('{"total_s": 1.5}', 1.5), ('{"total_s": 1.', 2.0), ("[1]", 2.0), ('{"total_s": "x"}', 2.0)):
        again.write_text(text)
        assert folder.read("a")["total_s"] == total
    (tmp_path / "stats" / "a.json").write_text("{")
    assert folder.read("a") is None


def test_what_was_timed_on_a_busy_machine_is_made_again_when_asked(finished, tiny_pipe, monkeypatch):
    out, chosen, setting, made = finished
    made_again: list[str] = []
    original = generation.generate
    monkeypatch.setattr(
        generation, "generate", lambda p, m, *a, **k: made_again.append(m.name) or original(p, m, *a, **k)
    )
    doubts = iter(["busy"] * 3)  # of the three records that are looked at; then of the new ones none
    monkeypatch.setattr(run.timing, "verdict", lambda rows: next(doubts, ""))
    again = run.run(tiny_pipe, chosen, [PROMPT], [0], setting, out, warm=False, retime=True)
    assert made_again == [m.name for m in chosen]
    assert [r["psnr"] for r in again["rows"]] == [r["psnr"] for r in made["rows"]]
    run.run(tiny_pipe, chosen, [PROMPT], [0], setting, out, retime=True)
    assert len(made_again) == 3


def test_what_changes_a_generation_changes_its_record(finished, tiny_pipe):
    _, chosen, setting, _ = finished
    weights = run.fingerprint(tiny_pipe)
    name = lambda m=chosen[1], p=PROMPT, s=0, t=setting, w=weights: run._identity(m, p, s, t, w)  # noqa: E731
    other = run.Setting("tiny", {**setting.call, "guidance_scale": 3.0})
    ways = [
        name(m=chosen[2]),
        name(p="x"),
        name(s=1),
        name(t=other),
        name(w=[]),
        name(t=run.Setting("tiny", setting.call, fps=9)),
    ]
    assert len({name(), *ways}) == 7
    assert name(t=run.Setting("tiny", setting.call, ("vmaf",))) == name()  # metrics are added to a record


def test_whatever_of_a_pipeline_changes_a_video_changes_the_record(tiny_pipe):
    """Another scheduler's setting, a decoder of another precision, adapters: none is in the call."""
    other = generation.view(tiny_pipe)
    assert run.fingerprint(other) == run.fingerprint(tiny_pipe)
    other.scheduler.register_to_config(flow_shift=7.5)
    coarse = copy.copy(tiny_pipe)
    coarse.vae = copy.deepcopy(tiny_pipe.vae).to(torch.bfloat16)
    adapted = copy.copy(tiny_pipe)
    adapted.transformer = copy.deepcopy(tiny_pipe.transformer)
    adapted.transformer.lora_A = torch.nn.Linear(2, 2)
    seen = [json.dumps(run.fingerprint(p), default=str) for p in (tiny_pipe, other, coarse, adapted)]
    assert len(set(seen)) == 4


def test_a_table_of_costs_is_known_by_what_it_says(finished, tmp_path):
    from heart_attention.files import write_json
    from heart_attention.online import cost_model

    _, chosen, setting, _ = finished
    made = cost_model.shipped("cpu-c").to_dict()
    path = write_json(tmp_path / "costs.json", made)
    method = dataclasses.replace(chosen[1], config=chosen[1].config.replace(cost_table=str(path)))
    before = run._identity(method, PROMPT, 0, setting, [])
    write_json(path, {**made, "margin": 0.5})
    assert run._identity(method, PROMPT, 0, setting, []) != before


@pytest.mark.parametrize("device, turns", [("cpu", True), ("cuda:0", False)])
def test_methods_take_turns_where_they_compute_on_a_cpu(device, turns):
    """With offload the weights of a pipeline on a GPU wait in main memory, and nothing takes turns all the same."""
    pipe = SimpleNamespace(transformer=torch.nn.Linear(1, 1), _execution_device=torch.device(device))
    assert generation.takes_turns(pipe, run.Setting("m", {})) is turns


def test_what_is_named_twice_counts_once(tiny_pipe):
    """Else an interval would look narrower than it is."""
    from heart_attention.cli import arguments
    from heart_attention.evaluation import compare

    plan = compare.planned(tiny_pipe, ["xattention", "dense", "xattention"], ["a cat", "a dog", "a cat"], call={})
    assert [m.name for m in plan.methods] == ["dense", "xattention"] and plan.prompts == ["a cat", "a dog"]
    assert arguments.seeds_of(SimpleNamespace(seeds="1,0,1")) == [1, 0] and arguments.words("a, b,a", "--x") == [
        "a",
        "b",
    ]


def test_dense_must_come_first(tiny_pipe, small_call, tmp_path):
    chosen = [methods.build("xattention", tiny_pipe, "tiny")]
    with pytest.raises(HeartError, match="must be dense"):
        run.run(tiny_pipe, chosen, ["x"], [0], run.Setting("tiny", small_call), tmp_path)


def test_calls_that_ran_dense_count_as_density_one(tiny_pipe, small_call):
    """Without force, 256 tokens are too few: every call of the sparse phase falls back, and the row says so."""
    chosen = methods.build("xattention", tiny_pipe, "tiny")
    row = run.generate(tiny_pipe, chosen, PROMPT, 0, run.Setting("tiny", small_call))[1]
    assert row["dense_share"] == 1.0 and row["density"] == 1.0 and row["refresh_rate"] is None
    assert sum(row["dense_reasons"].values()) == 9 * 2 * 4 and "warm-up step" not in row["dense_reasons"]


def test_warming_up_says_nothing_and_leaves_the_logger_as_it_was(caplog):
    import logging

    log = logging.getLogger("heart_attention.online.engine")
    with generation._hushed():
        log.warning("not heard")
    log.warning("heard")
    assert [r.message for r in caplog.records] == ["heard"]


def test_a_strip_has_a_row_a_method(tmp_path):
    from PIL import Image

    clips = [(name, np.full((5, 16, 24, 3), i * 60, np.uint8)) for i, name in enumerate(("dense", "other"))]
    picture = np.asarray(Image.open(video.strip(clips, tmp_path / "s.png", columns=3)))
    assert picture.shape[0] > 2 * 100 and (picture[picture.shape[0] - 20, -10] == 60).all()
