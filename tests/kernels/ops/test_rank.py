"""Ranking clusters: C against PyTorch, and the rule against its words."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.kernels.ops import native, rank

torch.set_num_threads(1)
some = settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
compiled = pytest.mark.skipif(bool(native.reasons_not()), reason="no compiler")


@compiled
@some
@given(
    st.integers(0, 999), st.integers(1, 90), st.integers(1, 40), st.integers(1, 12),
    st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(),
)  # fmt: skip
def test_moments(seed, n, dim, count, dtype, by_token):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, n, 3, dim, generator=g).to(dtype).transpose(1, 2)
    x = x if by_token else x.contiguous()
    labels = torch.randint(0, count + 2, (2, 3, n), generator=g).to(torch.int16)  # the last two are text
    for found, wanted in zip(rank.cluster_moments(x, labels, count), rank.torch_cluster_moments(x, labels, count)):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert rank.cluster_moments.choose(x, labels, count).name == "c"


def twin(row, sizes, share, at_least):
    """By the words of the docstring."""
    kept, before = set(), 0
    for j in sorted(range(len(row)), key=lambda j: (-row[j], j)):
        if not before < share * sum(sizes) and len(kept) >= at_least:
            break
        kept.add(j)
        before += sizes[j]
    return [j in kept for j in range(len(row))]


@some
@given(
    st.integers(0, 999), st.integers(1, 40), st.floats(0, 1), st.integers(0, 5), st.booleans(),
    st.sampled_from([rank.keep_share, rank.torch_keep_share]),
)  # fmt: skip
def test_what_is_kept(seed, columns, share, at_least, ties, by):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (1, 2, 4, columns), generator=g).float()
    scores = (
        scores * -0.0 if ties and seed % 3 == 0 else scores if ties else scores + torch.rand(scores.shape, generator=g)
    )
    sizes = torch.randint(0, 9, (1, 2, columns), generator=g)
    kept = by(scores, sizes, torch.tensor([[share, share / 2]], dtype=torch.float64), at_least)
    for h in range(2):
        for r in range(4):
            row = scores[0, h, r].tolist()
            assert kept[0, h, r].tolist() == twin(row, sizes[0, h].tolist(), share / (1 + h), at_least)


@compiled
def test_many_columns_and_threads():
    g = torch.Generator().manual_seed(0)
    scores, sizes = torch.rand(2, 3, 40, 1000, generator=g), torch.randint(0, 60, (2, 3, 1000), generator=g)
    scores[0, 1, 3, 7] = float("nan")
    shares = torch.rand(2, 3, generator=g)
    want = rank.torch_keep_share(scores, sizes, shares, 3)
    assert torch.equal(rank.keep_share(scores, sizes, shares, 3), want) and want[0, 1, 3].all()
    try:
        torch.set_num_threads(3)
        assert torch.equal(rank.keep_share(scores, sizes, shares, 3), want)
    finally:
        torch.set_num_threads(1)
