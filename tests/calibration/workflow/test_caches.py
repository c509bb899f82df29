"""Calibrating under a cache: contexts are those of steps that run with it, answers are whole, and it stays on afterwards."""

from __future__ import annotations

import pytest
import torch
from diffusers import FirstBlockCacheConfig, hooks
from models_for_tests import CALL, wan_pipe

from heart_attention.backbones import XAttention
from heart_attention.calibration.measure import trajectory
from heart_attention.calibration.workflow.plan import plan
from heart_attention.calibration.workflow.settings import Settings
from heart_attention.calibration.workflow.tasks import CalibrationWorker, Task
from heart_attention.models.caches import Cache

SETTINGS = Settings(XAttention(stride=4, block=8), ("a red ball",), CALL, candidates=(0.6, 0.9))
STEPS = (0, 2, 3, 7)


def generate(pipe):
    noise = torch.Generator("cpu").manual_seed(3)
    return torch.as_tensor(pipe("a cat", generator=noise, output_type="latent", **CALL).frames)


def attended(pipe) -> list[int]:
    """Attention calls of each step of a generation."""
    counts, step, layers = [0], pipe.scheduler.step, [block.attn1 for block in pipe.transformer.blocks]
    processors = [layer.processor for layer in layers]

    def counted(processor):
        return lambda *args, **kwargs: counts.__setitem__(-1, counts[-1] + 1) or processor(*args, **kwargs)

    pipe.scheduler.step = lambda *args, **kwargs: counts.append(0) or step(*args, **kwargs)
    for layer, processor in zip(layers, processors):
        layer.processor = counted(processor)
    generate(pipe)
    del pipe.scheduler.step
    for layer, processor in zip(layers, processors):
        layer.processor = processor
    return counts[:-1]


@pytest.mark.parametrize("name", ["first block", "taylorseer"])
def test_steps_that_a_cache_leaves_out_are_measured_where_attention_runs(name):
    pipe = wan_pipe(layers=2)
    if name == "first block":
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))  # all but the first step take from it
    elif hasattr(hooks, "TaylorSeerCacheConfig"):
        own = [r"blocks\.\d+\.attn1"]  # its default names no module of Wan
        given = {"cache_interval": 3, "disable_cache_before_step": 1, "cache_identifiers": own}
        pipe.transformer.enable_cache(hooks.TaylorSeerCacheConfig(**given))
    else:
        pytest.skip("this diffusers has no TaylorSeer")
    before, counts = generate(pipe), attended(pipe)
    runs = [step for step, count in enumerate(counts) if count == 4]  # two layers, two branches
    assert 0 < len(runs) < len(counts)
    worker = CalibrationWorker(pipe, SETTINGS.job())
    ((_, files),) = worker.run(Task("trajectory", 0, text="a cat", steps=STEPS), None)
    contexts = {step: trajectory.from_bytes(data) for step, data in files.items()}
    assert sorted(contexts) == list(STEPS) and all(contexts[step].step == step for step in STEPS)
    times = [float(t) for t in pipe.scheduler.timesteps]
    for step in STEPS:
        runs_at = next((s for s in runs if s >= step), runs[-1])
        for branch in contexts[step].branches:
            assert float(branch.inputs["timestep"].flatten()[0]) == times[runs_at]
            with torch.no_grad():
                assert torch.equal(worker.replay.forward(branch.inputs), branch.output)  # nothing is taken from a cache
    ((_, figures),) = worker.run(Task("verify", 0, 3, choice=((0, 0), (0, 0))), files[3])
    assert figures["error"] > 0
    worker.close()
    assert pipe.transformer.is_cache_enabled and attended(pipe) == counts
    assert torch.equal(generate(pipe), before)


def test_the_plan_names_the_cache():
    pipe = wan_pipe(layers=2)
    assert "cache" not in plan(pipe, SETTINGS)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    assert plan(pipe, SETTINGS)["cache"] == {"name": "FirstBlockCache", "threshold": 0.3}


def test_cache_dit_is_taken_off_and_put_on_again():
    """It keeps the forward that it replaced."""
    model = torch.nn.Linear(2, 2)
    original, calls = model.forward, []
    assert not Cache(model) and Cache(model).to_dict() is None
    model._original_forward, model._is_cached = original, True
    model.forward = lambda x: calls.append(1) or original(x)
    cache = Cache(model)
    assert cache and cache.to_dict() == {"name": "cache-dit"}
    cache.off()
    model(torch.ones(2))
    assert not calls
    with cache.running():
        model(torch.ones(2))
    model(torch.ones(2))
    assert len(calls) == 1
    cache.on()
    model(torch.ones(2))
    assert len(calls) == 2
