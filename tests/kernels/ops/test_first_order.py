"""The linear term beside its words, and the kernels that know it."""

import math

import pytest
import torch

import heart_attention as heart
from heart_attention import kernels
from heart_attention.errors import HeartError

torch.set_num_threads(1)


def inputs(n=60, d=8, heads=2):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, n, d, generator=g) for _ in range(3)]


def mask_of(kind, n=60):
    g = torch.Generator().manual_seed(1)
    flags = torch.rand(1, 2, 4, 4, generator=g) < 0.5
    flags[..., 0] = True
    if kind == "block":
        return heart.BlockMask(flags, 16, n, n)
    labels = [torch.randint(4, (1, 2, n), generator=g) for _ in range(2)]
    return heart.ClusterMask(flags, *labels)


def by_words(mask, q, k, v):
    """PISA's output query by query, in fp64."""
    out, n = torch.empty_like(q, dtype=torch.float64), q.shape[2]
    rows, groups = (x.expand(1, 2, n) for x in (mask.row_of(), mask.group_of()))
    for h in range(2):
        keys, values, mine = k[0, h].double(), v[0, h].double(), groups[0, h]
        means = [keys[mine == j].mean(0) for j in range(4)]
        matrix = sum(torch.outer(keys[t] - means[mine[t]], values[t]) for t in range(n))
        for i in range(n):
            x, kept = q[0, h, i].double() / math.sqrt(8), mask.flags[0, h, rows[0, h, i]]
            weights = (keys @ x).exp() * kept[mine]
            z = torch.stack([(means[j] @ x).exp() * ~kept[j] for j in range(4)])
            sizes = torch.stack([(mine == j).sum() for j in range(4)])
            sums = torch.stack([values[mine == j].sum(0) for j in range(4)])
            g = (z * sizes).sum()
            out[0, h, i] = (weights @ values + z @ sums + g / n * (x @ matrix)) / (weights.sum() + g)
    return out


@pytest.mark.parametrize("kernel", ["eager", "cpu"])
@pytest.mark.parametrize("kind", ["block", "cluster"])
def test_by_its_words(kernel, kind):
    if kernels.get(kernel).reasons_not():
        pytest.skip("no compiler")
    q, k, v = inputs()
    mask = mask_of(kind)
    out = kernels.run(kernels.plan(kernel, mask, rest="first-order"), q, k, v)
    assert (out - by_words(mask, q, k, v)).abs().max() < 1e-5


def test_all_kept_is_dense():
    q, k, v = inputs()
    mask = heart.BlockMask.full(1, 2, 60, 16)
    out = kernels.run(kernels.plan("eager", mask, rest="first-order"), q, k, v)
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-6)


def test_other_kernels_refuse():
    with pytest.raises(HeartError, match="first-order"):
        kernels.plan("gather", mask_of("block"), rest="first-order")
    with pytest.raises(HeartError, match="must be one of drop, mean"):
        heart.HeartConfig("xattention", rest="first-order")
    assert heart.HeartConfig("pisa", rest="first-order").rest == "first-order"
