"""The assignment solver against brute force and CBC, its certificate, budgets and refusals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.calibration.solve import cbc, solver
from heart_attention.errors import HeartError

TAU3 = (0.85, 0.9, 0.95)
KINDS = ("random", "monotone", "degenerate", "tied", "proportional", "outlier", "dominated", "constant")


def instance(kind: str, heads: int, candidates: int, seed: int):
    """Errors, sparsities and a reachable budget of one kind."""
    rng = np.random.default_rng([seed, heads, candidates])
    E = rng.random((heads, candidates)) * 10.0 ** rng.integers(-10, -4, (heads, 1))
    S = rng.random((heads, candidates))
    if kind == "monotone":
        E, S = np.sort(E, 1)[:, ::-1], np.sort(S, 1)[:, ::-1]
    elif kind == "degenerate":
        E, S = rng.integers(0, 3, E.shape) * 1e-8, rng.integers(0, 3, E.shape) / 2
    elif kind == "tied":
        E, S = np.tile(E[:1], (heads, 1)), np.tile(np.round(S[:1], 1), (heads, 1))
    elif kind == "proportional":
        E = S * 1e-7
    elif kind == "outlier":
        E[0] *= 1e12
    elif kind == "dominated":
        E[:, -1], S[:, -1] = E.max(1) * 2, S.min(1) / 2
    elif kind == "constant":
        E[:], S[:] = 1e-7, 0.5
    picked = S[np.arange(heads), rng.integers(0, candidates, heads)].mean()
    return E, S, float(rng.choice([picked, S.max(1).mean(), S.min(1).mean(), picked * rng.random()]))


def brute_force(E, gain, need):
    """The least Σ E with Σ gain ≥ need, over all choices; sums near the edge are taken exactly."""
    rows = np.arange(len(E))
    choices = np.array(list(itertools.product(range(E.shape[1]), repeat=len(E))))
    total = gain[rows, choices].sum(1)
    edge = np.abs(total - need) < 1e-10 * len(E)
    keep = total >= need
    keep[edge] = [math.fsum(gain[rows, c]) >= need for c in choices[edge]]
    least = E[rows, choices[keep]].sum(1)
    near = choices[keep][least <= least.min() + 1e-9 * abs(least.min())]
    return min(math.fsum(E[rows, c]) for c in near)


def certified(result, E, S):
    """Every claim of a result, checked from its choice alone."""
    rows = np.arange(len(E))
    assert result.objective == math.fsum(E[rows, result.choice])
    assert result.sparsity == pytest.approx(math.fsum(S[rows, result.choice]) / len(E), rel=1e-15)
    assert result.bound <= result.objective and result.gap >= 0


@settings(max_examples=examples(250), deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 8), st.integers(1, 4), st.integers(0, 10**6))
def test_optimal_against_brute_force(kind, heads, candidates, seed):
    assume(candidates**heads <= 6561)
    E, S, least = instance(kind, heads, candidates, seed)
    result = solver.solve(E, S, min_sparsity=least)
    optimum = brute_force(E, S, heads * (least - 1e-9))
    certified(result, E, S)
    assert result.objective == pytest.approx(optimum, rel=1e-12, abs=0)
    assert result.bound <= optimum * (1 + 1e-14)
    assert result.sparsity >= least - 1.001e-9
    assert result.proven


@settings(max_examples=examples(120), deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 7), st.integers(1, 3), st.integers(0, 10**6), st.booleans())
def test_mean_threshold_budget_against_brute_force(kind, heads, candidates, seed, on_grid):
    E, S, _ = instance(kind, heads, candidates, seed)
    rng = np.random.default_rng(seed)
    tau = np.sort(rng.choice(np.arange(50, 100), candidates, replace=False)) / 100
    if not on_grid:
        tau = tau + rng.random(candidates) * 1e-3
    most = float(tau[rng.integers(0, candidates, heads)].mean())
    optimum = brute_force(E, np.tile(-tau, (heads, 1)), -heads * (most + 1e-9))
    result = solver.solve(E, S, max_mean_threshold=most, thresholds=tau)
    certified(result, E, S)
    assert result.objective == pytest.approx(optimum, rel=1e-12, abs=0)
    assert result.method == ("dp" if on_grid else "exact")
    assert result.thresholds.mean() <= most + 1.001e-9


def test_integer_dp_and_the_general_method_agree_on_a_larger_table(monkeypatch):
    E, S, _ = instance("random", 200, 5, 3)
    tau = np.array([0.7, 0.8, 0.85, 0.9, 0.95])
    by_dp = solver.solve(E, S, max_mean_threshold=0.84, thresholds=tau)
    monkeypatch.setattr(solver, "_CELLS", 0)
    general = solver.solve(E, S, max_mean_threshold=0.84, thresholds=tau)
    assert (by_dp.method, general.method) == ("dp", "exact")
    assert by_dp.objective == pytest.approx(general.objective, rel=1e-12) and by_dp.proven and general.proven


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [6, 40])
def test_cbc_agrees(kind, heads):
    E, S, least = instance(kind, heads, 3, 11)
    mine, theirs = (solver.solve(E, S, min_sparsity=least, method=m) for m in ("exact", "cbc"))
    certified(theirs, E, S)
    assert theirs.method == "cbc"
    assert theirs.objective == pytest.approx(mine.objective, rel=1e-9)
    assert theirs.sparsity >= least - 1.001e-9


def test_cbc_agrees_on_the_mean_threshold():
    E, S, _ = instance("random", 30, 3, 5)
    mine, theirs = (solver.solve(E, S, max_mean_threshold=0.89, thresholds=TAU3, method=m) for m in ("exact", "cbc"))
    assert theirs.objective == pytest.approx(mine.objective, rel=1e-9)


def test_cbc_without_a_proof_is_refused(monkeypatch):
    """PuLP's status says "Optimal" after a time-out; only sol_status tells, and it must be heeded."""
    import pulp

    E, S, least = instance("random", 12, 3, 1)
    real = pulp.LpProblem.solve

    def out_of_time(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self.sol_status = pulp.LpSolutionIntegerFeasible
        return self.status

    monkeypatch.setattr(pulp.LpProblem, "solve", out_of_time)
    with pytest.raises(HeartError, match="did not prove an optimum"):
        solver.solve(E, S, min_sparsity=least, method="cbc")


def test_a_cbc_choice_over_the_budget_is_not_taken(monkeypatch):
    E, S, _ = instance("monotone", 8, 3, 2)
    worst = S.argmin(1)
    calls = []

    def wrong_then_right(pulp, ilp, x, heads, seconds):
        calls.append(1)
        return worst if len(calls) == 1 else real(pulp, ilp, x, heads, seconds)

    real = cbc._cbc_once
    monkeypatch.setattr(cbc, "_cbc_once", wrong_then_right)
    result = solver.solve(E, S, min_sparsity=S.max(1).mean() * 0.9, method="cbc")
    assert len(calls) == 2 and not np.array_equal(result.choice, worst)


@pytest.mark.parametrize("candidates", [3, 7])
def test_large_tables_are_proved_and_match_the_shared_budget(candidates):
    rng = np.random.default_rng(candidates)
    tau = np.array([0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98] if candidates == 7 else TAU3)
    S = (1 - tau) ** (0.3 + 0.4 * rng.random((1600, 1)))
    E = rng.lognormal(-16, 2, (1600, 1)) * (1 - tau) ** (1.5 + rng.lognormal(0, 0.7, (1600, 1)))
    result = solver.solve(E.reshape(40, 40, -1), S.reshape(40, 40, -1), thresholds=tau)
    shared = int(np.argmin(np.abs(tau - 0.9)))
    assert result.proven and result.gap <= 1e-12 * result.objective
    assert result.choice.shape == result.thresholds.shape == (40, 40)
    assert result.sparsity >= S[:, shared].mean() - 1e-9
    assert result.objective < 0.9 * E[:, shared].sum()
    assert result.budget["shared"] == 0.9


def test_the_worst_case_still_has_a_certificate():
    """Errors proportional to sparsity make it a subset-sum problem: no proof, but a small certified gap."""
    S = np.random.default_rng(0).random((60, 3))
    result = solver.solve(S * 1e-6, S, min_sparsity=0.5)
    assert result.bound <= result.objective
    assert result.gap <= 1e-5 * result.objective
    assert result.objective >= 60 * (0.5 - 1e-9) * 1e-6 >= result.bound * (1 - 1e-12)


def test_scale_of_errors_does_not_matter():
    E, S, least = instance("random", 50, 4, 9)
    base = solver.solve(E, S, min_sparsity=least).choice
    for scale in (1e-12, 1e12):
        assert np.array_equal(solver.solve(E * scale, S, min_sparsity=least).choice, base)


def test_an_outlier_does_not_drown_the_rest():
    E, S, _ = instance("monotone", 60, 3, 4)
    free = solver.solve(E, S, min_sparsity=0.4).choice
    E[7] += 1e6  # the same for all its candidates: nothing may change
    assert np.array_equal(solver.solve(E, S, min_sparsity=0.4).choice, free)


def test_negative_errors_are_allowed():
    E, S, least = instance("random", 6, 3, 8)
    shifted = solver.solve(E - 1e-4, S, min_sparsity=least)
    assert np.array_equal(shifted.choice, solver.solve(E, S, min_sparsity=least).choice)


def test_equal_calls_give_equal_results():
    E, S, least = instance("tied", 30, 5, 2)
    a, b = solver.solve(E, S, min_sparsity=least), solver.solve(E, S, min_sparsity=least)
    assert np.array_equal(a.choice, b.choice) and a.to_dict() == b.to_dict()
    assert "seconds" not in a.to_dict()


def test_an_infeasible_budget_names_what_can_be_reached():
    E, S, _ = instance("random", 5, 3, 0)
    with pytest.raises(HeartError, match=f"greatest reachable is {S.max(1).mean():.9g}"):
        solver.solve(E, S, min_sparsity=0.999999)
    with pytest.raises(HeartError, match=r"least reachable is 0\.85"):
        solver.solve(E, S, max_mean_threshold=0.5, thresholds=TAU3)
    assert solver.reachable(S) == pytest.approx((S.min(1).mean(), S.max(1).mean()))


def test_the_tightest_reachable_budget_is_solved():
    E, S, _ = instance("random", 20, 3, 0)
    result = solver.solve(E, S, min_sparsity=float(S.max(1).mean()))
    assert np.array_equal(result.choice, S.argmax(1))


@pytest.mark.parametrize(
    ("E", "S", "more", "words"),
    [
        ([[1.0, math.nan]], [[0.1, 0.2]], {"min_sparsity": 0.1}, "not finite"),
        ([[1.0, 2.0]], [[0.1, math.inf]], {"min_sparsity": 0.1}, "not finite"),
        ([[1.0, 2.0]], [[0.1]], {"min_sparsity": 0.1}, "differs"),
        ([1.0, 2.0], [0.1, 0.2], {"min_sparsity": 0.1}, r"not \[heads, candidates\]"),
        ([[]], [[]], {"min_sparsity": 0.1}, "shape"),
        ([[1.0, 2.0], [1.0]], [[0.1, 0.2]], {"min_sparsity": 0.1}, "rectangular"),
        ([["a"]], [["b"]], {"min_sparsity": 0.1}, "rectangular"),
        ([[1.0, 2.0]], [[0.1, 1.2]], {"min_sparsity": 0.1}, r"0 … 1"),
        ([[1.0, 2.0]], [[0.1, 0.2]], {}, "budget is missing"),
        ([[1.0, 2.0]], [[0.1, 0.2]], {"min_sparsity": math.nan}, "not a finite"),
        ([[1.0, 2.0]], [[0.1, 0.2]], {"max_mean_threshold": 0.9}, "needs the candidates' thresholds"),
        ([[1.0, 2.0]], [[0.1, 0.2]], {"min_sparsity": 0.1, "shared": 0.9}, "one budget only"),
        ([[1.0, 2.0]], [[0.1, 0.2]], {"thresholds": [0.8, 0.85]}, "no candidate has the shared threshold 0.9"),
        ([[1.0, 2.0]], [[0.1, 0.2]], {"thresholds": [0.8, 0.85, 0.9]}, "do not fit"),
        ([[1.0, 2.0]], [[0.1, 0.2]], {"min_sparsity": 0.1, "method": "magic"}, "one of exact, dp, cbc"),
        ([[1.0, 2.0]], [[0.1, 0.2]], {"min_sparsity": 0.1, "method": "dp"}, "mean-threshold budget only"),
    ],
)
def test_bad_inputs_are_refused_in_one_sentence(E, S, more, words):
    with pytest.raises(HeartError, match=words):
        solver.solve(E, S, **more)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("shared=0.9", "shared", 0.9),
        ("sparsity:0.6", "sparsity", 0.6),
        ("0.6", "sparsity", 0.6),
        (0.5, "sparsity", 0.5),
        ("time=0.25", "time", 0.25),
    ],
)
def test_budgets_are_parsed(text, kind, value):
    budget = solver.Budget.parse(text)
    assert (budget.kind, budget.value) == (kind, value)
    assert solver.Budget.parse(str(budget)) == budget


