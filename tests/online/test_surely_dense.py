"""Calls that surely run dense take a short way: it changes neither the video nor what is told of it."""

from unittest import mock

import pytest
import torch

import heart_attention as heart
from heart_attention import tiny
from heart_attention.online.engine import Engine

SMALL = {**tiny.QUICK, "num_frames": 4, "height": 64, "width": 64, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def pipe():
    made = tiny.load_random()
    made.set_progress_bar_config(disable=True)
    return made


def generated(pipe, config):
    with heart.enabled(pipe, config):
        latents = pipe("a red ball", generator=torch.Generator().manual_seed(0), output_type="latent", **SMALL).frames
        told = heart.stats(pipe).to_dict()
    return latents, {name: told[name] for name in ("calls", "dense_calls", "dense_reasons", "fallbacks", "dense_steps")}


@pytest.mark.parametrize(
    "config",
    [
        heart.HeartConfig(thresholds=1.0, dense_steps=0),
        heart.HeartConfig(dense_steps=1),  # 256 tokens: not worth it
        heart.HeartConfig(dense_steps=2, dense_last_steps=1),
        heart.HeartConfig(heart.ExactMass(block=16, warm_up=True), 0.5, dense_steps=2, force_sparse=True),
    ],
)
def test_the_short_way_tells_the_same(pipe, config):
    with mock.patch.object(Engine, "note_dense", autospec=True, side_effect=Engine.note_dense) as short:
        latents, told = generated(pipe, config)
    assert short.called
    with mock.patch.object(Engine, "surely_dense", lambda *args: ""):
        want, long = generated(pipe, config)
    assert torch.equal(latents, want) and told == long


def test_another_shape_is_asked_about_anew(pipe):
    with heart.enabled(pipe, heart.HeartConfig(thresholds=1.0)):
        noise = torch.Generator().manual_seed(0)
        pipe("a red ball", generator=noise, output_type="latent", **SMALL)
        before = heart.stats(pipe)["calls"]
        pipe("a red ball", generator=noise, output_type="latent", **SMALL | {"num_frames": 8})
        told = heart.stats(pipe).to_dict()
    assert told["calls"] == told["dense_calls"] == 2 * before
    assert set(told["dense_reasons"]) <= {"every threshold is 1", "warm-up step"}
