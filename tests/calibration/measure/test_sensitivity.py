"""Heads at the reference point in one phase alone, and what that does to the final latent."""

from __future__ import annotations

import pytest
import torch
from models_for_tests import CALL, wan_pipe

import heart_attention as heart
from heart_attention.calibration.measure import sensitivity
from heart_attention.calibration.measure.candidates import DENSE, Spec
from heart_attention.calibration.measure.replay import Replay

LOW, ALL = 0, 1  # places of the points in the spec
SPEC = Spec.of(heart.XAttention(block=16, stride=4), (0.3, 1.0))


@pytest.fixture(scope="module")
def pipe():
    return wan_pipe(layers=1)


def effects(pipe, edges, point=LOW):
    with Replay(pipe.transformer, pipe.scheduler) as replay:
        choice = [[point] * pipe.transformer.config.num_attention_heads] * len(replay.layers)
        return sensitivity.phase_effects(pipe, replay, SPEC, choice, 0, "a red ball", CALL, 0, edges)


def test_every_phase_has_an_effect_and_an_empty_one_none(pipe):
    first, second = effects(pipe, (1.0, 0.6, 0.0))
    assert first > 0 and second > 0
    nothing, everything = effects(pipe, (2.0, 1.5, 0.0))
    assert nothing == 0 and everything > max(first, second) / 2


def test_effects_are_the_same_again(pipe):
    assert effects(pipe, (1.0, 0.5, 0.0)) == effects(pipe, (1.0, 0.5, 0.0))


@pytest.mark.parametrize("point", [DENSE, ALL])
def test_heads_that_leave_nothing_out_have_no_effect(pipe, point):
    assert effects(pipe, (1.0, 0.0), point)[0] < 1e-8


def test_the_model_is_given_back(pipe):
    before = pipe(
        "a red ball", generator=torch.Generator().manual_seed(0), output_type="latent", return_dict=False, **CALL
    )
    effects(pipe, (1.0, 0.0))
    after = pipe(
        "a red ball", generator=torch.Generator().manual_seed(0), output_type="latent", return_dict=False, **CALL
    )
    assert torch.equal(before[0], after[0])
