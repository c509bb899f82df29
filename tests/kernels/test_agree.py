"""All kernels that serve here against the definition, over shapes, densities and hostile values."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention import kernels
from heart_attention.masks import BlockMask, ClusterMask

SERVING = [name for name in ("cpu", "gather") if not kernels.get(name).reasons_not()]
TOLERANCE = 2e-6  # fp32, absolute, inputs of unit scale


def random_block_mask(generator, batch, heads, n, block, density, tail=0, ordered=False, block_k=None):
    m, m_k = math.ceil(n / block), math.ceil(n / (block_k or block))
    blocks = torch.rand(batch, heads, m, m_k, generator=generator) < density
    rows = torch.randint(0, m_k, (batch, heads, m, 1), generator=generator)
    order = torch.randperm(n, generator=generator) if ordered else None
    return BlockMask(blocks.scatter(3, rows, True), block, n, n, order, tail, block_k=block_k)


def random_cluster_mask(generator, batch, heads, n, q_clusters, k_clusters, density):
    """Labels drawn from a few clusters only, so that some stay empty."""
    q_labels = torch.randint(0, max(1, q_clusters - 1), (batch, heads, n), generator=generator)
    k_labels = torch.randint(0, max(1, k_clusters - 1), (batch, heads, n), generator=generator)
    kept = torch.rand(batch, heads, q_clusters, k_clusters, generator=generator) < density
    some = k_labels[..., :1].unsqueeze(2).expand(batch, heads, q_clusters, 1)  # a cluster that holds a token
    return ClusterMask(kept.scatter(3, some, True), q_labels.short(), k_labels.short())


def tensors(generator, batch, heads, n, dim, layout="bnhd"):
    shape = {"bnhd": (batch, n, heads, dim), "bhnd": (batch, heads, n, dim), "bhdn": (batch, heads, dim, n)}[layout]
    drawn = [torch.randn(shape, generator=generator) for _ in range(3)]
    views = {"bnhd": lambda x: x.transpose(1, 2), "bhnd": lambda x: x, "bhdn": lambda x: x.transpose(2, 3)}
    return [views[layout](x) for x in drawn]


def reference(mask, q, k, v, scale=None):
    """Dense attention in fp64 over the token mask that the mask itself writes out."""
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.dense_tokens(), scale=scale)


def run(name, mask, q, k, v, **options):
    return kernels.run(kernels.plan(name, mask), q, k, v, **options)


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "batch": st.integers(1, 2),
        "heads": st.integers(1, 3),
        "n": st.integers(1, 300),
        "dim": st.sampled_from([1, 3, 8, 16, 24, 32, 40, 64, 100, 128, 256]),
        "density": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "layout": st.sampled_from(["bnhd", "bhnd", "bhdn"]),
    }
)


@settings(max_examples=examples(40), deadline=None)
@given(
    cases,
    st.sampled_from([1, 7, 16, 64, 128, 200]),
    st.sampled_from([None, 5, 32, 128]),
    st.integers(0, 9),
    st.booleans(),
)
def test_blocks(case, block, block_k, tail, ordered):
    generator = torch.Generator().manual_seed(case["seed"])
    args = (case["batch"], case["heads"], case["n"])
    mask = random_block_mask(generator, *args, block, case["density"], tail, ordered, block_k)
    q, k, v = tensors(generator, case["batch"], case["heads"], case["n"] + tail, case["dim"], case["layout"])
    expected = reference(mask, q, k, v)
    for name in ["eager", *SERVING]:
        assert (run(name, mask, q, k, v) - expected).abs().max() <= TOLERANCE, name


@settings(max_examples=examples(40), deadline=None)
@given(cases, st.integers(1, 40), st.integers(1, 60))
def test_clusters(case, q_clusters, k_clusters):
    generator = torch.Generator().manual_seed(case["seed"])
    args = (case["batch"], case["heads"], case["n"])
    mask = random_cluster_mask(generator, *args, q_clusters, k_clusters, case["density"])
    q, k, v = tensors(generator, *args, case["dim"], case["layout"])
    expected = reference(mask, q, k, v)
    for name in ["eager", *SERVING]:
        assert (run(name, mask, q, k, v) - expected).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize("name", SERVING)
@pytest.mark.parametrize("factor", [1e-6, 1e-3, 30.0, 1e4])
def test_tiny_and_huge_logits(name, factor):
    """Against fp64 with the error that rounding the logits themselves allows."""
    generator = torch.Generator().manual_seed(3)
    mask = random_block_mask(generator, 1, 2, 200, 32, 0.4)
    q, k, v = tensors(generator, 1, 2, 200, 64)
    q = q * factor
    slack = 64 * 2**-24 * max(1.0, float((q @ k.mT).abs().max()) / 8)
    out = run(name, mask, q, k, v)
    assert out.isfinite().all()
    assert (out - reference(mask, q, k, v)).abs().max() <= max(TOLERANCE, slack)


@pytest.mark.parametrize("name", ["eager", *SERVING])
@pytest.mark.parametrize("scale", [0.0, 0.3, -0.2])
def test_scale(name, scale):
    generator = torch.Generator().manual_seed(4)
    mask = random_block_mask(generator, 1, 2, 90, 16, 0.5)
    q, k, v = tensors(generator, 1, 2, 90, 24)
    assert (run(name, mask, q, k, v, scale=scale) - reference(mask, q, k, v, scale)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["eager", *SERVING])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_bad_values_reach_only_rows_that_attend_to_them(name, bad, which):
    """Rows that do not see the bad token are as before; those that do are what dense attention makes of them."""
    generator = torch.Generator().manual_seed(5)
    mask = random_block_mask(generator, 1, 1, 160, 16, 0.3)
    x = dict(zip("qkv", tensors(generator, 1, 1, 160, 32)))
    clean = run(name, mask, **x)
    token = 37
    x[which][0, 0, token, 5] = bad
    out = run(name, mask, **x)
    tokens = mask.dense_tokens()[0, 0]
    touched = torch.arange(160) == token if which == "q" else tokens[:, token]
    assert torch.equal(out[0, 0, ~touched], clean[0, 0, ~touched])
    for row in touched.nonzero().view(-1).tolist():
        kept = tokens[row]
        q, k, v = x["q"][:, :, row : row + 1], x["k"][:, :, kept], x["v"][:, :, kept]
        weights = (q @ k.mT / math.sqrt(32)).softmax(-1)
        torch.testing.assert_close(out[:, :, row : row + 1], weights @ v, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SERVING)
def test_bf16_is_fp32_rounded(name):
    generator = torch.Generator().manual_seed(6)
    for mask in (
        random_block_mask(generator, 1, 2, 150, 32, 0.4, tail=5, ordered=True),
        random_cluster_mask(generator, 1, 2, 155, 7, 20, 0.4),
    ):
        q, k, v = (x.bfloat16() for x in tensors(generator, 1, 2, 155, 40))
        out = run(name, mask, q, k, v)
        assert out.dtype == torch.bfloat16
        expected = reference(mask, q, k, v)
        assert ((out.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize("name", SERVING)
def test_output_keeps_the_layout_and_out_is_used(name):
    generator = torch.Generator().manual_seed(7)
    mask = random_block_mask(generator, 2, 3, 70, 16, 0.5)
    q, k, v = tensors(generator, 2, 3, 70, 32)
    out = run(name, mask, q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    for target in (torch.zeros(2, 3, 70, 32), torch.zeros(2, 3, 32, 70).transpose(2, 3)):
        assert run(name, mask, q, k, v, out=target) is target
        assert torch.equal(target, out)


@pytest.mark.parametrize("name", SERVING)
def test_more_keys_than_queries(name):
    generator = torch.Generator().manual_seed(8)
    q, _, _ = tensors(generator, 1, 1, 50, 16)
    _, k, v = tensors(generator, 1, 1, 130, 16)
    blocks = torch.rand(1, 1, 4, 9, generator=generator) < 0.5
    blocks[..., 0] = True
    mask = BlockMask(blocks, 16, 50, 130)
    assert (run(name, mask, q, k, v) - reference(mask, q, k, v)).abs().max() <= TOLERANCE


@pytest.mark.skipif("cpu" not in SERVING, reason="no C compiler")
def test_threads_do_not_change_the_result():
    generator = torch.Generator().manual_seed(9)
    mask = random_cluster_mask(generator, 2, 3, 500, 9, 50, 0.3)
    q, k, v = tensors(generator, 2, 3, 500, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run("cpu", mask, q, k, v)
        torch.set_num_threads(3)
        assert torch.equal(run("cpu", mask, q, k, v), one)
    finally:
        torch.set_num_threads(before)
