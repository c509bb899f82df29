"""Drift, layer gate and policies, against the definitions written out longhand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.errors import HeartError
from heart_attention.online.reuse import (
    TMR,
    Always,
    Interval,
    Policy,
    ReuseState,
    Warmup,
    drift,
    features,
    gate,
    norm,
    pool,
)


def state(cached, **kw):
    cached = torch.as_tensor(cached)
    kw.setdefault("age", torch.ones(cached.shape, dtype=torch.long))
    return ReuseState(cached=cached, **kw)


def bools(text):
    return torch.tensor([[c == "x" for c in row] for row in text.split()])


# ---------------------------------------------------------------- drift


def test_drift_is_the_l1_distance_of_token_means():
    torch.manual_seed(0)
    q, k, q2, k2 = torch.randn(4, 2, 3, 37, 8)
    d = drift(features(q, k, "mean"), features(q2, k2, "mean"))
    expected = (q.mean(2) - q2.mean(2)).abs().sum(-1) + (k.mean(2) - k2.mean(2)).abs().sum(-1)
    torch.testing.assert_close(d, expected)


def test_full_token_drift_is_equation_3():
    torch.manual_seed(0)
    q, k, q2, k2 = torch.randn(4, 1, 2, 11, 4)
    d = drift(features(q, k, "tokens"), features(q2, k2, "tokens"))
    expected = sum((q - q2)[:, :, i].abs().sum(-1) + (k - k2)[:, :, i].abs().sum(-1) for i in range(11)) / 11
    torch.testing.assert_close(d, expected)


def test_pooling_sees_only_the_tokens_it_is_told_to():
    x = torch.zeros(1, 1, 10, 4)
    x[:, :, 7:] = 1e6  # padding
    x[:, :, :7] = 2.0
    assert torch.equal(pool(x, slice(0, 7)), torch.full((1, 1, 4), 2.0))
    assert torch.equal(pool(x, torch.arange(7)), torch.full((1, 1, 4), 2.0))


@pytest.mark.parametrize("n", [1, 511, 512, 513, 1500])
def test_pooling_bf16_equals_the_fp32_mean_of_the_same_values(n):
    x = torch.randn(1, 2, n, 8).bfloat16()
    torch.testing.assert_close(pool(x), x.float().mean(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_features_drift_exactly_zero_and_two_byte_models_store_two_bytes(dtype):
    q, k = torch.randn(2, 1, 3, 600, 16).to(dtype)
    a = features(q, k, "mean")
    assert a.element_size() == (4 if dtype is torch.float32 else 2)
    assert torch.count_nonzero(drift(a, features(q.clone(), k.clone(), "mean"))) == 0


def test_anchors_of_wan_480p_take_the_papers_size():
    one = features(torch.zeros(1, 12, 4, 128).bfloat16(), torch.zeros(1, 12, 4, 128).bfloat16(), "mean")
    assert one.nbytes * 30 * 2 == 368_640  # 30 layers, 2 guidance branches: 0.35 MB


@pytest.mark.parametrize("seen", [None, slice(0, 100)])
def test_pooling_the_layout_of_diffusers_is_the_same_mean(seen):
    x = torch.randn(2, 133, 3, 8).transpose(1, 2)
    n = 133 if seen is None else 100
    torch.testing.assert_close(pool(x, seen), x[:, :, :n].double().mean(2).float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(pool(x, seen)[1:], pool(x[1:], seen))  # batch items do not see one another


def test_norm_is_the_drift_from_zero():
    q, k = torch.randn(2, 2, 3, 9, 4)
    for kind in ("mean", "tokens"):
        a = features(q, k, kind)
        torch.testing.assert_close(norm(a), drift(a, torch.zeros_like(a)))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 8), st.floats(0.0, 4.0), st.floats(0.01, 100.0))
def test_the_papers_appendix_bound(seed, n, dim, change, scale):
    """mean |G_b - G_a| <= max(B_q, B_k) / sqrt(D) * full-token drift."""
    g = torch.Generator().manual_seed(seed)
    qa, ka, dq, dk = torch.randn(4, 1, 2, n, dim, generator=g, dtype=torch.float64) * scale
    qb, kb = qa + change * dq, ka + change * dk
    moved = ((qb @ kb.mT - qa @ ka.mT) / math.sqrt(dim)).abs().mean((-1, -2))
    d = (qa - qb).abs().sum(-1).mean(-1) + (ka - kb).abs().sum(-1).mean(-1)
    bound = torch.stack([t.abs().amax((-1, -2)) for t in (qa, qb, ka, kb)]).amax(0)
    assert (moved <= bound / math.sqrt(dim) * d * (1 + 1e-12)).all()
    ours = drift(features(qa.float(), ka.float(), "tokens"), features(qb.float(), kb.float(), "tokens"))
    torch.testing.assert_close(ours.double(), d, rtol=1e-4, atol=1e-4 * scale)


# ---------------------------------------------------------------- gate


@pytest.mark.parametrize(
    "want, expected",
    [
        ("x....", "....."),  # 0.2 < 0.4: nobody
        ("xx...", "xx..."),  # exactly 0.4: as wished
        ("xxxx.", "xxxx."),  # exactly 0.8: as wished
        ("xxxxx", "xxxxx"),  # 1.0 > 0.8: all
        (".....", "....."),
    ],
)
def test_gate_bounds_are_strict(want, expected):
    assert torch.equal(gate(bools(want), 0.4, 0.8, bools("xxxxx")), bools(expected))


def test_gate_above_high_refreshes_heads_that_did_not_ask():
    assert torch.equal(gate(bools("xxxxxxxxx."), 0.4, 0.8, bools("x" * 10)), bools("x" * 10))


def test_gate_looks_at_each_batch_item_alone():
    got = gate(bools("x.... xxxxx xxx.."), 0.4, 0.8, torch.ones(3, 5, dtype=torch.bool))
    assert torch.equal(got, bools("..... xxxxx xxx.."))


def test_a_head_without_cache_refreshes_whatever_the_gate_says():
    assert torch.equal(gate(bools("x...."), 0.4, 0.8, bools(".xxxx")), bools("x...."))


def test_gate_counts_heads_over_processes():
    """Two processes hold four heads each; alone each would decide otherwise than together."""
    wants = bools("xxx. ...."), bools(".... xxxx")
    total = torch.stack(wants).sum(0).sum(-1, keepdim=True).double()
    for want in wants:
        got = gate(want, 0.4, 0.8, torch.ones_like(want), heads=8, reduce=lambda count: total)
        assert torch.equal(got[0], torch.zeros(4, dtype=torch.bool))  # 3 of 8: reuse
        assert torch.equal(got[1], want[1])  # 4 of 8: as wished


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_gate_against_the_rule_in_words(want, a, b):
    low, high = min(a, b), max(a, b)
    r = sum(want) / len(want)
    expected = [False] * len(want) if r < low else [True] * len(want) if r > high else want
    assert gate(torch.tensor([want]), low, high, torch.ones(1, len(want), dtype=torch.bool)).tolist() == [expected]


# ---------------------------------------------------------------- policies


def test_tmr_refreshes_strictly_beyond_delta():
    tmr = TMR(delta=2.0, gate=(0, 1))
    d = torch.tensor([[1.0, 2.0, 2.5, math.nan]])
    assert tmr.refresh(d, state(torch.ones(1, 4, dtype=torch.bool))).tolist() == [[False, False, True, True]]


def test_tmr_delta_zero_negative_and_infinite():
    d, full = torch.tensor([[0.0, 1e-30]]), torch.ones(1, 2, dtype=torch.bool)
    assert TMR(delta=0, gate=(0, 1)).refresh(d, state(full)).tolist() == [[False, True]]
    for bounds in ((0, 1), (0.4, 0.8), (1, 1)):
        assert TMR(delta=-1, gate=bounds).refresh(d, state(full)).all()
    assert not TMR(delta=math.inf).refresh(torch.full((1, 2), 1e30), state(full)).any()


def test_tmr_relative_divides_by_the_anchors_norm():
    tmr = TMR(relative=0.1, gate=(0, 1))
    full = torch.ones(1, 3, dtype=torch.bool)
    got = tmr.refresh(torch.tensor([[1.0, 1.0, 0.0]]), state(full, norm=torch.tensor([[11.0, 9.0, 0.0]])))
    assert got.tolist() == [[False, True, False]]
    assert not TMR(relative=math.inf).refresh(torch.ones(1, 3), state(full, norm=torch.zeros(1, 3))).any()


def test_tmr_bound_per_layer():
    tmr = TMR(delta=[1.0, 5.0], gate=(0, 1))
    full = torch.ones(1, 1, dtype=torch.bool)
    assert tmr.refresh(torch.tensor([[3.0]]), state(full, layer=0)).item()
    assert not tmr.refresh(torch.tensor([[3.0]]), state(full, layer=1)).item()
    tmr.check(2)
    with pytest.raises(HeartError, match="2 per-layer bounds but the model has 3"):
        tmr.check(3)


def test_interval_warmup_always():
    cached = bools("xx.x")
    age = torch.tensor([[1, 3, 0, 4]])
    assert Interval(3).refresh(None, state(cached, age=age)).tolist() == [[False, True, True, True]]
    assert Warmup(8).refresh(None, state(cached, step=7)).all()
    assert Warmup(8).refresh(None, state(cached, step=8)).tolist() == [[False, False, True, False]]
    assert Always().refresh(None, state(cached)).all()
    assert all(isinstance(p, Policy) for p in (TMR(), Interval(2), Warmup(2), Always()))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TMR(delta=1.0, relative=0.1), "give one of the two"),
        (lambda: TMR(delta=math.nan), "NaN"),
        (lambda: TMR(delta="30"), "must be a number"),
        (lambda: TMR(delta=[]), "must be a number"),
        (lambda: TMR(gate=(0.8, 0.4)), "0 <= low <= high <= 1"),
        (lambda: TMR(gate=(0.0, 1.1)), "0 <= low <= high <= 1"),
        (lambda: TMR(gate=0.4), "two numbers"),
        (lambda: TMR(drift="max"), "'mean' or 'tokens'"),
        (lambda: Interval(0), "at least 1"),
        (lambda: Warmup(1.5), "whole number"),
    ],
)
def test_wrong_policies_are_one_sentence(make, message):
    with pytest.raises(HeartError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
