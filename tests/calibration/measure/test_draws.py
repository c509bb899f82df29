"""Draws: pinned values, balance, strata, and that nothing but (seed, purpose, layer, head, j) matters."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.calibration.measure import draws
from heart_attention.errors import HeartError

PINNED = {
    "number": 111365726816382640397447720758964200167,
    "steps": [3, 16, 32, 38],
    "prompts": [[1, 2, 2, 0], [2, 0, 0, 1]],
    "seed": 4187305157954902887,
}


def test_pinned_values():
    """Changing the rule would silently change every calibration: then GENERATOR must change as well."""
    assert draws.GENERATOR == "sha256-v1"
    assert draws.number(0, "step", 1, 2, 3) == PINNED["number"]
    assert draws.steps_of_head(7, 3, 5, draws.strata(50, "paper")) == PINNED["steps"]
    assert draws.prompt_of_heads(0, 2, 4, 3).tolist() == PINNED["prompts"]
    assert draws.torch_seed(1, "noise", 4) == PINNED["seed"]


def test_the_papers_strata():
    assert draws.strata(50, "paper") == [(0, 11), (12, 24), (25, 36), (37, 49)]
    assert draws.strata(50, "sparse") == [(5, 11), (12, 24), (25, 36), (37, 49)]
    assert draws.strata(25, "paper") == [(0, 5), (6, 11), (12, 17), (18, 24)]
    assert draws.strata(25, "sparse") == [(5, 9), (10, 14), (15, 19), (20, 24)]  # not step 5 in an interval of its own


@given(st.integers(1, 200), st.integers(0, 20), st.sampled_from(draws.STRATA), st.integers(1, 6))
def test_strata_are_non_empty_and_cover_the_steps(steps, dense, kind, count):
    first = dense if kind == "sparse" else 0
    if first >= steps:
        with pytest.raises(HeartError, match="take more steps"):
            draws.strata(steps, kind, dense, count)
        return
    intervals = draws.strata(steps, kind, dense, count)
    assert len(intervals) == min(count, steps - first)
    covered = [s for a, b in intervals for s in range(a, b + 1)]
    assert covered == list(range(first, steps)) and all(a <= b for a, b in intervals)


def test_unknown_strata():
    with pytest.raises(HeartError, match="'paper' or 'sparse'"):
        draws.strata(50, "late")


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 8), st.integers(1, 12), st.integers(1, 12))
def test_prompts_are_exactly_balanced(seed, layers, heads, prompts):
    assigned = draws.prompt_of_heads(seed, layers, heads, prompts)
    counts = np.bincount(assigned.ravel(), minlength=prompts)
    assert assigned.shape == (layers, heads) and counts.max() - counts.min() <= 1


def test_steps_are_uniform_and_inside():
    intervals = draws.strata(50, "sparse")
    taken = np.array([draws.steps_of_head(3, l, h, intervals) for l in range(40) for h in range(40)])
    for j, (a, b) in enumerate(intervals):
        counts = np.bincount(taken[:, j] - a, minlength=b - a + 1)
        expected = 1600 / (b - a + 1)
        assert taken[:, j].min() == a and taken[:, j].max() == b
        assert ((counts - expected) ** 2 / expected).sum() < 40  # χ² with ≤ 12 degrees of freedom: p < 1e-4


def test_seeds_purposes_and_keys_give_different_draws():
    values = {
        draws.number(s, p, *k) for s in (0, 1) for p in ("a", "b") for k in [(0, 1), (1, 0), (0,), (0, 1, 0), (10,)]
    }
    assert len(values) == 20


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 999), st.integers(1, 12), st.integers(4, 60), st.integers(1, 50))
def test_contexts_are_distinct_and_balanced(seed, prompts, steps, count):
    intervals = draws.strata(steps, "paper")
    if count > prompts * steps:
        with pytest.raises(HeartError, match="take fewer contexts"):
            draws.contexts(seed, "calibrate", prompts, intervals, count)
        return
    taken = draws.contexts(seed, "calibrate", prompts, intervals, count)
    assert len(set(taken)) == count
    assert taken[: count // 2] == draws.contexts(seed, "calibrate", prompts, intervals, count // 2)
    if count <= prompts * len(intervals):  # no interval is used up yet
        of_prompt = collections.Counter(p for p, _ in taken)
        assert max(of_prompt.values()) - min(of_prompt[p] for p in range(prompts)) <= 1
        of_interval = collections.Counter(
            next(j for j, (a, b) in enumerate(intervals) if a <= s <= b) for _, s in taken
        )
        assert max(of_interval.values()) - min(of_interval[j] for j in range(len(intervals))) <= 1


def test_held_out_contexts_avoid_the_calibrated_ones():
    intervals = draws.strata(8, "paper")
    first = draws.contexts(0, "calibrate", 3, intervals, 12)
    rest = draws.contexts(0, "held-out", 3, intervals, 12, avoid=first)
    assert not set(first) & set(rest) and len(set(first) | set(rest)) == 24


def test_nothing_to_draw_from():
    with pytest.raises(HeartError, match="at least one"):
        draws.below(0, 1, "x")
    with pytest.raises(HeartError, match="must be positive"):
        draws.prompt_of_heads(0, 0, 4, 10)