@pytest.mark.parametrize("text", ["", "much", "speed=2", "sparsity=2", "sparsity=nan", "threshold="])
def test_bad_budgets_are_refused(text):
    with pytest.raises(HeartError, match="budget"):
        solver.Budget.parse(text)


# ---------------------------------------- time, phases


@pytest.mark.parametrize("seed", range(40))
def test_a_budget_of_time_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    phases, heads, count = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(2, 5))
    E, S, times = (rng.random((phases, heads, count)) for _ in range(3))
    shares = rng.random((phases, 1)) + 0.1
    scaled = np.broadcast_to(shares, (phases, heads)).ravel()
    scaled = scaled / scaled.mean()
    flat = times.reshape(-1, count)
    most = float((scaled * flat[np.arange(len(flat)), rng.integers(0, count, len(flat))]).mean())
    result = solver.solve(E, S, times=times, max_time=most, shares=shares)
    optimum = brute_force(E.reshape(-1, count), -scaled[:, None] * flat, -len(flat) * (most + 1e-9))
    assert result.objective == pytest.approx(optimum, rel=1e-12) and result.proven and result.time <= most + 1.001e-9
    assert result.choice.shape == (phases, heads) and result.to_dict()["budget"] == {"max_time": most}
    chosen = flat[np.arange(len(flat)), result.choice.ravel()]
    assert result.time == pytest.approx(float((scaled * chosen).mean()))


