"""Counters, records and the table that people read."""

import json

import pytest
import torch

from heart_attention.online.stats import PARTS, Recorder, Row, Timer


class FakeLaps(Timer):
    """Laps with chosen times."""

    def __init__(self, **seconds):
        super().__init__()
        now = self.marks[0][1]
        for part, spent in seconds.items():
            now += spent
            self.marks.append((part, now))


def sparse(step, layer=0, branch="cond", density=(0.5, 0.25), refreshed=(1.0, 0.0), drift=None, **kw):
    timer = FakeLaps(drift=0.001, prediction=0.01, attention=0.1)
    return Row(0, layer, step, branch, timer, density=list(density), refreshed=list(refreshed), drift=drift, **kw)


def dense(step, layer=0, branch="cond", reason="warm-up step"):
    return Row(0, layer, step, branch, FakeLaps(dense=0.2), reason)


def test_means_and_times():
    r = Recorder(1, 2)
    for row in (dense(0), sparse(1), sparse(2, refreshed=(0.0, 0.0), drift=[1.0, 3.0])):
        r.add(row)
    d = r.summary().to_dict()
    assert (d["calls"], d["dense_calls"], d["dense_reasons"]) == (3, 1, {"warm-up step": 1})
    assert d["density"] == pytest.approx(0.375)
    assert d["refresh_rate"] == pytest.approx(0.25)
    assert (d["drift"], d["drift_max"]) == (2.0, 3.0)
    assert d["time"] == pytest.approx(
        {"drift": 0.002, "prediction": 0.02, "planning": 0, "attention": 0.2, "dense": 0.2, "total": 0.422}
    )
    assert [s["step"] for s in d["steps"]] == [0, 1, 2]
    assert d["steps"][1]["time"]["total"] == pytest.approx(0.111)


def test_records_are_arrays_by_layer_step_and_head():
    r = Recorder(2, 2)
    for step in (4, 5):
        for layer in (0, 1):
            r.add(dense(step, layer) if step == 4 else sparse(step, layer, drift=[0.5, float("nan")]))
            r.add(sparse(step, layer, branch="uncond"))
    cond, uncond = r.summary().to_dict()["records"]
    assert (cond["branch"], uncond["branch"], cond["steps"]) == ("cond", "uncond", [4, 5])
    assert cond["density"] == [[[1.0, 1.0], [0.5, 0.25]]] * 2
    assert cond["refreshed"] == [[[0.0, 0.0], [1.0, 0.0]]] * 2
    assert cond["drift"] == [[[None, None], [0.5, None]]] * 2
    assert cond["dense"] == [[True, False]] * 2


def test_heads_of_another_rank_stay_empty():
    r = Recorder(1, 4)
    r.add(sparse(0, heads=[3, 1]))
    assert r.summary()["records"][0]["density"] == [[[None, 0.25, None, 0.5]]]


def test_sums_go_on_but_records_are_those_of_the_last_generation():
    r = Recorder(1, 2)
    for _ in range(3):
        for step in range(2):
            r.add(sparse(step))
        r.end_generation()
        r.end_generation()  # a pipeline may say it twice
    d = r.summary().to_dict()
    assert (d["generations"], d["calls"]) == (3, 6)
    assert len(r.rows) == 2
    assert d["records"][0]["steps"] == [0, 1]  # still there after the generation's end


def test_plain_json_also_when_nothing_happened():
    for r in (Recorder(1, 2), Recorder(2, 2)):
        if r.layers == 2:
            r.add(sparse(0))
        d = r.summary(memory={"masks": 3}).to_dict()
        assert json.loads(json.dumps(d, allow_nan=False)) == d
        assert str(r.summary())


def test_table_has_a_line_for_each_layer_and_names_what_matters():
    r = Recorder(2, 2)
    r.notes.append("no preset knows this model")
    for layer in (0, 1):
        r.add(dense(0, layer, reason="not worth it: too few tokens"))
        r.add(sparse(1, layer))
    text = str(r.summary(memory={"masks": 2**20, "anchors": 0}))
    for part in ("no preset knows", "density 0.375", "refresh rate 0.5", "2 not worth it: too few tokens", "1.00 MB"):
        assert part in text
    assert all(part in text for part in PARTS)
    assert len(text.splitlines()) == 5 + 1 + 1 + 2


def test_laps_add_up_parts_that_come_twice():
    timer = FakeLaps(drift=1.0, attention=2.0)
    timer.marks.append(("drift", timer.marks[-1][1] + 3.0))
    assert timer.seconds() == pytest.approx({"drift": 4.0, "attention": 2.0})


class FakeEvent:
    """What CUDA events do, on a clock that moves when told."""

    now, done = 0.0, False

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.now += 1.0
        self.at = FakeEvent.now

    def query(self):
        return FakeEvent.done

    def synchronize(self):
        FakeEvent.done = True

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def test_gpu_times_are_taken_when_known_and_nobody_waits_unless_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    r = Recorder(1, 2)
    timer = Timer(cuda=True)
    timer.lap("drift")
    timer.lap("attention")
    r.add(Row(0, 0, 0, "cond", timer, density=[0.5, 0.5], refreshed=[1.0, 1.0]))
    early = r.summary()
    assert early["untimed_calls"] == 1 and early["time"]["total"] == 0 and "not timed yet" in str(early)
    asked = r.summary(wait=True)
    assert asked["untimed_calls"] == 0 and asked["time"]["attention"] == 1.0 and asked["time"]["drift"] == 1.0
    assert r.summary()["time"]["total"] == 2.0  # counted once
