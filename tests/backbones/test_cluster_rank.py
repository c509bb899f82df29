"""Ranking clusters by mass and by the error of approximating them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heart_attention.backbones import SVG2, cluster_rank
from heart_attention.errors import HeartError
from heart_attention.kernels.ops import native


def by_share(scores, sizes, share):
    shares = torch.tensor([[share]], dtype=torch.float64)
    return cluster_rank.by_share(scores[None, None], sizes[None, None], shares, 0)[0, 0]


def tokens(seed, n=96, dim=8):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, dim, generator=generator) for _ in range(3)]


@given(st.integers(0, 1000))
def test_scores_equal_the_formula_written_out(seed):
    q, k, v = tokens(seed)
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randint(5, (96,), generator=generator), torch.randint(7, (96,), generator=generator)
    given = ((q, a, 5), (k, b, 7), (v, b, 7))
    queries, keys, values = (cluster_rank.cluster_stats(x[None, None], y[None, None], n) for x, y, n in given)
    mass = cluster_rank.cluster_mass(queries.mean, keys.mean, keys.sizes)
    scores = cluster_rank.error_per_key(mass, queries, keys, values)[0, 0]
    for i in range(5):
        for j in range(7):
            mine, near, worth = q[a == i].double(), k[b == j].double(), v[b == j].double()
            if not len(mine) or not len(near):
                continue
            logits = math.sqrt(float((mine.square().mean(0) * near.var(0, correction=0)).sum()) / 8)
            apart = math.sqrt(float((worth - worth.mean(0)).square().sum(-1).mean()))
            expected = float(mass[0, 0, i, j]) * logits * apart / len(near)
            assert float(scores[i, j]) == pytest.approx(expected, rel=1e-3, abs=1e-6)


@given(st.integers(0, 1000), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_a_share_of_keys_is_kept_and_more_with_a_larger_one(seed, one, other):
    generator = torch.Generator().manual_seed(seed)
    scores, sizes = torch.rand(6, 9, generator=generator), torch.randint(0, 20, (9,), generator=generator)
    low, high = sorted((one, other))
    kept = [by_share(scores, sizes, share) for share in (low, high)]
    assert not (kept[0] & ~kept[1]).any()
    total = int(sizes.sum())
    for share, flags in zip((low, high), kept):
        counts = (flags * sizes).sum(-1)
        assert (counts >= min(share * total, total) - 1e-9).all() and (flags.sum(-1) >= 1).all()
        assert (counts - sizes.max() <= share * total).all()


def test_a_row_with_nan_is_kept_whole():
    scores = torch.rand(2, 4)
    scores[1, 2] = math.nan
    assert by_share(scores, torch.ones(4, dtype=torch.int64), 0.25)[1].all()


def test_svg2_by_error_needs_values_and_a_known_rank():
    q, k, v = (x[None, None] for x in tokens(0))
    with pytest.raises(HeartError, match="give v"):
        SVG2(4, 6, rank="error").predict(q, k, 0.5)
    with pytest.raises(HeartError, match="rank='volume'"):
        SVG2(4, 6, rank="volume")
    mask = SVG2(4, 6, rank="error", min_ratio=0).predict(q, k, 0.3, v=v)
    assert 0.2 < float(mask.density()) < 0.7


def test_remapping_the_same_tokens_changes_nothing():
    q, k, v = (torch.stack([x, x.flip(0)])[None] for x in tokens(1))
    backbone = SVG2(5, 9, rank="error", min_ratio=0, init_iters=60)
    mask = backbone.predict(q, k, [0.2, 0.5], v=v)
    again = backbone.remap(mask, q, k, v, [0.2, 0.5])
    assert torch.equal(mask.map, again.map) and torch.equal(mask.q_labels, again.q_labels)


def test_the_minimum_of_kept_clusters_is_the_papers_unless_the_rest_is_approximated():
    assert SVG2().least_ratio == 0.1 and SVG2().for_rest("mean").least_ratio == 0
    assert SVG2(min_ratio=0.2).for_rest("mean").least_ratio == 0.2


@pytest.mark.skipif(bool(native.reasons_not()), reason="no C kernel here")
@given(st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16]), st.floats(0.0, 0.9), st.booleans())
def test_ranking_in_c_keeps_what_the_definition_keeps(seed, dtype, share, broken):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 90, 2, 40, generator=generator).to(dtype).transpose(1, 2) for _ in range(3))
    rows, columns = 7, 19
    a = torch.randint(rows + 2, (2, 2, 90), generator=generator, dtype=torch.int16)  # the last two are text
    b = torch.randint(columns - 2, (2, 2, 90), generator=generator, dtype=torch.int16)  # and the last columns empty
    if broken:
        k[1, 0, 3, 5] = math.nan
    given = (q, k, v, a, b, rows, columns, torch.full((2, 2), share, dtype=torch.float64), 1)
    assert torch.equal(cluster_rank.c_keep_by_error(*given), cluster_rank.torch_keep_by_error(*given))
