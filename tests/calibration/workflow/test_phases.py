"""Phases cover the sparse steps, and noise levels tell them apart."""

from __future__ import annotations

import numpy as np
import pytest
from diffusers import DDIMScheduler, UniPCMultistepScheduler
from models_for_tests import CALL

from heart_attention.backbones import XAttention
from heart_attention.calibration.workflow.phases import Phases, noise_levels, phases_of
from heart_attention.calibration.workflow.settings import Settings

FLOW = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def settings(steps=50, **more) -> Settings:
    return Settings(XAttention(), ("a",), CALL | {"num_inference_steps": steps}, **more)


def test_one_phase_is_all_sparse_steps():
    one = phases_of(settings(), FLOW)
    assert one == Phases(((5, 49),), (), (1.0,)) and one.to_dict() == {} and one.shares().tolist() == [[[1.0]]]
    assert one.of_step(0) == one.of_step(49) == 0


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_phases_cover_the_sparse_steps_once(count):
    phases = phases_of(settings(phases=count), FLOW)
    steps = [s for first, last in phases.intervals for s in range(first, last + 1)]
    assert steps == list(range(5, 50)) and phases.count == count
    for p, (first, last) in enumerate(phases.intervals):
        assert phases.of_step(first) == phases.of_step(last) == p
    levels = noise_levels(FLOW, 50)
    by_level = [sum(levels[s] <= sigma for sigma in phases.sigmas) for s in range(5, 50)]  # as the engine does
    assert by_level == [phases.of_step(s) for s in range(5, 50)]
    assert phases.shares().mean() == pytest.approx(1)


def test_the_papers_strata_are_the_four_phases():
    assert phases_of(settings(phases=4), FLOW).intervals == ((5, 11), (12, 24), (25, 36), (37, 49))


def test_phases_of_the_steps_that_a_transformer_serves():
    phases = phases_of(settings(phases=2), FLOW, (20, 49))
    assert phases.intervals[0][0] == 20 and phases.intervals[-1][1] == 49


def test_noise_levels_fall_from_1_whatever_the_scheduler():
    for scheduler in (FLOW, DDIMScheduler()):
        levels = noise_levels(scheduler, 20)
        assert len(levels) == 20 and all(np.diff(levels) < 0) and 0.9 < levels[0] <= 1 and levels[-1] >= 0


def test_weights_have_mean_1():
    phases = phases_of(settings(phases=2), FLOW).weighed([3.0, 1.0])
    assert phases.weights == (1.5, 0.5) and phases.to_dict()["weights"] == [1.5, 0.5]
