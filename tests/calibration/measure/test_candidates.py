"""The candidates of one call: one prediction a family, the same outputs however they are computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models_for_tests import plain_attention

from heart_attention.backbones import SVG2, XAttention
from heart_attention.calibration.measure.candidates import DENSE, Spec, Trials
from heart_attention.calibration.points import points_of
from heart_attention.masks import Text
from heart_attention.online.call import CallContext
from heart_attention.token_order import tile_order_of

BACKBONES = {"xattention": XAttention(stride=4, block=8), "svg2": SVG2(6, 10, init_iters=10, min_ratio=0.0)}
MIXED = (
    *points_of(BACKBONES["xattention"], (0.7, 0.3)),
    *points_of(BACKBONES["svg2"], (0.3, 0.9), rest="mean"),
    *points_of(BACKBONES["svg2"], (0.3,)),
    *points_of(BACKBONES["xattention"], (0.5,), order="2x4x1"),
)


def qkv(batch=1, heads=2, n=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, n, 16, generator=generator) for _ in range(3)]


def trials(spec, *tensors, **more):
    return Trials(spec, CallContext(layer=0, grid=(4, 4, 4), **more), "0", *tensors)


@pytest.mark.parametrize("rest", ["drop", "mean"])
@pytest.mark.parametrize("kernel", ["auto", "gather", "eager"])
@pytest.mark.parametrize("case", ["block", "tail", "cluster", "cluster with text"])
def test_climbing_the_candidates_gives_what_each_gives_alone(case, kernel, rest):
    text = [Text(60, 6, 4), Text(60, 7, 3)] if case in ("tail", "cluster with text") else None
    backbone = BACKBONES["svg2" if case.startswith("cluster") else "xattention"]
    spec = Spec.of(backbone, (0.3, 0.3001, 0.7, 0.9, 1.0), kernel=kernel, rest=rest)
    one = Trials(spec, CallContext(layer=0, text=text), "0", *qkv(2, 2, 70, seed=1))
    seen = []
    for k, out in one.climb():
        seen.append(k)
        torch.testing.assert_close(out, one.run([0, 1], k), atol=2e-6, rtol=1e-5)
    assert seen == [0, 1, 2, 3, 4]


def test_masks_that_are_not_nested_are_computed_whole():
    one = trials(Spec.of(BACKBONES["xattention"], (0.3, 0.5, 0.9)), *qkv(seed=2))
    masks = one.masks[0].of_point
    masks[0], masks[1] = masks[1], masks[0]
    for k, out in one.climb():
        torch.testing.assert_close(out, one.run([0, 1], k), atol=2e-6, rtol=1e-5)


def test_points_of_several_kinds_in_one_call():
    q, k, v = qkv(seed=3)
    one = trials(Spec(MIXED), q, k, v)
    assert [f.members for f in one.families] == [(0, 1), (2, 3, 4), (5,)]
    outs = dict(one.climb())
    assert sorted(outs) == list(range(6))
    for n, point in enumerate(MIXED):
        alone = trials(Spec((point,)), q, k, v)
        torch.testing.assert_close(outs[n], alone.run([0, 1], 0), atol=2e-6, rtol=1e-5)
        plain = plain_attention(alone.masks[0].of_point[0], point.rest, q, k, v)
        torch.testing.assert_close(outs[n], plain, atol=2e-6, rtol=1e-5)
    for choice in ([0, 2], [4, 4], [5, 1], [3, DENSE]):
        mixed = one.mixed(choice, F.scaled_dot_product_attention(q, k, v))
        for h, c in enumerate(choice):
            dense = F.scaled_dot_product_attention(q, k, v)[:, h]
            torch.testing.assert_close(mixed[:, h], dense if c == DENSE else outs[c][:, h], atol=2e-6, rtol=1e-5)


def test_parts_cover_every_head_once():
    one = trials(Spec(MIXED), *qkv(heads=6))
    parts = one.parts(0, [0, 1, 2, 4, DENSE, 5])
    assert sorted(h for part in parts for h in part.heads) == list(range(6))
    assert {(tuple(p.heads), p.rest) for p in parts} == {
        ((0, 1, 4), "drop"),
        ((2,), "mean"),
        ((3,), "drop"),
        ((5,), "drop"),
    }
    assert parts[0].mask.density()[0, 2] == 1  # the dense head keeps everything


def test_cost_counts_what_is_approximated():
    one = trials(Spec(MIXED), *qkv())
    sparsity, cost = one.sparsity(), one.cost()
    assert torch.equal(cost[[0, 1, 4, 5]], 1 - sparsity[[0, 1, 4, 5]])
    assert (cost[2] > 1 - sparsity[2]).all() and torch.equal(sparsity[2], sparsity[4])


def test_equal_masks_have_one_representative():
    spec = Spec(
        (
            *points_of(BACKBONES["xattention"], (0.5, 0.5000001, 1.0)),
            *points_of(BACKBONES["xattention"], (0.5,), rest="mean"),
            *points_of(BACKBONES["svg2"], (1.0,)),
        )
    )
    first = trials(spec, *qkv()).representative()
    assert first == [[0, 0], [0, 0], [DENSE, DENSE], [3, 3], [DENSE, DENSE]]


def test_candidates_in_an_order_for_every_head():
    x, taus, row = BACKBONES["xattention"], (0.3, 0.9), ("2x4x1", "raster", "1x2x4", "2x4x1")
    q, k, v = qkv(heads=4)
    spec = Spec.of(x, taus, order=(("raster",) * 4, row))
    one = Trials(spec, CallContext(layer=1, layers=2, step=0, branch="cond", grid=(4, 4, 4)), "cond", q, k, v)
    masks = one.masks[0]
    assert masks.full[0].density().min() == 1
    outs = dict(one.climb())
    for h, name in enumerate(row):
        order = None if name == "raster" else tile_order_of((4, 4, 4), tuple(map(int, name.split("x"))))
        for c, tau in enumerate(taus):
            alone = x.predict(q[:, h : h + 1], k[:, h : h + 1], tau, order=order)
            assert torch.equal(masks.of_point[c].dense_tokens()[:, h : h + 1], alone.dense_tokens())
            want = F.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h], attn_mask=alone.dense_tokens()[:, 0])
            torch.testing.assert_close(outs[c][:, h], want, atol=5e-6, rtol=0)
            torch.testing.assert_close(one.run([h], c)[:, 0], want, atol=5e-6, rtol=0)


def test_some_heads_alone_are_as_among_all():
    q, k, v = qkv(heads=4, seed=5)
    every, some = (
        trials(Spec(MIXED), q, k, v),
        Trials(Spec(MIXED), CallContext(layer=0, grid=(4, 4, 4)), "0", q, k, v, heads=[3, 1]),
    )
    assert torch.equal(some.sparsity(), every.sparsity()[:, [3, 1]])
    for point in range(len(MIXED)):
        assert torch.equal(some.run([0, 1], point), every.run([3, 1], point))


def test_svg2_candidates_share_one_clustering(monkeypatch):
    from heart_attention.backbones import svg2

    runs = []
    original = svg2.lloyd_heads

    def counted(tokens, *rest):
        runs.extend(tokens)
        return original(tokens, *rest)

    monkeypatch.setattr(svg2, "lloyd_heads", counted)
    q, k = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    masks, full = BACKBONES["svg2"].predict_many(q, k, (0.3, 0.6, 0.9), key=(1, "cond", 0))
    assert len(runs) == 4  # queries and keys of two heads
    for tau, mask in zip((0.3, 0.6, 0.9), masks):
        alone = BACKBONES["svg2"].predict(q, k, tau, key=(1, "cond", 0))
        assert torch.equal(mask.map, alone.map) and torch.equal(mask.q_labels, alone.q_labels)
    assert full.density().min() == 1


@pytest.mark.parametrize("order", ["raster", "tiles"])
def test_xattention_candidates_equal_single_predictions(order):
    from heart_attention.token_order import tile_order

    x, q, k = BACKBONES["xattention"], torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    permutation = tile_order((4, 4, 4), 8) if order == "tiles" else None
    masks, _ = x.predict_many(q, k, (0.3, 0.9), order=permutation, key=(0, "cond", 0))
    for tau, mask in zip((0.3, 0.9), masks):
        assert torch.equal(mask.blocks, x.predict(q, k, tau, order=permutation).blocks)
