"""True step, branch and generation from whatever a pipeline tells."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, UniPCMultistepScheduler

from heart_attention.online.clock import MOST_BRANCHES, Clock


class Context:
    def __init__(self, name, step_index=None):
        self.name, self.step_index = name, step_index


def t(value, batch=1):
    return torch.full((batch,), float(value))


def forward(clock, time, name=None, step=None):
    clock.set_context(None if name is None else Context(name, step))
    moment = clock.tick(time)
    clock.set_context(None)
    return moment.step, moment.branch, moment.generation


def generation(clock, times, names=("cond", "uncond")):
    return [forward(clock, t(x), name) for x in times for name in names]


def test_the_step_of_a_cache_context_comes_first():
    clock = Clock()
    assert forward(clock, t(900), "cond", 7) == (7, "cond", 0)
    assert forward(clock, t(900), "uncond", 7) == (7, "uncond", 0)
    assert forward(clock, t(100), "cond", 8) == (8, "cond", 0)


def test_older_diffusers_give_the_name_alone():
    clock = Clock()
    clock.set_context("uncond")
    assert clock.tick(t(900)).branch == "uncond"


def test_counting_timesteps_with_named_branches():
    clock = Clock()
    assert generation(clock, [900, 600, 300]) == [(step, name, 0) for step in range(3) for name in ("cond", "uncond")]


def test_unnamed_branches_are_numbered_by_call():
    clock = Clock()
    assert generation(clock, [900, 600], names=(None, None)) == [(0, "0", 0), (0, "1", 0), (1, "0", 0), (1, "1", 0)]


def test_unnamed_calls_at_one_timestep_cannot_pile_up():
    clock = Clock()
    branches = {forward(clock, t(900))[1] for _ in range(5 * MOST_BRANCHES)}
    assert len(branches) == MOST_BRANCHES


@pytest.mark.parametrize("how", ["rising", "reset", "same step", "given step"])
def test_a_new_generation(how):
    ended = []
    clock = Clock()
    clock.listeners.append(lambda: ended.append(1))
    if how == "given step":
        forward(clock, t(900), "cond", 0)
        forward(clock, t(900), "uncond", 0)
        assert forward(clock, t(900), "cond", 0) == (0, "cond", 1)
        assert forward(clock, t(900), "uncond", 0) == (0, "uncond", 1)
    elif how == "same step":  # broke off in the first step, begins again
        forward(clock, t(900), "cond")
        assert forward(clock, t(900), "cond") == (0, "cond", 1)
        assert forward(clock, t(900), "uncond") == (0, "uncond", 1)
    else:
        generation(clock, [900, 600])
        if how == "reset":
            clock.reset()
            clock.reset()  # both transformers of Wan2.2 are reset at the end
        assert generation(clock, [900, 600])[0] == (0, "cond", 1)
    assert len(ended) == 1


def test_mochi_counts_upwards():
    clock = Clock(rising=True)
    assert [m[0] for m in generation(clock, [0, 300, 600], ["cond"])] == [0, 1, 2]
    assert forward(clock, t(0), "cond") == (0, "cond", 1)


def test_timesteps_of_their_own_for_every_frame():
    clock = Clock()
    steps = [forward(clock, torch.tensor([[900.0, x]]), "cond")[0] for x in (900, 800, 700)]
    assert steps == [0, 1, 2]  # diffusion forcing: the noisiest frame stays while others move


def pipeline_steps(scheduler, count, names, dtype=torch.float32, clock=None):
    """A denoising loop such as pipelines have, without telling the step."""
    clock = clock or Clock(scheduler)
    scheduler.set_timesteps(count)
    latents, seen = torch.zeros(1, 1, 1, 2, 2), []
    for time in scheduler.timesteps:
        seen += [forward(clock, time.expand(1).to(dtype), name) for name in names]
        latents = scheduler.step(torch.ones_like(latents), time, latents, return_dict=False)[0]
    return seen


@pytest.mark.parametrize("names", [("cond", "uncond"), (None, None), (None,)])
@pytest.mark.parametrize(
    "scheduler",
    [
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        FlowMatchEulerDiscreteScheduler(shift=7.0),
        FlowMatchHeunDiscreteScheduler(),
    ],
    ids=lambda s: type(s).__name__,
)
def test_true_steps_with(scheduler, names):
    clock = Clock(lambda: scheduler)
    for gen in range(3):
        seen = pipeline_steps(scheduler, 6, names, clock=clock)
        steps = len(scheduler.timesteps)  # Heun evaluates twice at each inner timestep
        branches = [name or str(i) for i, name in enumerate(names)]
        assert seen == [(step, branch, gen) for step in range(steps) for branch in branches]


def test_timesteps_rounded_to_bf16_are_told_apart_by_the_scheduler():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    seen = pipeline_steps(scheduler, 50, ("cond",), torch.bfloat16)
    assert seen == [(step, "cond", 0) for step in range(50)]
    assert len({float(x.bfloat16()) for x in scheduler.timesteps}) < 50


def test_a_later_start_counts_from_there():
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(10)
    scheduler.set_begin_index(6)  # video-to-video
    clock = Clock(scheduler)
    assert [forward(clock, x.expand(1), "cond")[0] for x in scheduler.timesteps[6:7]] == [0]


def test_a_scheduler_of_another_pipeline_is_not_believed():
    idle = FlowMatchEulerDiscreteScheduler()
    idle.set_timesteps(4)
    clock = Clock(idle)
    busy = FlowMatchEulerDiscreteScheduler(shift=5.0)
    assert pipeline_steps(busy, 6, ("cond",), clock=clock) == [(step, "cond", 0) for step in range(6)]


def test_a_failure_in_the_first_step_without_names_is_over_with_the_next_table():
    scheduler = FlowMatchEulerDiscreteScheduler()
    clock = Clock(scheduler)
    scheduler.set_timesteps(4)
    forward(clock, scheduler.timesteps[0].expand(1))
    scheduler.set_timesteps(4)
    assert forward(clock, scheduler.timesteps[0].expand(1)) == (0, "0", 1)


def test_a_place_said_by_hand():
    clock = Clock()
    with clock.at(7, "cond"):
        assert forward(clock, t(5)) == (7, "cond", 0)
        assert forward(clock, t(5)) == (7, "cond", 0)  # probes repeat a step without ending anything
        with clock.at(3):
            assert forward(clock, t(5)) == (3, "0", 0)
    assert forward(clock, t(5)) == (0, "0", 1)  # counting again: it begins anew


def test_no_timestep_at_all():
    clock = Clock()
    assert clock.tick(None).timestep is None
    assert clock.tick(400.0).timestep == 400.0


def test_noise_levels_come_from_the_scheduler_and_fall():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(5)
    clock = Clock(lambda: scheduler)
    levels = [clock.noise_level(step) for step in range(5)]
    assert levels == [float(t) / 1000 for t in scheduler.timesteps.double()] and levels == sorted(levels, reverse=True)
    assert clock.noise_level(5) is None and Clock().noise_level(0) is None
    rising = Clock(lambda: scheduler, rising=True)
    assert rising.noise_level(0) == 1 - levels[0]