def test_shares_weigh_the_mean_sparsity():
    E, S = np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 1.0]])
    assert solver.solve(E, S, min_sparsity=0.75, shares=[3, 1]).choice.tolist() == [1, 0]
    assert solver.solve(E, S, min_sparsity=0.75, shares=[1, 3]).choice.tolist() == [0, 1]
    assert solver.solve(E, S, min_sparsity=0.75).choice.tolist() == [1, 1]


def test_many_phases_and_points_are_proved_quickly():
    """6,400 heads and phases with 40 points, phases weighed by what they do to the video."""
    rng = np.random.default_rng(0)
    weights = np.array([8.0, 3.0, 1.0, 0.5])[:, None, None, None]
    times = np.sort(rng.random((4, 40, 40, 40)) * 0.5, axis=-1)
    decay = np.exp(-8 * rng.random((4, 40, 40, 1)) * times)
    E = weights * rng.lognormal(-16, 2, (4, 40, 40, 1)) * decay * rng.lognormal(0, 0.3, times.shape)
    result = solver.solve(E, 1 - times, times=times, max_time=0.15, shares=np.array([12, 13, 12, 8])[:, None, None])
    assert result.proven and result.gap <= 1e-12 * result.objective and result.time <= 0.15 + 1e-8
    assert result.seconds < 10


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_time": 0.5}, "needs the candidates' times"),
        ({"max_time": math.inf, "times": [[0.1, 0.2]]}, "not a finite number"),
        ({"max_time": 0.05, "times": [[0.1, 0.2]]}, "least reachable is 0.1"),
        ({"max_time": 0.5, "times": [[0.1, -0.2]]}, "do not fit"),
        ({"max_time": 0.5, "times": [[0.1]]}, "do not fit"),
        ({"min_sparsity": 0.1, "shares": [0]}, "shares"),
        ({"min_sparsity": 0.1, "shares": [1, 2, 3]}, "shares of shape"),
        ({"max_time": 0.5, "min_sparsity": 0.1, "times": [[0.1, 0.2]]}, "one budget only"),
    ],
)
def test_bad_times_and_shares_are_refused(more, words):
    with pytest.raises(HeartError, match=words):
        solver.solve([[1.0, 2.0]], [[0.1, 0.2]], **more)


