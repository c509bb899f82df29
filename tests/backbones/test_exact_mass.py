"""ExactMass: masses by brute force, and what top-p promises of them."""

import pytest
import torch

import heart_attention as heart
from heart_attention.backbones.blocks import covered

torch.set_num_threads(1)
small = heart.ExactMass(16)


def inputs(n=100, d=16, heads=2):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, n, d, generator=g) * 2 for _ in range(3)]


def test_masses_by_brute_force():
    q, k, _ = inputs()
    found = small.examine(covered("ExactMass", q, k, None), q[0, 0], k[0, 0], None)
    weights = (q[0, 0] @ k[0, 0].T / 4).softmax(-1)
    for i in range(7):
        for j in range(7):
            block = weights[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
            assert found[i, j].item() == pytest.approx(block.sum().item(), abs=1e-5)


@pytest.mark.parametrize("tau", [0.3, 0.7, 0.95])
def test_keeps_at_least_the_share(tau):
    """In every block row, and not one block more than needed."""
    q, k, _ = inputs()
    mask = small.predict(q, k, tau)
    mass = small.examine(covered("ExactMass", q, k, None), q[0, 1], k[0, 1], None).double()
    share = mass / mass.sum(-1, keepdim=True)
    kept = mask.blocks[0, 1]
    assert ((share * kept).sum(-1) >= tau - 1e-6).all()
    least = share.masked_fill(~kept, 2).amin(-1)
    assert ((share * kept).sum(-1) - least < tau).all()


def test_many_is_one_by_one():
    q, k, _ = inputs()
    masks, full = small.predict_many(q, k, (0.2, 0.6, 1.0))
    assert full.blocks.all() and masks[2].blocks.all()
    for mask, tau in zip(masks, (0.2, 0.6)):
        assert torch.equal(mask.blocks, small.predict(q, k, tau).blocks)


def test_in_the_engine_and_from_a_file():
    q, k, v = inputs(128)
    engine = heart.Engine(heart.HeartConfig(small, 0.5, dense_steps=0, force_sparse=True), layers=1, heads=2)
    for step in range(3):
        assert heart.attention(q, k, v, (0, step, "cond"), engine).isfinite().all()
    assert engine.stats()["dense_calls"] == 0
    assert heart.backbones.from_dict(small.to_dict()) == small


def steps_of(backbone, texts=None, batch=1):
    """Five steps, two of them dense, masks reused for ever; the engine, and outputs of each step."""
    q, k, v = (x.expand(batch, -1, -1, -1).clone() for x in inputs(128))
    config = heart.HeartConfig(backbone, 0.5, heart.Interval(100), dense_steps=2, force_sparse=True)
    engine = heart.Engine(config, layers=1, heads=2)
    context = {"layer": 0, "branch": "cond", "text": texts}
    outs = [heart.attention(q * (1 + step), k, v, context | {"step": step}, engine) for step in range(5)]
    return engine, outs


def test_masks_of_the_last_warm_up_step_serve_the_first_sparse_one():
    plain, outs = steps_of(small)
    warm, others = steps_of(heart.ExactMass(16, warm_up=True))
    assert plain.stats()["refresh_rate"] == pytest.approx(1 / 3) and warm.stats()["refresh_rate"] == 0
    assert torch.equal(outs[0], others[0]) and torch.equal(outs[1], others[1])  # the dense steps stay dense
    assert not torch.equal(outs[2], others[2])
    q, k, v = inputs(128)
    mask = small.predict(2 * q, k, 0.5)  # what step 1 showed
    assert torch.allclose(others[2], heart.kernels.run(heart.kernels.plan("eager", mask), 3 * q, k, v), atol=1e-5)


def test_warm_up_with_prompts_of_two_lengths():
    texts = [heart.masks.Text(112, 10, 6), heart.masks.Text(112, 4, 12)]
    engine, _ = steps_of(heart.ExactMass(16, warm_up=True), texts, batch=2)
    assert len(engine._states) == 2 and engine.stats()["refresh_rate"] == 0
