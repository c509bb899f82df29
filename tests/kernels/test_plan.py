"""Plans: the kept lists say exactly what the mask says; impossible masks are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.errors import HeartError
from heart_attention.kernels import make_plan
from heart_attention.kernels.eager import token_mask
from heart_attention.masks import BlockMask, ClusterMask


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 70), st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_block_plan_is_the_mask(seed, n, block, tail, ordered):
    generator = torch.Generator().manual_seed(seed)
    m = -(-n // block)
    blocks = torch.rand(2, 3, m, m, generator=generator) < 0.4
    blocks[..., 0] = True
    order = torch.randperm(n, generator=generator) if ordered else None
    mask = BlockMask(blocks, block, n, n, order, tail)
    plan = make_plan(mask)
    assert torch.equal(plan.counts, blocks.sum(-1).int())
    assert plan.cols.dtype == torch.int32 and plan.tokens == n + tail
    expected = mask.dense_tokens()
    for b in range(2):
        for h in range(3):
            assert torch.equal(token_mask(plan, b, h), expected[b, h])


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 70), st.integers(1, 12), st.integers(1, 30))
def test_cluster_plan_is_the_mask(seed, n, q_clusters, k_clusters):
    generator = torch.Generator().manual_seed(seed)
    labels = [torch.randint(0, c, (2, 2, n), generator=generator).short() for c in (q_clusters, k_clusters)]
    kept = torch.rand(2, 2, q_clusters, k_clusters, generator=generator) < 0.4
    some = labels[1][..., :1].long().unsqueeze(2).expand(2, 2, q_clusters, 1)
    mask = ClusterMask(kept.scatter(3, some, True), *labels)
    plan = make_plan(mask)
    expected = mask.dense_tokens()
    for b in range(2):
        for h in range(2):
            assert torch.equal(token_mask(plan, b, h), expected[b, h])
            starts, perm = plan.boundaries("k", b, h), plan.permutation("k", b, h)
            for c in range(k_clusters):
                members = (labels[1][b, h] == c).nonzero().view(-1)
                assert torch.equal(perm[starts[c] : starts[c + 1]].long(), members)


def test_row_without_keys_is_refused():
    blocks = torch.ones(2, 2, 3, 3, dtype=torch.bool)
    blocks[1, 0, 2] = False
    with pytest.raises(HeartError, match=r"query row 2 of head 0 \(batch item 1\) holds tokens but keeps no key"):
        make_plan(BlockMask(blocks, 8, 24, 24))


def test_cluster_that_keeps_only_empty_clusters_is_refused_but_an_empty_one_is_not():
    labels = torch.zeros(1, 1, 5, dtype=torch.int16)
    kept = torch.tensor([[False, True], [False, False]]).view(1, 1, 2, 2)  # key cluster 1 holds nothing
    with pytest.raises(HeartError, match="query row 0"):
        make_plan(ClusterMask(kept, labels, labels))
    kept = torch.tensor([[True, False], [False, False]]).view(1, 1, 2, 2)  # query cluster 1 holds nothing
    assert make_plan(ClusterMask(kept, labels, labels)).counts.tolist() == [[[1, 0]]]


def test_bad_orders_and_labels_are_refused():
    twice = torch.tensor([0, 1, 1, 3])
    with pytest.raises(HeartError, match="not a permutation"):
        make_plan(BlockMask.full(1, 1, 4, 2, order=twice))
    with pytest.raises(HeartError, match="not a permutation"):
        make_plan(BlockMask.full(1, 1, 4, 2, order=torch.tensor([0, 1, 2, 4])))
    labels = torch.zeros(1, 1, 4, dtype=torch.int16)
    with pytest.raises(HeartError, match="key labels run from 0 to 3 but the map has 2 clusters"):
        wrong = torch.tensor([[[0, 1, 2, 3]]], dtype=torch.int16)
        make_plan(ClusterMask(torch.ones(1, 1, 2, 2, dtype=torch.bool), labels, wrong))


def test_bytes_and_moving():
    plan = make_plan(BlockMask.full(1, 2, 100, 32, order=torch.randperm(100)), "cpu", {"mine": torch.zeros(3)})
    moved = plan.to("meta")
    assert moved.device.type == "meta" and moved.extra["mine"].device.type == "meta"
    assert plan.nbytes == 8 * 2 * 5 + 4 * 32 + 4 * 2 * 4 + 2 * 4 * 5 + 2 * 4 * 100 + 12
