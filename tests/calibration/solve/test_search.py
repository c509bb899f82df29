"""How contexts are weighed, and that an assignment is judged by that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heart_attention import XAttention
from heart_attention.calibration.solve.search import LEAST, Trials, context_weights
from heart_attention.calibration.workflow.settings import Settings
from heart_attention.errors import HeartError

CONTEXTS = [(0, 5), (1, 9), (2, 14)]


class Measured:
    """A runner that knows the errors of assignments already."""

    def __init__(self, errors):
        self.errors = errors

    def verify(self, stage, contexts, choice):
        errors = self.errors[choice]
        return {"error": float(np.mean(errors)), "errors": list(errors), "sparsity": 0.5, "bands": []}


def settings(method="joint", **more):
    return Settings(XAttention(8, 64), ("a prompt",), {"num_inference_steps": 25}, method=method, **more)


def shared(of):
    return ((of.taus.index(of.shared),) * 2,)


@given(st.lists(st.floats(1e-6, 1e-1), min_size=3, max_size=3))
def test_relative_weights_make_the_shared_threshold_equal_everywhere(errors):
    of = settings()
    weights = context_weights(of, Measured({shared(of): errors}), CONTEXTS, 1, 2)
    floored = np.maximum(errors, LEAST * max(errors))
    assert np.allclose(weights * floored, np.mean(errors))
    assert (weights <= 100 * np.mean(errors) / max(errors) + 1e-9).all()


def test_plain_weights_measure_nothing():
    for of in (settings("probes"), settings(mean="plain")):
        assert (context_weights(of, None, CONTEXTS, 1, 2) == 1).all()


def test_contexts_without_error_count_equally():
    of = settings()
    assert (context_weights(of, Measured({shared(of): [0.0, 0.0, 0.0]}), CONTEXTS, 1, 2) == 1).all()


def test_an_assignment_is_judged_by_the_mean_of_its_ratios():
    of, other = settings(), ((0, 1),)
    known = {shared(of): [0.008, 0.002, 0.001], other: [0.004, 0.002, 0.003]}
    trials = Trials(of, Measured(known), CONTEXTS, 1, 2)
    before, after = trials.verify("", shared(of))["error"], trials.verify("", other)["error"]
    assert before == pytest.approx(np.mean(known[shared(of)]))
    assert after / before == pytest.approx(np.mean([0.5, 1, 3]))
    plain = Trials(settings(mean="plain"), Measured(known), CONTEXTS, 1, 2)
    assert plain.verify("", other)["error"] == pytest.approx(0.003)


def test_tables_are_weighed_alike():
    of = settings()
    trials = Trials(of, Measured({shared(of): [0.008, 0.002, 0.001]}), CONTEXTS, 1, 2)
    tables = [np.full((1, 2, 7), e) for e in (0.008, 0.002, 0.001)]
    assert np.allclose(trials.mean(tables), np.mean([0.008, 0.002, 0.001]))


def test_the_mean_follows_the_method():
    assert settings("probes").mean == "plain" and settings("isolated").mean == settings().mean == "relative"
    with pytest.raises(HeartError, match="'best'.*plain, relative"):
        settings(mean="best")
