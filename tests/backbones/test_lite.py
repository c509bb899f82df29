"""Lite: the sets of tiles exact against the golden set, step by step, and what the engine does with them."""

import pytest
import torch
from golden_more import cases

import heart_attention as heart
from heart_attention import kernels
from heart_attention.errors import HeartError
from heart_attention.kernels import Visit, eager
from heart_attention.kernels.ops.tile_gains import tile_gains
from heart_attention.masks import Text

torch.set_num_threads(1)
small = heart.Lite(tile_q=16, tile_k=16)


def inputs(n=96, d=16, heads=2):
    """Tokens that look above all at their own 16 neighbours."""
    g = torch.Generator().manual_seed(0)
    code = torch.nn.functional.one_hot(torch.arange(n) // 16 % d, d).float() * 8
    q, k, v = (torch.randn(1, heads, n, d, generator=g) for _ in range(3))
    return q / 4 + code, k / 4 + code, v


@pytest.mark.parametrize("kernel", ["eager", "cpu"])
@pytest.mark.parametrize("case, config", cases("lite"))
def test_golden(case, config, kernel):
    """Every step: which tiles are computed, and which were found skippable."""
    tile, key, heads = case.about["tile"], config["key"], range(case.about["H"])
    backbone = heart.Lite(config["thr"], *tile, tuple(map(tuple, config["must"])))
    state, every = backbone.new_state(), torch.ones(1, len(heads), dtype=torch.bool)
    q_steps, k_steps = case.real("q_i8")[0], case.real("k_i8")[0]
    for step in range(case.about["steps"]):
        q, k = q_steps[step][None], k_steps[step][None]
        mask = backbone.predict(q, k, 0.5, state)
        safe = case[f"safe2_{key}"][step]
        assert torch.equal(mask.blocks[0][safe], case[f"done2_{key}"][step][safe])
        visit = backbone.visit(state, mask, every)
        kernels.run(kernels.plan(kernel, mask), q, k, k, visit=visit)
        after = backbone.learn(state, mask, visit.gains, every, [0.5] * len(heads))
        gone = (mask.blocks & ~after.blocks)[0]
        expected = case[f"skip2_{key}"][step] & ~state.protected
        assert torch.equal(gone[safe], expected[safe])


def test_gains_by_their_words():
    """Group by group, query by query."""
    q, k, _ = inputs(40, heads=1)
    flags = torch.rand(1, 1, 3, 5, generator=torch.Generator().manual_seed(2)) < 0.7
    flags[..., 0] = True
    plan = eager.KERNEL.plan(heart.BlockMask(flags, 16, 40, 40, block_k=8))
    logits = (q[0, 0] @ k[0, 0].T / 4) / torch.log(torch.tensor(2.0))
    for back in (False, True):
        found = tile_gains(plan, q, k, torch.tensor([[back]]))[0, 0]
        for i in range(3):
            running = torch.full((len(logits[16 * i : 16 * i + 16]),), -torch.inf)
            for j in sorted(flags[0, 0, i].nonzero().view(-1).tolist(), reverse=back):
                top = logits[16 * i : 16 * i + 16, 8 * j : 8 * j + 8].amax(1)
                assert found[i, j].item() == pytest.approx((top - running).max().item(), abs=1e-4)
                running = torch.maximum(running, top)
        assert found[~flags[0, 0]].isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [(16, 16), (40, 176), (250, 130), (192, 192)])
