"""Velocity noise in one phase alone, and what it does to the final latent."""

from __future__ import annotations

import pytest
import torch
from models_for_tests import CALL, wan_pipe

from heart_attention.calibration.measure import sensitivity
from heart_attention.calibration.measure.replay import Replay


@pytest.fixture(scope="module")
def pipe():
    return wan_pipe(layers=1)


def effects(pipe, edges):
    with Replay(pipe.transformer, pipe.scheduler) as replay:
        return sensitivity.phase_effects(pipe, replay, 0, "a red ball", CALL, 0, edges)


def test_every_phase_has_an_effect_and_an_empty_one_none(pipe):
    first, second = effects(pipe, (1.0, 0.6, 0.0))
    assert first > 0 and second > 0
    nothing, everything = effects(pipe, (2.0, 1.5, 0.0))
    assert nothing == 0 and everything == pytest.approx(first + second, rel=0.5)


def test_effects_are_the_same_again_and_the_scheduler_is_given_back(pipe):
    assert effects(pipe, (1.0, 0.5, 0.0)) == effects(pipe, (1.0, 0.5, 0.0))
    assert "step" not in vars(pipe.scheduler)


def test_noise_has_the_energy_it_should():
    velocity = torch.randn(1, 4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    noise = sensitivity._noise(velocity, 0, 0, 3)
    assert noise.square().sum() / velocity.square().sum() == pytest.approx(sensitivity.LEVEL, rel=1e-5)
    assert not torch.equal(noise, sensitivity._noise(velocity, 0, 0, 4))
