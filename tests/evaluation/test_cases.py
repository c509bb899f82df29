"""Cases as tasks: what a worker answers, and a real local Ray cluster of two workers, one killed in the middle."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch
from ray_for_tests import local_cluster

from heart_attention.evaluation import cases, generation, methods, pipelines, results, run, video

PROMPTS = ["a red circle moves right on a blue background", "a green square moves up on a white background"]
TIMES = {
    "attention_s",
    "total_s",
    "wall_s",
    "steps_s",
    "parts_s",
    "reference_s",
    "reference_steps_s",
    "spread",
    "waited",
}
TIMES |= {"bytes"}  # a Matroska file has random numbers of its own in its head


@pytest.fixture
def comparison(tiny_pipe, small_call):
    """Methods and setting of a comparison that takes seconds."""
    names = ("dense", "xattention", "svg2+tmr")
    chosen = [methods.build(n, tiny_pipe, "tiny", **({} if n == "dense" else {"force_sparse": True})) for n in names]
    return chosen, generation.Setting("tiny", {**small_call, "num_inference_steps": 6})


def _case(comparison, wanted):
    chosen, setting = comparison
    named = tuple((m, f"r-{m.name}") for m in chosen)
    return cases.Case(PROMPTS[0], 0, named, frozenset(wanted), setting, warm=False)


def test_a_worker_answers_with_whole_records(comparison, tiny_pipe, tmp_path):
    case = _case(comparison, ["r-dense", "r-xattention", "r-svg2+tmr"])
    found = dict(cases.CaseWorker(tiny_pipe).run(case))
    assert list(found) == case.names() and found["r-dense"]["row"].get("psnr") is None
    made = found["r-xattention"]
    assert made["row"]["psnr"] > 10 and made["row"]["device"] and len(made["row"]["place"]) == 8
    assert {p: len(b) for p, b in made["files"].items()} == made["row"]["bytes"]
    (tmp_path / "v.mkv").write_bytes(made["files"][made["row"]["lossless"]])
    assert len(video.read(tmp_path / "v.mkv")) == 4


def test_dense_that_runs_along_makes_no_record_and_judges_nobody(comparison, tiny_pipe):
    """Its stored video is the reference: another device's dense video would not be the same one."""
    found = dict(cases.CaseWorker(tiny_pipe).run(_case(comparison, ["r-xattention"])))
    assert list(found) == ["r-xattention"] and "psnr" not in found["r-xattention"]["row"]
    assert found["r-xattention"]["row"]["reference_s"]["total_s"] > 0


def test_methods_are_tried_once_a_worker(comparison, tiny_pipe, monkeypatch):
    tried = []
    monkeypatch.setattr(generation, "warm_up", lambda pipe, some, *_: tried.append([m.name for m in some]))
    monkeypatch.setattr(generation, "generate", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    worker, chosen = cases.CaseWorker(tiny_pipe), comparison[0]
    for wanted in (chosen[:2], chosen):
        named = tuple((m, m.name) for m in wanted)
        with pytest.raises(KeyboardInterrupt):
            list(worker.run(cases.Case("x", 0, named, frozenset(), comparison[1])))
    assert tried == [["dense", "xattention"], ["svg2+tmr"]]


def test_devices_are_counted_by_kind():
    rows = [{"device": d, "place": p} for d, p in (("A", "1"), ("A", "2"), ("A", "1"), ("B", "3"))] + [{}]
    assert results.devices(rows) == {"A": 2, "B": 1}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_workers_one_killed_leave_what_a_local_run_leaves(comparison, tiny_pipe, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    from heart_attention.execution.ray import RayExecutor

    chosen, setting = comparison
    local = run.run(tiny_pipe, chosen, PROMPTS, [0, 1], setting, tmp_path / "local")
    killed: list[int] = []
    executors: list[RayExecutor] = []
    original = RayExecutor.__init__
    monkeypatch.setattr(RayExecutor, "__init__", lambda self, *a: (original(self, *a), executors.append(self))[0])

    def kill_one(method: str, steps: int) -> None:
        if not killed:  # the first record is here: both workers are at work or about to be
            killed.append(ray.get(executors[0].actors[0].process.remote()))
            os.kill(killed[0], signal.SIGKILL)

    cluster = cases.Cluster("auto", functools.partial(pipelines.load, "tiny", device="cpu"), 2)
    with local_cluster(torch.get_num_threads()), cases.opened(cluster) as executor:
        spread = run.run(tiny_pipe, chosen, PROMPTS, [0, 1], setting, tmp_path / "ray", kill_one, executor=executor)
    assert killed and spread["provenance"]["devices"] == local["provenance"]["devices"]
    for one, other in zip(local["rows"], spread["rows"], strict=True):
        assert {k: v for k, v in one.items() if k not in TIMES} == {k: v for k, v in other.items() if k not in TIMES}
        frames = [video.read(tmp_path / place / row["lossless"]) for place, row in (("local", one), ("ray", other))]
        assert (frames[0] == frames[1]).all()
    monkeypatch.setattr(generation, "generate", lambda *a, **k: pytest.fail("generated again"))
    again = run.run(tiny_pipe, chosen, PROMPTS, [0, 1], setting, tmp_path / "ray")
    assert again["rows"] == spread["rows"]