def test_the_cpu_kernel_sees_what_the_definition_sees(tile, dtype):
    """Gains and outputs, in both directions, with blocks longer and shorter than the kernel's own tiles."""
    q, k, v = (x.to(dtype) for x in inputs(600, 24, 3))
    g = torch.Generator().manual_seed(3)
    flags = torch.rand(1, 3, -(-600 // tile[0]), -(-600 // tile[1]), generator=g) < 0.7
    flags[..., 0] = True
    mask = heart.BlockMask(flags, tile[0], 600, 600, block_k=tile[1])
    back, found = torch.tensor([[False, True, True]]), []
    for name in ("eager", "cpu"):
        visit = Visit(back, torch.empty(flags.shape))
        found.append((kernels.run(kernels.plan(name, mask), q, k, v, visit=visit), visit.gains))
    (out, gains), (other, others) = found
    assert torch.allclose(gains, others, atol=1e-3) and others[~flags].isinf().all()
    assert torch.allclose(out.float(), other.float(), atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_gains_are_the_same_with_several_threads(monkeypatch):
    q, k, v = inputs(600, 24, 3)
    mask = heart.BlockMask(torch.ones(1, 3, 2, 5, dtype=torch.bool), 300, 600, 600, block_k=120)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr("heart_attention.kernels.ops.build.threads", lambda n=threads: n)
        found.append(torch.empty(1, 3, 2, 5))
        kernels.run(kernels.plan("cpu", mask), q, k, v, visit=Visit(gains=found[-1]))
    assert torch.equal(*found)


def test_a_visit_is_checked():
    q, k, v = inputs()
    mask = heart.BlockMask(torch.ones(1, 2, 6, 6, dtype=torch.bool), 16, 96, 96)
    for name, visit, words in (
        ("gather", Visit(), "choose eager or cpu"),
        ("cpu", Visit(torch.zeros(2, dtype=torch.bool)), "for each head"),
        ("cpu", Visit(gains=torch.empty(1, 2, 5, 6)), "gains have shape"),
        ("eager", Visit(skip=torch.full((1, 2), -1.0)), "0 or more"),
    ):
        with pytest.raises(HeartError, match=words):
            kernels.run(kernels.plan(name, mask), q, k, v, visit=visit)
    with pytest.raises(HeartError, match="needs the rest dropped"):
        kernels.run(kernels.plan("cpu", mask, "mean"), q, k, v, visit=Visit())


def engine_of(backbone, tau=0.9, **more):
    config = heart.HeartConfig(backbone, tau, dense_steps=0, force_sparse=True, **{"reuse": heart.Always()} | more)
    return heart.Engine(config, layers=1, heads=2)


def test_sets_shrink_in_the_engine_and_begin_anew():
    q, k, v = inputs()
    engine = engine_of(small)
    for step in range(5):
        heart.attention(q, k, v, (0, step, "cond"), engine)
    density = torch.tensor(engine.stats()["records"][0]["density"][0]).mean(-1)  # [steps]
    assert (density.diff() <= 0).all() and density[0] == 1 and density[-1] < 1
    assert engine.stats()["dense_calls"] == 0 and set(engine.stats()["kernels"]) == {"cpu"}
    heart.attention(q, k, v, (0, 0, "cond"), engine)  # another generation
    (state,) = engine._states.values()
    assert state.groups[0].density.eq(1).all()


def test_reuse_keeps_the_set_without_judging():
    """A head that is not refreshed computes what it learnt last, and learns nothing."""
    q, k, v = inputs()
    engine = engine_of(small, reuse=heart.Interval(100))
    for step in range(4):
        heart.attention(q, k, v, (0, step, "cond"), engine)
    density = torch.tensor(engine.stats()["records"][0]["density"][0]).mean(-1)
    assert density[0] == 1 and density[1] < 1 and density[1] == density[2] == density[3]


def test_a_loose_bound_drops_nothing():
    q, k, v = inputs()
    engine = engine_of(heart.Lite(-1000.0, 16, 16))
    for step in range(3):
        out = heart.attention(q, k, v, (0, step, "cond"), engine)
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5)


def test_candidates_are_what_one_call_learns():
    q, k, _ = inputs()
    masks, full = small.predict_many(q, k, (0.5, 0.99, 1.0))
    assert full.blocks.all() and masks[2].blocks.all() and not (masks[0].blocks & ~masks[1].blocks).any()
    state, which = small.new_state(), torch.ones(1, 2, dtype=torch.bool)
    mask = small.predict(q, k, 0.5, state)
    visit = small.visit(state, mask, which)
    kernels.run(kernels.plan("eager", mask), q, k, k, visit=visit)
    assert torch.equal(small.learn(state, mask, visit.gains, which, [0.5, 0.5]).blocks, masks[0].blocks)


def test_the_prompt_stays():
    q, k, v = inputs(100)
    engine = engine_of(heart.Lite(-0.01, 16, 16))
    for step in range(4):
        heart.attention(q, k, v, {"layer": 0, "step": step, "branch": "c", "text": [Text(80, 10, 10)]}, engine)
    (state,) = engine._states.values()
    mask = state.groups[0].packed.unpack()
    assert mask.rows(torch.arange(80), torch.arange(80, 90)).all() and mask.density().max() < 1


def test_other_kernels_refuse():
    with pytest.raises(HeartError, match="which tiles could be skipped"):
        kernels.choose(name="gather", visits=True)
    q, k, v = inputs()
    with pytest.raises(HeartError, match="which tiles could be skipped"):
        heart.attention(q, k, v, (0, 0, "cond"), engine_of(small, kernel="gather"))


def test_tiles_and_thresholds():
    assert heart.Lite().tile(64) == (192, 192) and heart.Lite().tile(128) == (128, 176)
    assert heart.Lite().tile(256) == (128, 80)
    assert heart.Lite().log2_threshold(heart.Lite.default_threshold) == -10
    backbone = heart.Lite(-3, must=((0, 4),))
    assert heart.backbones.from_dict(backbone.to_dict()) == backbone
    for wrong in ({"threshold": 1}, {"tile_q": 0}, {"must": ((4, 2),)}):
        with pytest.raises(HeartError, match=next(iter(wrong))):
            heart.Lite(**wrong)
