"""PISA: exact against the golden set, and the laws of a predictor."""

import pytest
import torch
from golden_more import cases

import heart_attention as heart
from heart_attention import kernels
from heart_attention.backbones.pisa import spread
from heart_attention.errors import HeartError
from heart_attention.masks import Text

torch.set_num_threads(1)
small = heart.PISA(block=16)


def inputs(n=100, d=16, heads=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, d, generator=g) for _ in range(3)]


@pytest.mark.parametrize("case, config", cases("pisa"))
def test_golden(case, config):
    q, k, v = (case.real(f"{x}_i8") for x in "qkv")
    mask = heart.PISA(config["block"], config["bias"]).predict(q, k, config["density"], v=v)
    safe = case[f"safe_{config['key']}"]
    assert mask.block_shape == (config["block"],) * 2
    assert torch.equal(mask.blocks[0][safe], case[f"map_{config['key']}"][safe])


def test_spread_by_its_words():
    _, k, v = (x[0, 0].double() for x in inputs(40))
    found = spread(k, v, 16)
    for j, tokens in enumerate((range(16), range(16, 32), range(32, 40))):
        tokens = list(tokens)
        centre = k[tokens].mean(0)
        whole = sum(torch.outer(k[t] - centre, v[t]) for t in tokens)
        assert found[j].item() == pytest.approx(whole.norm().item(), rel=1e-6)


def test_keeps_a_share_of_the_blocks():
    q, k, v = inputs(160)
    for tau, kept in ((0.01, 1), (0.3, 3), (0.99, 9)):
        assert (small.predict(q, k, tau, v=v).blocks.sum(-1) == kept).all()
    assert small.predict(q, k, 1.0, v=v).blocks.all()


def test_many_is_one_by_one():
    q, k, v = inputs()
    masks, full = small.predict_many(q, k, (0.2, 0.6, 1.0), v=v)
    assert full.blocks.all() and masks[2].blocks.all()
    for mask, tau in zip(masks, (0.2, 0.6)):
        assert torch.equal(mask.blocks, small.predict(q, k, tau, v=v).blocks)


def test_order_is_a_permutation_of_the_tokens():
    q, k, v = inputs(96)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    there = small.predict(q, k, 0.3, order=order, v=v)
    here = small.predict(*(x[:, :, order] for x in (q, k)), 0.3, v=v[:, :, order])
    assert torch.equal(there.blocks, here.blocks) and torch.equal(there.order, order)


def test_unused_text_is_set_aside():
    q, k, v = inputs(100)
    mask = small.predict(q, k, 0.3, text=Text(80, 10, 10), v=v)
    alone = small.predict(q[:, :, :90], k[:, :, :90], 0.3, v=v[:, :, :90])
    assert mask.tail == 10 and torch.equal(mask.blocks, alone.blocks)


def test_bias_needs_values():
    q, k, _ = inputs()
    with pytest.raises(HeartError, match="values"):
        small.predict(q, k, 0.5)
    assert heart.PISA(16, bias=False).predict(q, k, 0.5).blocks.any()


def test_in_the_engine():
    q, k, v = inputs(128)
    config = heart.HeartConfig(small, 0.5, dense_steps=0, force_sparse=True, rest="first-order")
    engine = heart.Engine(config, layers=1, heads=2)
    for step in range(3):
        assert heart.attention(q, k, v, (0, step, "cond"), engine).isfinite().all()
    assert engine.stats()["dense_calls"] == 0


def test_settings_survive_a_file():
    assert heart.backbones.from_dict(small.to_dict()) == small


@pytest.mark.parametrize("kernel", ["eager", "cpu"])
@pytest.mark.parametrize("case, config", cases("pisa"))
def test_golden_output(case, config, kernel):
    """The original's Taylor expansion is `rest="first-order"`."""
    if kernels.get(kernel).reasons_not():
        pytest.skip("no compiler")
    q, k, v = (case.real(f"{x}_i8") for x in "qkv")
    blocks, n = case[f"map_{config['key']}"][None], q.shape[2]
    plan = kernels.plan(kernel, heart.BlockMask(blocks, config["block"], n, n), rest="first-order")
    wrong = kernels.run(plan, q, k, v)[0][:, case["out_rows"].long()] - case[f"out_{config['key']}"]
    assert wrong.abs().max() <= case.about["tolerance"]["out"]
