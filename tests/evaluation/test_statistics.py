"""Our own statistics against scipy's."""

import numpy as np
import pytest

from heart_attention.evaluation import statistics

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("freedom", [*range(1, 40), 99, 100, 999, 1000])
@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_student_t(freedom, share):
    assert statistics.student_t(freedom, share) == pytest.approx(stats.t.ppf((1 + share) / 2, freedom), rel=1e-9)


def test_spearman_with_ties():
    rng = np.random.default_rng(0)
    for n in (3, 4, 10, 50):
        x, y = rng.integers(0, 6, n), rng.random(n)
        if np.ptp(x):
            assert statistics.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert statistics.spearman([1, 1, 1], [1, 2, 3]) == 0.0
