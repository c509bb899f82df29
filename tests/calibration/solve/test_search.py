"""How contexts are weighed, and that an assignment is judged by that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heart_attention import XAttention
from heart_attention.calibration.solve.case import Case
from heart_attention.calibration.solve.search import LEAST, Trials, context_weights
from heart_attention.calibration.workflow.phases import Phases
from heart_attention.calibration.workflow.settings import Settings
from heart_attention.errors import HeartError

CONTEXTS = [(0, 5), (1, 9), (2, 14)]
ONE = Phases(((5, 24),), (), (1.0,))


class Measured:
    """A runner that knows the errors of assignments already."""

    def __init__(self, errors):
        self.errors = errors

    def verified(self, stage, contexts, choice):
        return [{"error": e, "sparsity": [[0.5]], "cost": [[0.5]], "bands": [e]} for e in self.errors[choice]]


def case(method="joint", phases=ONE, **more):
    return Case(settings(method, **more), 1, 2, phases)


def settings(method="joint", **more):
    return Settings(XAttention(8, 64), ("a prompt",), {"num_inference_steps": 25}, method=method, **more)


@given(st.lists(st.floats(1e-6, 1e-1), min_size=3, max_size=3))
def test_relative_weights_make_the_shared_threshold_equal_everywhere(errors):
    of = case()
    weights = context_weights(of, Measured({of.shared: errors}), CONTEXTS)
    floored = np.maximum(errors, LEAST * max(errors))
    assert np.allclose(weights * floored, np.mean(errors))
    assert (weights <= 100 * np.mean(errors) / max(errors) + 1e-9).all()


def test_plain_weights_measure_nothing():
    for of in (case("probes"), case(mean="plain")):
        assert (context_weights(of, None, CONTEXTS) == 1).all()


def test_contexts_without_error_count_equally():
    of = case()
    assert (context_weights(of, Measured({of.shared: [0.0, 0.0, 0.0]}), CONTEXTS) == 1).all()


def test_an_assignment_is_judged_by_the_mean_of_its_ratios():
    of, other = case(), (((0, 1),),)
    known = {of.shared: [0.008, 0.002, 0.001], other: [0.004, 0.002, 0.003]}
    trials = Trials(of, Measured(known), CONTEXTS)
    before, after = trials.verify("", of.shared)["error"], trials.verify("", other)["error"]
    assert before == pytest.approx(np.mean(known[of.shared]))
    assert after / before == pytest.approx(np.mean([0.5, 1, 3]))
    plain = Trials(case(mean="plain"), Measured(known), CONTEXTS)
    assert plain.verify("", other)["error"] == pytest.approx(0.003)


def test_tables_are_weighed_alike():
    of = case()
    trials = Trials(of, Measured({of.shared: [0.008, 0.002, 0.001]}), CONTEXTS)
    tables = [np.full((1, 2, 7), e) for e in (0.008, 0.002, 0.001)]
    assert np.allclose(trials.mean(tables), np.mean([0.008, 0.002, 0.001]))


def test_phases_count_by_their_weights_and_alike_whatever_their_contexts():
    two = Phases(((5, 9), (10, 24)), (0.5,), (1.5, 0.5))
    of, other = case(phases=two), (((0, 1),), ((1, 1),))
    known = {of.shared: [0.008, 0.002, 0.001], other: [0.004, 0.001, 0.002]}
    trials = Trials(of, Measured(known), CONTEXTS)  # two contexts in the first phase, one in the second
    assert trials.verify("", of.shared)["error"] == pytest.approx((1.5 * 0.005 + 0.5 * 0.001) / 2)
    assert trials.verify("", other)["error"] == pytest.approx((1.5 * 0.005 * 0.5 + 0.5 * 0.001 * 2) / 2)
    tables = [np.full((1, 2, 7), e) for e in known[of.shared]]
    assert np.allclose(trials.mean(tables)[0], 1.5 * 0.005) and np.allclose(trials.mean(tables)[1], 0.5 * 0.001)
    with pytest.raises(HeartError, match="no context lies in phase 1"):
        of.phase_means(CONTEXTS[:2], [1.0, 2.0])


def test_the_mean_follows_the_method():
    assert settings("probes").mean == "plain" and settings("isolated").mean == settings().mean == "relative"
    with pytest.raises(HeartError, match="'best'.*plain, relative"):
        settings(mean="best")
