"""Other budgets and weights from stored tables."""

from __future__ import annotations

import numpy as np
import pytest
from small_calibrations import made

from heart_attention.calibration.solve import solver
from heart_attention.errors import HeartError


def test_resolve_another_budget():
    c = made()
    low, high = solver.reachable(c.S)
    target = (low + 2 * high) / 3
    new = c.resolve(solver.Budget("sparsity", target))
    assert new.sparsity >= target - 1e-9 and new.solver["proven"]
    assert new.solver["budget"] == {"min_sparsity": target}
    assert new.verification == {}  # those figures belonged to the old thresholds
    assert np.array_equal(new.E, c.E) and new.seed == c.seed
    assert np.array_equal(c.resolve("shared=0.9").thresholds, c.thresholds)
    with pytest.raises(HeartError, match="greatest reachable"):
        c.resolve(0.9999)


def test_resolve_by_cbc_and_by_mean_threshold():
    c = made()
    assert np.array_equal(c.resolve("shared=0.9", "cbc").thresholds, c.thresholds)
    assert c.resolve("threshold=0.88").thresholds.mean() <= 0.88 + 1e-9


def test_other_band_weights_need_no_new_probe():
    c = made()
    same = c.reweighted((1, 0.5, 0.01, 0.01)).resolve("shared=0.9")
    assert np.allclose(same.E, c.E, rtol=1e-12) and np.array_equal(same.thresholds, c.thresholds)
    assert np.allclose(c.reweighted((1, 1, 1, 1)).E, c.bands.sum(-1))
    with pytest.raises(HeartError, match="no band energies"):
        made(bands=None).reweighted((1, 1, 1, 1))