@pytest.mark.parametrize("shares", [None, (12, 11, 11, 11)])
def test_tables_on_a_grid_are_proved_too(shares):
    """Powers of ten and two decimals: thousands of heads tie, and whole sums decide."""
    rng = np.random.default_rng(3)
    S = (1 - np.linspace(0.6, 0.98, 12)) ** (0.3 + 0.4 * rng.random((800, 1)))
    E, S = 10.0 ** np.round(np.log10(rng.lognormal(-16, 2, (800, 1)) * S**2)), np.round(S, 2)
    weights = None if shares is None else np.repeat(np.array(shares, float), 200)
    result = solver.solve(E, S, min_sparsity=0.4321 * S.max(1).mean() / 0.6, shares=weights)
    assert result.proven and result.gap <= 1e-14 * result.objective


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(2, 5))
def test_whole_gains_give_what_brute_force_gives(seed, heads, candidates):
    rng = np.random.default_rng(seed)
    E, S = rng.integers(0, 5, (heads, candidates)) * 1e-8, rng.integers(0, 21, (heads, candidates)) / 20
    need = float(rng.uniform(S.min(1).mean(), S.max(1).mean()))
    result = solver.solve(E, S, min_sparsity=need)
    assert result.proven and result.objective == pytest.approx(brute_force(E, S, heads * (need - 1e-9)), abs=1e-20)
