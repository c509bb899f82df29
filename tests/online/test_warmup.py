"""Which steps stay dense, by number and by noise level."""

import logging

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

import heart_attention as heart
from heart_attention.errors import HeartError
from heart_attention.online import warmup
from heart_attention.online.clock import Clock

SCHEDULERS = {
    "unipc, shift 3": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    "unipc, shift 8": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0),
    "euler, no shift": FlowMatchEulerDiscreteScheduler(),
    "euler, shift 7": FlowMatchEulerDiscreteScheduler(shift=7.0),
}


def levels(scheduler, steps):
    scheduler.set_timesteps(steps)
    return Clock(scheduler).noise_levels()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("steps", "first"), [(50, 5), (25, 5), (8, 1), (4, 1), (1, 1)])
def test_auto_goes_by_what_is_done_in_a_step(name, steps, first):
    assert warmup.first_steps("auto", levels=levels(SCHEDULERS[name], steps)) == first
    assert warmup.first_steps("auto", steps) == first


def test_auto_goes_by_noise_where_it_falls_quickly():
    assert warmup.first_steps("auto", levels=[0.8**i for i in range(25)]) == 1
    assert warmup.first_steps("auto", levels=[0.6 - i / 50 for i in range(25)]) == 1  # video to video: half is done


def test_a_number_means_itself_and_unknown_steps_the_papers_five():
    assert warmup.first_steps(7, 4) == 7
    assert warmup.first_steps("auto") == 5


@pytest.mark.parametrize("bad", [-1, True, 2.0, "five", None, 10**9])
def test_other_values_are_one_sentence(bad):
    with pytest.raises(HeartError, match="dense_steps is .*'auto'"):
        heart.HeartConfig(dense_steps=bad)


def test_the_last_step_needs_to_be_known():
    chosen = warmup.choose("auto", 1, steps=8)
    assert [chosen.reason(s) for s in (0, 1, 6, 7)] == [warmup.FIRST, "", "", warmup.LAST]
    unknown = warmup.choose(0, 1)
    assert unknown.reason(99) == "" and "no effect" in unknown.warning()


def small_engine(steps, **kw):
    config = heart.HeartConfig(heart.XAttention(stride=4, block=8), 0.5, heart.Always(), force_sparse=True, **kw)
    engine = heart.Engine(config, layers=1, heads=2)
    engine.steps = lambda: steps
    return engine


def generate(engine, steps):
    q = torch.randn(1, 2, 32, 8)
    for step in range(steps):
        heart.attention(q, q, q, {"layer": 0, "step": step}, engine)


def test_four_steps_are_sparse_but_for_one_and_it_is_said_once(caplog):
    engine = small_engine(4)
    with caplog.at_level(logging.INFO, "heart_attention"):
        generate(engine, 4)
        generate(engine, 4)
    stats = engine.stats()
    assert stats["dense_reasons"] == {warmup.FIRST: 2} and stats["calls"] == 8
    assert stats["dense_steps"] == {"asked": "auto", "first": 1, "last": 0, "steps": 4}
    assert "the first 1 of 4 steps are dense (dense_steps=auto)" in str(stats)
    assert [r.message for r in caplog.records if "steps are dense" in r.message] == [
        "the first 1 of 4 steps are dense (dense_steps=auto)"
    ]


def test_a_wholly_dense_generation_is_said_aloud(caplog):
    engine = small_engine(4, dense_steps=5)
    generate(engine, 4)
    assert engine.stats()["notes"] == [
        "all 4 steps run dense: dense_steps is 5 and dense_last_steps 0; give fewer, or dense_steps='auto'"
    ]
    assert "all 4 steps run dense" in caplog.text


def test_a_wholly_dense_generation_of_unknown_length_is_said_at_its_end():
    engine = small_engine(None)
    generate(engine, 4)
    assert not engine.stats()["notes"]
    generate(engine, 1)
    (note,) = engine.stats()["notes"]
    assert note.startswith("all 4 steps ran dense")


def test_the_last_step_can_be_dense():
    engine = small_engine(6, dense_last_steps=2)
    generate(engine, 6)
    assert engine.stats()["dense_reasons"] == {warmup.FIRST: 1, warmup.LAST: 2}
    assert not engine.stats()["fallbacks"]
