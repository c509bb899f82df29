"""FlexAttention, compiled and run on the CPU, against the definition."""

import pytest
import torch
from torch._dynamo.utils import counters

from heart_attention import kernels
from heart_attention.backbones import SVG2
from heart_attention.errors import HeartError
from heart_attention.kernels import eager, flex
from heart_attention.masks import BlockMask, ClusterMask

BLOCK, HEADS, SIZE = 16, 2, 32  # one head count, head size and block: one compilation serves nearly all tests


@pytest.fixture
def gen():
    return torch.Generator().manual_seed(0)


def qkv(gen, n, dtype=torch.float32, heads=HEADS, d=SIZE):
    return [torch.randn(1, n, heads, d, generator=gen).to(dtype).transpose(1, 2) for _ in range(3)]


def random_blocks(gen, n, block=BLOCK, density=0.3, heads=HEADS, **more):
    m = -(-n // block)
    blocks = torch.rand(1, heads, m, m, generator=gen) < density
    blocks[..., int(torch.randint(m, (1,), generator=gen))] = True
    blocks[:, -1, 0] = True  # counts differ between rows and heads
    return BlockMask(blocks, block, n, n, **more)


def equal_groups(gen, n):
    """Clusters cut into equal groups: another order for queries and for keys of every head."""
    q, k, v = qkv(gen, n)
    return SVG2(5, 9, min_ratio=0, init_iters=2, rank="error", equal_groups=BLOCK).predict(q, k, 0.3, v=v)


def difference(mask, x, rest="drop", **more):
    want = eager.KERNEL.run(eager.KERNEL.plan(mask, rest), *x, **more)
    got = flex.KERNEL.run(flex.KERNEL.plan(mask, rest), *x, **more)
    assert got.dtype == x[0].dtype and got.shape == x[0].shape
    return float((got.float() - want.float()).abs().max())


def test_shapes_tails_and_orders_with_one_compilation(gen):
    difference(random_blocks(gen, 100), qkv(gen, 100))
    counters.clear()
    for n, tail, ordered in ((100, 0, False), (333, 0, False), (128, 0, True), (61, 7, True)):
        order = torch.randperm(n, generator=gen) if ordered else None
        mask = random_blocks(gen, n, order=order, tail=tail)
        assert difference(mask, qkv(gen, n + tail)) <= 2e-6
    several = torch.stack([torch.randperm(90, generator=gen) for _ in range(2)])
    own = torch.tensor([[1, 0]], dtype=torch.int8)
    assert difference(random_blocks(gen, 90, order=several, order_of=own), qkv(gen, 90)) <= 2e-6
    assert difference(equal_groups(gen, 90), qkv(gen, 90)) <= 2e-6
    assert counters["stats"]["unique_graphs"] == 0, "a mask or a length must not compile anew"


def test_it_skips_what_the_mask_leaves_out(gen):
    """Not dense in disguise: keys that no row keeps may hold anything."""
    q, k, v = qkv(gen, 160)
    blocks = torch.ones(1, HEADS, 10, 10, dtype=torch.bool)
    blocks[..., 4] = False
    v[:, :, 64:80] = torch.nan
    plan = flex.KERNEL.plan(BlockMask(blocks, BLOCK, 160, 160))
    assert flex.KERNEL.run(plan, q, k, v).isfinite().all()


def test_the_rest_as_means(gen):
    difference(random_blocks(gen, 300), qkv(gen, 300), "mean")
    counters.clear()
    for density in (0.0, 0.5, 1.0):
        assert difference(random_blocks(gen, 300, density=density), qkv(gen, 300), "mean") <= 2e-6
    assert difference(equal_groups(gen, 300), qkv(gen, 300), "mean") <= 2e-6
    assert counters["stats"]["unique_graphs"] == 0, "a mask must not compile anew"
    q, k, v = qkv(gen, 300)
    k, v = (x[:, :, torch.arange(300) // BLOCK * BLOCK] for x in (k, v))  # constant inside groups: the means are exact
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    got = flex.KERNEL.run(flex.KERNEL.plan(random_blocks(gen, 300), "mean"), q, k, v)
    assert (got - dense).abs().max() <= 1e-5  # both in fp32, over a sharp softmax


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["drop", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(gen, dtype, rest):
    assert difference(random_blocks(gen, 200), qkv(gen, 200, dtype), rest) <= 2e-2


@pytest.mark.slow
def test_other_blocks_heads_and_scales(gen):
    mask = random_blocks(gen, 333, block=64, heads=3)
    assert difference(mask, qkv(gen, 333, heads=3, d=40), scale=0.3) <= 2e-6
    blocks = torch.rand(1, HEADS, 6, 11, generator=gen) < 0.5
    blocks[..., 0] = True
    assert difference(BlockMask(blocks, 64, 333, 333, block_k=32), qkv(gen, 333)) <= 2e-6
    assert difference(random_blocks(gen, 5), qkv(gen, 5)) <= 2e-6  # one block
    assert difference(random_blocks(gen, 250, tail=3), qkv(gen, 253)) <= 2e-6  # a view of a longer sequence


def test_uncompiled_it_refuses_instead_of_being_dense(gen):
    plan, x = flex.KERNEL.plan(random_blocks(gen, 100)), qkv(gen, 100)
    with torch.compiler.set_stance("force_eager"), pytest.raises(HeartError, match="ignore the mask"):
        flex.KERNEL.run(plan, *x)
    with torch._dynamo.config.patch(disable=True):
        assert any("switched off" in r for r in flex.KERNEL.reasons_not())
        with pytest.raises(HeartError, match="switched off"):
            flex.KERNEL.run(plan, *x)


def test_the_environment_can_switch_compilation_off(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.delitem(flex.sys.modules, "torch._dynamo.config")
    assert flex.KERNEL.reasons_not()


def test_auto_does_not_take_it_on_a_cpu(gen):
    mask, (q, _, _) = random_blocks(gen, 100), qkv(gen, 100)
    assert kernels.choose(mask, q).name != "flex" and kernels.choose(mask, None).name != "flex"
    assert kernels.choose(mask, q, "flex").name == "flex"


def test_says_what_it_does_not_take(gen):
    labels = torch.zeros(1, HEADS, 100, dtype=torch.int16)
    clusters = ClusterMask(torch.ones(1, HEADS, 1, 1, dtype=torch.bool), labels, labels)
    assert flex.KERNEL.reasons_not(clusters) == ["it takes equal blocks, not clusters"]
    with pytest.raises(HeartError, match="not clusters"):
        flex.KERNEL.plan(clusters)
    assert "float64" in flex.KERNEL.reasons_not(None, qkv(gen, 8, torch.float64)[0])[0]
    assert flex._reasons_tiles(24, 128) and not flex._reasons_tiles(64, 128)
