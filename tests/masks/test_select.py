"""Top-p selection and its laws."""

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from thoroughness import examples

from heart_attention.masks import top_p

torch.set_num_threads(1)
some = settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
shares = st.floats(0.01, 0.999)
# Small whole numbers: many ties, and sums that are exact, so that the brute-force twin decides the same way.
score_rows = npst.arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=st.integers(0, 6))


def brute_force(row, need, strict):
    """Top-p by its words: highest first, lowest index among equals, until the sum before is enough."""
    kept, before = set(), 0.0
    for j in sorted(range(len(row)), key=lambda j: (-row[j], j)):
        if kept and not (before < need if strict else before <= need):
            break
        kept.add(j)
        before += row[j]
    return [j in kept for j in range(len(row))]


@some
@given(score_rows, shares, st.booleans())
def test_top_p_is_its_brute_force_twin(rows, tau, strict):
    got = top_p(torch.from_numpy(rows).float(), tau, strict)
    want = [brute_force(row, tau * row.sum(), strict) for row in rows.astype(float)]
    assert got.tolist() == want


@some
@given(score_rows, shares)
def test_kept_mass_reaches_tau_and_is_minimal(rows, tau):
    rows = torch.from_numpy(rows).double()
    kept = top_p(rows, tau, strict=True)
    mass, need = (rows * kept).sum(-1), tau * rows.sum(-1)
    assert (kept.sum(-1) >= 1).all()  # every row keeps a block
    assert (mass >= need).all()
    least = torch.where(kept, rows, torch.inf).amin(-1)
    assert ((mass - least < need) | (kept.sum(-1) == 1)).all()  # without the smallest kept one it is not enough
    assert (least >= torch.where(kept, -torch.inf, rows).amax(-1)).all()  # and nothing left out is larger


@some
@given(score_rows, shares, shares, st.booleans())
def test_monotone_in_tau(rows, one, other, strict):
    low, high = (top_p(torch.from_numpy(rows).float(), tau, strict) for tau in sorted((one, other)))
    assert (low <= high).all()


def test_the_two_rules_differ_on_the_boundary():
    row = torch.tensor([[0.5, 0.25, 0.25]])
    assert top_p(row, 0.5, strict=True).tolist() == [[True, False, False]]
    assert top_p(row, 0.5, strict=False, total=1.0).tolist() == [[True, True, False]]
    assert top_p(row, 0.5, strict=True, at_least=2).tolist() == [[True, True, False]]


def test_rows_of_nothing_and_of_nan():
    rows = torch.tensor([[0.0, 0.0, 0.0], [1.0, float("nan"), 0.0]])
    for strict in (True, False):
        kept = top_p(rows, 0.5, strict)
        assert kept[0, 0] and kept[1].all()


def test_thresholds_per_row():
    rows = torch.ones(2, 3, 10)
    kept = top_p(rows, torch.tensor([[0.05, 0.15, 0.25], [0.35, 0.45, 0.55]]), strict=True)
    assert kept.sum(-1).tolist() == [[1, 2, 3], [4, 5, 6]]
