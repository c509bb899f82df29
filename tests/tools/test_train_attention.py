"""Training's quick attention and quick trainers against PyTorch's attention and trainers in float32."""

import pytest
import torch
from tools.train_tiny import attention, hunyuan, plan, train
from torch.nn import functional

needs_kernel = pytest.mark.skipif(attention.library() is None, reason="no AVX-512 for bfloat16, or no C compiler")


def apart(found, wanted) -> float:
    """Relative distance."""
    return ((found.float() - wanted).norm() / wanted.norm()).item()


@needs_kernel
@pytest.mark.parametrize(("b", "n", "missing"), [(1, 64, 0), (2, 200, 7), (3, 256, 130)])
def test_kernel_and_its_gradients_are_pytorchs(b, n, missing):
    torch.manual_seed(n)
    q, k, v, grad = (torch.randn(b, n, 4, 32).bfloat16() for _ in range(4))
    valid = torch.tensor([n - missing * (i % 2 == 0) for i in range(b)])
    exact = [t.float().requires_grad_() for t in (q, k, v)]
    quick = [t.clone().requires_grad_() for t in (q, k, v)]
    mask = (torch.arange(n) < valid[:, None])[:, None, None]
    wanted = functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in exact), attn_mask=mask)
    wanted = wanted.transpose(1, 2)
    found = attention.over_first_keys(*quick, valid)
    assert apart(found, wanted) < 0.01
    wanted.backward(grad.float())
    found.backward(grad)
    for one, other in zip(quick, exact, strict=True):
        assert apart(one.grad, other.grad) < 0.02


@needs_kernel
def test_kernel_bears_large_logits():
    q = torch.full((1, 64, 4, 32), 30.0).bfloat16()
    k, v = (torch.randn(1, 64, 4, 32).bfloat16() for _ in range(2))
    valid = torch.tensor([64])
    wanted = functional.scaled_dot_product_attention(*(t.float().transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    assert apart(attention.over_first_keys(q, k, v, valid), wanted) < 0.01


@pytest.mark.parametrize("kind", [train.Trainer, hunyuan.HunyuanTrainer])
def test_a_quick_trainer_takes_the_same_step(kind):
    losses, gradients = [], []
    for quick in (False, True):
        trainer = kind(plan.SMOKE_PLAN, quick=quick)
        loss = trainer.loss((2, 4, 4, 4), torch.Generator().manual_seed(3), trainer.phase())
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for _, p in trainer.named if p.grad is not None]))
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert functional.cosine_similarity(*gradients, dim=0) > 0.995
