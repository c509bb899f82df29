"""Sparge: exact against the golden set, and the laws of a predictor."""

import dataclasses

import pytest
import torch
from golden_more import cases

import heart_attention as heart
from heart_attention import kernels
from heart_attention.backbones.blocks import covered
from heart_attention.backbones.sparge import self_similarity
from heart_attention.errors import HeartError

torch.set_num_threads(1)
small = heart.Sparge(block_q=32, block_k=16, similarity=-1.0)


def inputs(n=100, d=16, heads=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, d, generator=g) for _ in range(3)]


def peaked(n):
    """Queries that look above all at keys of their own frequency, of which the first come early."""
    q, k, v = inputs(n)
    code = torch.nn.functional.one_hot(torch.arange(n) // 16 % 8, 16).float() * 3
    return 0.5 * q + code, 0.5 * k + code, v


def golden_backbone(config):
    select = "cdf" if "cdf" in config else "topk"
    made = heart.Sparge(config["bq"], config["bk"], config["sim"], select, config["sink"], config["smooth"])
    return made, config[select]


@pytest.mark.parametrize("case, config", cases("sparge"))
def test_golden(case, config):
    q, k = (case.real(f"{x}_i8") for x in "qk")
    backbone, threshold = golden_backbone(config)
    mask = backbone.predict(q, k, threshold)
    safe = case[f"safe_{config['key']}"]
    assert mask.block_shape == (config["bq"], config["bk"])
    assert torch.equal(mask.blocks[0][safe], case[f"map_{config['key']}"][safe])


@pytest.mark.parametrize("case, config", cases("sparge"))
def test_golden_similarity_and_mass(case, config):
    q, k = (case.real(f"{x}_i8") for x in "qk")
    backbone, _ = golden_backbone(config)
    tokens = covered("Sparge", q, k, None)
    kind = f"{config['bq']}x{config['bk']}_{'sk' if config['smooth'] else 'raw'}"
    for h in range(case.about["H"]):
        seen = backbone.examine(tokens, q[0, h], k[0, h], None)
        for key, found in ((f"simq_{kind}", seen.q_alike), (f"simk_{kind}", seen.k_alike)):
            if key in case:
                assert torch.allclose(found, case[key][h], rtol=0, atol=1e-6, equal_nan=True)
        if config["key"] == "128x64_s0p30_c0p90" and "prob_128x64_s0p30" in case:
            wrong = backbone.mass(seen, h) - case["prob_128x64_s0p30"][h]
            assert wrong.abs().max() <= case.about["tolerance"]["prob"]


@pytest.mark.parametrize("case, config", cases("sparge", "pv"))
def test_golden_small_blocks(case, config):
    """`pvthreshd`."""
    q, k = (case.real(f"{x}_i8") for x in "qk")
    backbone, _ = golden_backbone(config)
    key, n = config["key"], q.shape[2]
    mask = heart.BlockMask(case[f"map_{key}"][None], config["bq"], n, n, block_k=config["bk"])
    safe = case[f"pvsafe_{key}"]
    left = dataclasses.replace(backbone, pv=config["pv"]).without_small(mask, q, k)
    assert torch.equal(left.blocks[0][safe], case[f"pvkeep_{key}"][safe])


@pytest.mark.parametrize("kernel", ["eager", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_leave_out_what_gains_little(kernel, dtype):
    """`pvthreshd` inside the kernel is attention over the mask without those blocks, head by head."""
    q, k, v = (x.to(dtype) for x in peaked(470))
    backbone = dataclasses.replace(small, pv=(0.5, 1.5))
    mask = heart.BlockMask(torch.ones(1, 2, 15, 30, dtype=torch.bool), 32, 470, 470, block_k=16)
    less = backbone.without_small(mask, q, k)
    gone = (mask.blocks & ~less.blocks).sum((0, 2, 3))
    assert gone[0] > gone[1] > 0 and not (mask.blocks & ~less.blocks)[:, :, -1].any()  # the short last row keeps all
    visit = backbone.visit(None, mask, torch.ones(1, 2, dtype=torch.bool))
    out = kernels.run(kernels.plan(kernel, mask), q, k, v, visit=visit)
    expected = kernels.run(kernels.plan(kernel, less), q, k, v)
    assert torch.allclose(out.float(), expected.float(), atol=1e-5 if dtype == torch.float32 else 1e-2)


def test_the_engine_hands_pv_to_the_kernel():
    q, k, v = peaked(256)
    outs = []
    for pv in (None, 0.5):
        config = heart.HeartConfig(
            dataclasses.replace(small, pv=pv), 0.999, heart.Always(), dense_steps=0, force_sparse=True
        )
        outs.append(heart.attention(q, k, v, (0, 0, "cond"), heart.Engine(config, layers=1, heads=2)))
    mask = small.predict(q, k, 0.999)
    less = dataclasses.replace(small, pv=0.5).without_small(mask, q, k)
    assert less.density().max() < mask.density().max() and not torch.equal(*outs)
    assert torch.allclose(outs[1], kernels.run(kernels.plan("eager", less), q, k, v), atol=1e-5)
    config = heart.HeartConfig(
        dataclasses.replace(small, pv=1.0), 0.9, kernel="gather", force_sparse=True, dense_steps=0
    )
    with pytest.raises(HeartError, match="which tiles could be skipped"):
        heart.attention(q, k, v, (0, 0, "cond"), heart.Engine(config, layers=1, heads=2))


def test_pv_is_checked():
    for wrong in (-1, float("nan"), "50", (1.0, -2.0), ()):
        with pytest.raises(HeartError, match="pv="):
            heart.Sparge(pv=wrong)
    backbone = heart.Sparge(pv=(1, 2))
    assert heart.backbones.from_dict(backbone.to_dict()) == backbone
    wide = heart.Sparge(256, 64, pv=1.0, similarity=-1)
    q, k, v = inputs(512)
    mask = wide.predict(q, k, 0.9)
    with pytest.raises(HeartError, match="at most 192 queries"):
        kernels.run(kernels.plan("cpu", mask), q, k, v, visit=wide.visit(None, mask, torch.ones(1, 2)))


def test_similarity_by_its_words():
    x = inputs(40)[0][0, 0]
    found = self_similarity(x, 16)
    for j in range(2):
        rows = torch.nn.functional.normalize(x[16 * j : 16 * j + 16], dim=-1)
        assert found[j].item() == pytest.approx((rows @ rows.T).mean().item(), abs=1e-6)
    assert found[2].isnan()  # a short block


def test_blocks_unlike_themselves_are_computed():
    q, k, _ = inputs(128)
    assert heart.Sparge(32, 16, similarity=1.0).predict(q, k, 0.01).blocks.all()
    assert (small.predict(q, k, 0.0001).blocks.sum(-1) == 1).all()


def test_short_blocks_are_computed():
    q, k, _ = inputs(100)
    blocks = small.predict(q, k, 0.0001).blocks
    assert blocks[:, :, -1].all() and blocks[..., -1].all()


def test_sink_and_topk():
    q, k, _ = inputs(128)
    backbone = heart.Sparge(32, 16, -1.0, "topk", sink=True)
    blocks = backbone.predict(q, k, 0.5).blocks
    assert blocks[..., 0].all() and set(blocks.sum(-1).flatten().tolist()) <= {4, 5}


def test_smoothing_makes_a_shift_of_all_keys_invisible():
    q, k, _ = inputs(128)
    assert torch.equal(small.predict(q, k, 0.5).blocks, small.predict(q, k + 2, 0.5).blocks)


def test_one_similarity_a_head():
    q, k, _ = inputs(128)
    both = heart.Sparge(32, 16, [-1.0, 1.0])
    assert torch.equal(both.predict(q, k, 0.3).blocks[:, :1], small.predict(q, k, 0.3).blocks[:, :1])
    assert both.predict(q[:, 1:], k[:, 1:], 0.3, heads=[1]).blocks.all()
    assert heart.backbones.from_dict(both.to_dict()) == both
    with pytest.raises(HeartError, match="one for each head"):
        both.predict(q, k, 0.3, heads=[1, 2])


def test_many_is_one_by_one():
    q, k, v = inputs()
    masks, full = small.predict_many(q, k, (0.2, 0.6, 1.0), v=v)
    assert full.blocks.all() and masks[2].blocks.all()
    for mask, tau in zip(masks, (0.2, 0.6)):
        assert torch.equal(mask.blocks, small.predict(q, k, tau).blocks)


@pytest.mark.parametrize("settings", [{"similarity": 2}, {"select": "best"}, {"block_q": 0}])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(HeartError, match=next(iter(settings))):
        heart.Sparge(**settings)


def test_in_the_engine():
    q, k, v = inputs(128)
    engine = heart.Engine(heart.HeartConfig(small, 0.5, dense_steps=0, force_sparse=True), layers=1, heads=2)
    for step in range(3):
        assert heart.attention(q, k, v, (0, step, "cond"), engine).isfinite().all()
    assert engine.stats()["dense_calls"] == 0
