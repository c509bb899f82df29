"""Distilling the student, at a toy scale."""

import pytest
import torch
from tools.train_tiny import student as distil

PLAN = distil.Plan(steps=3, mix=((1.0, (1, 2, 4, 4)),))


@pytest.fixture(scope="module")
def teacher():
    return distil.Teacher(0)


def test_a_lesson_is_the_mean_velocity_of_two_guided_steps(teacher):
    lesson = teacher.lesson(0, (2, 2, 4, 4), torch.Generator().manual_seed(1))
    begin, middle, _ = distil.noise_levels(2, torch.Generator().manual_seed(1))
    assert lesson.noisy.shape == lesson.velocity.shape and torch.equal(lesson.sigma, begin)
    assert bool((begin > middle).all())


def test_stopped_and_started_again_it_ends_in_the_same_weights(teacher, tmp_path):
    whole = distil.Student(teacher, PLAN)
    (tmp_path / "whole").mkdir()
    distil.run(whole, tmp_path / "whole")
    parts = tmp_path / "parts"
    parts.mkdir()
    first = distil.Student(teacher, PLAN)
    first.train_step()
    distil._save(first, parts)
    second = distil.Student(teacher, PLAN)
    distil.run(second, parts)
    assert second.step == whole.step == 3
    assert all(torch.equal(p, second.weights[n]) for n, p in whole.weights.items())
