"""Dense trajectories: what is recorded replays bit for bit, guidance is the sampler's, files are checked."""

from __future__ import annotations

import pytest
import torch
from models_for_tests import CALL, wan_context, wan_pipe, wan_transformer

from heart_attention.calibration.measure import trajectory
from heart_attention.calibration.measure.replay import Replay
from heart_attention.errors import HeartError


@pytest.fixture(scope="module")
def recorded():
    pipe, found = wan_pipe(layers=2), []
    plain = pipe("a cat", generator=_noise(), output_type="latent", **CALL).frames
    with Replay(pipe.transformer, pipe.scheduler) as replay:
        trajectory.record(pipe, replay, 0, "a cat", [1, 5], CALL, 7, found.append)
        replayed = [[replay.forward(b.inputs) for b in c.branches] for c in found]
    after = pipe("a cat", generator=_noise(), output_type="latent", **CALL).frames
    return found, replayed, plain, after


def _noise():
    return torch.Generator("cpu").manual_seed(3)


def test_contexts_replay_bit_for_bit(recorded):
    found, replayed, _, _ = recorded
    assert [(c.prompt, c.step) for c in found] == [(0, 1), (0, 5)]
    for context, outputs in zip(found, replayed):
        assert [b.name for b in context.branches] == ["cond", "uncond"]
        assert all(torch.equal(b.output, out) for b, out in zip(context.branches, outputs))


def test_recording_leaves_the_pipeline_as_it_was(recorded):
    *_, plain, after = recorded
    assert torch.equal(torch.as_tensor(plain), torch.as_tensor(after))


def test_guidance_is_the_samplers(recorded):
    context = recorded[0][0]
    assert [b.weights for b in context.branches] == [(4.0,), (-3.0,)]
    cond, uncond = (b.output for b in context.branches)
    torch.testing.assert_close(context.reference(), uncond + 4.0 * (cond - uncond))
    assert torch.equal(context.conditional().reference(), cond)


def test_start_noise_belongs_to_seed_and_prompt():
    pipe, latents = wan_pipe(layers=1), []
    with Replay(pipe.transformer, pipe.scheduler) as replay:
        for prompt, seed in ((0, 7), (0, 7), (1, 7), (0, 8)):
            trajectory.record(
                pipe,
                replay,
                prompt,
                "x",
                [0],
                CALL,
                seed,
                lambda c: latents.append(c.branches[0].inputs["hidden_states"]),
            )
    assert torch.equal(latents[0], latents[1])
    assert not torch.equal(latents[0], latents[2]) and not torch.equal(latents[0], latents[3])


def test_nothing_is_computed_after_the_last_wanted_step():
    pipe, forwards, found = wan_pipe(layers=1), [], []
    pipe.transformer.register_forward_hook(lambda *_: forwards.append(1))
    with Replay(pipe.transformer, pipe.scheduler) as replay:
        trajectory.record(pipe, replay, 0, "x", [0, 2], CALL, 0, found.append)
    assert [c.step for c in found] == [0, 2] and len(forwards) == 2 * 3  # two branches
    assert not pipe.interrupt


def test_a_step_that_never_comes_is_an_error():
    pipe = wan_pipe(layers=1)
    with (
        Replay(pipe.transformer, pipe.scheduler) as replay,
        pytest.raises(HeartError, match="took 8 steps but step 20"),
    ):
        trajectory.record(pipe, replay, 0, "x", [20], CALL, 0, lambda c: None)


def test_spread_is_the_adjoint_of_combine():
    context = wan_context(wan_transformer(layers=1))
    outputs = [torch.randn_like(b.output) for b in context.branches]
    cotangent = torch.randn_like(context.reference())
    left = (context.combine(outputs) * cotangent).sum()
    right = sum((o * c).sum() for o, c in zip(outputs, context.spread(cotangent)))
    torch.testing.assert_close(left, right)


def test_batched_guidance_is_found():
    both = torch.randn(2, 4, 2, 4, 4)
    velocity = both[:1] + 6.0 * (both[1:] - both[:1])
    assert trajectory.fit_guidance([both], velocity) == [(-5.0, 6.0)]
    assert trajectory.fit_guidance([both[:1]], both[:1]) == [(1.0,)]


def test_guidance_that_is_no_weighted_sum_is_refused():
    a, b = torch.randn(1, 4, 2, 4, 4), torch.randn(1, 4, 2, 4, 4)
    with pytest.raises(HeartError, match="guidance rescale"):
        trajectory.fit_guidance([a, b], (a * b))
    with pytest.raises(HeartError, match="does not come from outputs"):
        trajectory.fit_guidance([a[:, :2]], a)


@pytest.mark.parametrize(
    "layout, shape", [("bcthw", (1, 2, 3, 4, 5)), ("btchw", (1, 3, 2, 4, 5)), ("b(thw)c:3,4,5", (1, 60, 2))]
)
def test_layouts_go_there_and_back(layout, shape):
    x = torch.randn(shape)
    video = trajectory.to_video(x, layout)
    assert video.shape == (1, 2, 3, 4, 5)
    assert torch.equal(trajectory.from_video(video, layout), x)


def test_a_context_is_one_file_and_comes_back(recorded):
    context = recorded[0][0]
    data = trajectory.to_bytes(context)
    assert data == trajectory.to_bytes(trajectory.from_bytes(data))
    again = trajectory.from_bytes(data)
    assert again.name == context.name and again.layout == context.layout
    for a, b in zip(again.branches, context.branches):
        assert a.weights == b.weights and a.inputs.keys() == b.inputs.keys()
        assert all(torch.equal(a.inputs[k], v) for k, v in b.inputs.items() if torch.is_tensor(v))


def test_damaged_or_missing_contexts_are_not_used(tmp_path, recorded):
    files = {c.step: trajectory.to_bytes(c) for c in recorded[0]}
    store = trajectory.Trajectories(tmp_path)
    assert not store.has(0, [1, 5])
    store.write(0, files)
    assert store.has(0, [1, 5]) and store.read(0, 5) == files[5]
    assert not store.has(0, [1, 6])
    (tmp_path / "p000_s005.safetensors").write_bytes(files[5][:-1])
    assert not trajectory.Trajectories(tmp_path).has(0, [1, 5])
    with pytest.raises(HeartError, match="changed or damaged"):
        store.read(0, 5)
    (tmp_path / "p000_s005.safetensors").unlink()
    with pytest.raises(HeartError, match="cannot be read"):
        store.read(0, 5)


def test_arguments_that_cannot_be_stored_are_named():
    with pytest.raises(HeartError, match="hands controller=object"):
        trajectory._storable("controller", object())
