"""Backward of attention: PyTorch's and C's against autograd through the definition, dropped and approximated rests."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention import kernels
from heart_attention.backbones import SVG2, XAttention
from heart_attention.kernels.ops import backward
from heart_attention.masks import BlockMask, ClusterMask, Text
from heart_attention.token_order import tile_order

torch.set_num_threads(1)
BACKBONES = {"xattention": XAttention(stride=4, block=8), "svg2": SVG2(6, 10, init_iters=10)}


def autograd(mask, q, k, v, grads, rest):
    """The output of the definition, and its derivatives for each cotangent."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = kernels.run(kernels.plan("eager", mask, rest), *leaves)
    return out.detach(), [torch.autograd.grad(out, leaves, g, retain_graph=True) for g in grads]


@pytest.mark.parametrize("by", [backward.attention_backward, backward.torch_attention_backward])
@pytest.mark.parametrize("rest", ["drop", "mean"])
@pytest.mark.parametrize("case", ["block", "tiles", "heads", "tail", "cluster", "cluster text"])
def test_it_equals_autograd(case, rest, by):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    text = Text(60, 6, 4) if case in ("tail", "cluster text") else None
    order = tile_order((2, 5, 7), 8) if case == "tiles" else None
    backbone = BACKBONES["svg2" if case.startswith("cluster") else "xattention"]
    mask = backbone.predict(q, k, [0.5, 0.8], text=text, order=order)
    if case == "heads":
        several = torch.stack([torch.arange(70), tile_order((2, 5, 7), 8)])
        mask = replace(mask, order=several, order_of=torch.tensor([[1, 0]], dtype=torch.int8))
    grads = [torch.randn_like(q), torch.randn_like(q)]
    out, expected = autograd(mask, q, k, v, grads, rest)
    for found, wanted in zip(by(mask, q, k, v, out, grads, rest=rest), expected):
        for a, b in zip(found, wanted):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def random_mask(data, generator, heads, n):
    """Blocks that need not be square, or clusters of which some are empty; a row may keep nothing."""
    density = data.draw(st.floats(0, 1))
    if data.draw(st.booleans()):
        rows, columns = (data.draw(st.integers(1, 20)) for _ in range(2))
        labels = [torch.randint(c, (1, heads, n), generator=generator) for c in (rows, columns)]
        return ClusterMask(torch.rand(1, heads, rows, columns, generator=generator) < density, *labels)
    block, block_k = (data.draw(st.sampled_from([1, 4, 16, 64])) for _ in range(2))
    shape = (1, heads, -(-n // block), -(-n // block_k))
    order = torch.randperm(n, generator=generator) if data.draw(st.booleans()) else None
    return BlockMask(torch.rand(shape, generator=generator) < density, block, n, n, order, block_k=block_k)


@settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_shape(data):
    n, dim, heads = (data.draw(st.integers(1, most)) for most in (90, 40, 3))
    count, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, dim, generator=generator) for _ in range(3))
    rest = data.draw(st.sampled_from(["drop", "mean"]))
    mask = random_mask(data, generator, heads, n)
    if rest == "drop":  # every row needs a key
        mask = mask.with_flags(mask.flags | (mask.sizes()[1] == mask.sizes()[1].amax(-1, True))[..., None, :])
    grads = [torch.randn(q.shape, generator=generator) for _ in range(count)]
    out, expected = autograd(mask, q, k, v, grads, rest)
    for by in (backward.attention_backward, backward.torch_attention_backward):
        for found, wanted in zip(by(mask, q, k, v, out, grads, rest=rest), expected):
            for a, b in zip(found, wanted):
                torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-4)


def test_whom_the_c_code_serves():
    q = torch.randn(1, 2, 70, 16)
    mask = BACKBONES["xattention"].predict(q, q, 0.5)
    assert backward.serves(mask, q) == (not kernels.get("cpu").reasons_not())
    assert "it computes in float32, not float64" in backward.reasons_not(mask, q.double())
    tail = BACKBONES["xattention"].predict(q, q, 0.5, text=Text(60, 6, 4))
    assert "it knows no tail of unused text slots" in backward.reasons_not(tail, q)
