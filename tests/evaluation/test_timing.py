"""Turns, times of forwards, and the verdict on a busy machine."""

import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heart_attention.evaluation import tables, timing


def test_jobs_take_turns_and_only_one_runs_at_a_time():
    seen = []

    def job(name, turns):
        def work(pause):
            for i in range(turns):
                seen.append((name, i))
                pause()
            return name

        return work

    assert timing.in_turns([job("a", 3), job("b", 1), job("c", 2)]) == ["a", "b", "c"]
    assert seen == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("c", 1), ("a", 2)]


def test_an_error_ends_all_jobs_and_is_raised():
    closed = []

    def endless(pause):
        try:
            while True:
                pause()
        finally:
            closed.append(True)

    def failing(pause):
        pause()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        timing.in_turns([endless, failing, endless])
    assert closed == [True, True]


def test_forwards_are_timed_by_step_and_pauses_are_not():
    module = torch.nn.Linear(2, 2)
    timer = timing.ForwardTimer([module])
    module(torch.zeros(1, 2))
    timer.step += 1
    module(torch.zeros(1, 2))
    timer.paused = True
    module(torch.zeros(1, 2))
    steps = timer.close()
    assert len(steps) == 2 and all(s > 0 for s in steps) and not module._forward_hooks


def test_with_offload_both_ends_of_a_forward_are_taken_on_the_device(monkeypatch):
    """Weights lie in main memory before the first forward and on the device after it."""

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = clock.pop(0)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    clock = [1.0, 41.0]  # milliseconds
    monkeypatch.setattr(torch.cuda, "Event", Event)
    module = torch.nn.Linear(2, 2)
    timer = timing.ForwardTimer([module], "cuda:0")
    module(torch.zeros(1, 2))
    assert timer.close() == [pytest.approx(0.04)] and clock == []


def test_spread_and_interval():
    assert timing.spread([9.0, 1.0, 1.0, 1.0, 1.0]) == 0.0  # the first step is not counted
    assert timing.spread([1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 1.0]) > 0.5
    assert timing.spread([1.0, 1.0]) is None
    assert timing.step_interval([2.0] * 6, [1.0] * 6) == pytest.approx(0.0, abs=1e-12)
    assert timing.step_interval([2.0, 2.5, 1.5, 2.0], [1.0] * 4) > 0.1


def test_the_verdict_names_what_was_seen():
    assert timing.verdict([{"spread": 0.05, "waited": 0.01}, {"spread": None}]) == ""
    told = timing.verdict([{"spread": 0.6, "waited": 0.3}])
    assert "times cannot be trusted" in told and "60%" in told and "30%" in told


def _run_in_turns(busy: tuple[float, float], slower: dict[str, float], steps: int = 20) -> dict:
    """Rows of dense and two methods that take turns while a neighbour slows each by its factor during a part of the rounds."""
    work = {"dense": [1.0] * steps, "quick": [1.0] * 5 + [0.4] * (steps - 5), "slow": [1.0] * 5 + [0.8] * (steps - 5)}
    taken: dict[str, list[float]] = {name: [] for name in work}
    total, now = sum(map(sum, work.values())), 0.0
    for step in range(steps):
        for name, need in work.items():
            met = busy[0] * total <= now < busy[1] * total
            taken[name].append(need[step] * (slower[name] if met else 1.0))
            now += need[step]
    rows = []
    for name, seconds in taken.items():
        row = {"method": name, "prompt": "p", "seed": 0, "total_s": sum(seconds), "steps_s": seconds}
        row |= {"reference_s": {"total_s": sum(taken["dense"])}, "reference_steps_s": taken["dense"]}
        rows.append(
            row | {"spread": timing.spread(taken["dense"]), "waited": None}
        )  # not every system tells of waiting
    return {row["method"]: row for row in rows}


@given(st.floats(0.0, 0.5), st.floats(1.0, 6.0), st.floats(0.6, 1.4), st.floats(0.6, 1.4))
def test_a_neighbour_during_any_half_moves_no_speed_up_by_15_percent_or_it_is_said(start, factor, quick, slow):
    """The rule for times that can be believed; a neighbour may slow methods unequally (by what they ask of memory)."""
    slower = {"dense": factor, "quick": 1 + (factor - 1) * quick, "slow": 1 + (factor - 1) * slow}
    idle = _run_in_turns((0, 0), slower)
    busy = _run_in_turns((start, start + 0.5), slower)
    doubted = timing.verdict(list(busy.values()))
    for name in ("quick", "slow"):
        before, after = (tables.speedup([rows[name]], [rows["dense"]], "total_s")[0] for rows in (idle, busy))
        assert abs(after / before - 1) <= 0.15 or doubted, (name, before, after)
    assert timing.verdict(list(idle.values())) == ""


def test_a_strong_neighbour_is_always_told():
    for start in (0.0, 0.2, 0.5):
        rows = _run_in_turns((start, start + 0.5), dict.fromkeys(("dense", "quick", "slow"), 2.0))
        assert "cannot be trusted" in timing.verdict(list(rows.values()))


@pytest.mark.skipif(timing.cpu_wait() is None, reason="the kernel does not tell how long threads waited")
def test_a_neighbour_on_every_core_shows_as_waiting():
    import os

    spin = "import time\nend = time.time() + 3\nwhile time.time() < end: pass"
    neighbours = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        time.sleep(0.3)
        before, end = timing.cpu_wait(), time.perf_counter() + 1.0
        while time.perf_counter() < end:
            pass
        assert timing.waited_share(before, timing.cpu_wait()) > timing.WAITED
    finally:
        for one in neighbours:
            one.kill()
            one.wait()
