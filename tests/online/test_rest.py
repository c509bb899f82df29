"""The rest approximated, through the engine: reuse keeps labels and never means."""

import math

import pytest
import torch
import torch.nn.functional as F

from heart_attention.backbones import SVG2, XAttention
from heart_attention.config import HeartConfig
from heart_attention.errors import HeartError
from heart_attention.kernels import eager
from heart_attention.masks import Text
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine
from heart_attention.online.reuse import TMR, Always

H, N, D = 2, 64, 16
# More key clusters than groups of equal keys, so that no cluster holds two groups.
BACKBONES = {"blocks": XAttention(4, 8), "mass": SVG2(4, 40), "error": SVG2(4, 40, rank="error")}


def sdpa(q, k, v, items=None):
    return F.scaled_dot_product_attention(q, k, v)


def engine(backbone, tau=0.3, rest="mean", reuse=None, **more):
    reuse = reuse or TMR(delta=math.inf)
    return Engine(HeartConfig(backbone, tau, reuse, dense_steps=0, rest=rest, force_sparse=True, **more), 1, H)


def call(step, **more):
    return CallContext(layer=0, layers=1, step=step, branch="cond", **more)


def grouped(seed):
    """q, k, v whose keys and values are constant on stretches of 8 tokens: blocks and clusters alike."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, H, N, D, generator=generator)
    k, v = (torch.randn(1, H, N // 8, D, generator=generator).repeat_interleave(8, 2) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("name", BACKBONES)
def test_constant_groups_are_dense_and_means_are_the_present_ones(name):
    served = engine(BACKBONES[name], tau=0.2)
    for step in range(3):  # reused for ever, while k and v change
        q, k, v = grouped(step)
        out = served.attend(call(step), q, k, v, sdpa)
        if step and name != "blocks":
            continue  # the first step's clusters need not be constant in the new keys
        assert (out - sdpa(q, k, v)).abs().max() <= 2e-6
    stats = served.stats()
    assert stats["density"] < 0.9 and stats["cost"] > stats["density"]


def test_labels_are_reused_and_means_are_not():
    served = engine(SVG2(4, 40), tau=0.2)
    q, k, v = grouped(0)
    served.attend(call(0), q, k, v, sdpa)
    out = served.attend(call(1), q, 0.5 * k, 3 * v, sdpa)  # the same clusters, other means
    assert (out - sdpa(q, 0.5 * k, 3 * v)).abs().max() <= 3 * 2e-6  # values are three times as large
    assert served.stats()["refresh_rate"] == 0.5


@pytest.mark.parametrize("name", BACKBONES)
def test_all_kept_is_the_same_for_both_rests(name):
    q, k, v = (torch.randn(1, H, N, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
    outs = [
        engine(BACKBONES[name], tau=0.999999, rest=rest).attend(call(0), q, k, v, sdpa) for rest in ("drop", "mean")
    ]
    kept = engine(BACKBONES[name], tau=0.999999)
    kept.attend(call(0), q, k, v, sdpa)
    if kept.stats()["density"] == 1.0:
        assert torch.equal(*outs)
    assert (outs[1] - sdpa(q, k, v)).abs().max() < 0.05


def test_the_rest_as_means_is_nearer_to_dense_than_dropping_it():
    generator = torch.Generator().manual_seed(5)
    centres = torch.randn(1, H, 8, D, generator=generator)
    which = torch.randint(8, (N,), generator=generator)
    q, k, v = (2 * centres[:, :, which] + 0.3 * torch.randn(1, H, N, D, generator=generator) for _ in range(3))
    dense = sdpa(q, k, v)
    errors = {}
    for rest in ("drop", "mean"):
        out = engine(SVG2(4, 8, min_ratio=0), tau=0.05, rest=rest).attend(call(0), q, k, v, sdpa)
        errors[rest] = float((out - dense).square().sum())
    assert errors["mean"] < errors["drop"]


def test_text_is_never_approximated():
    text = Text(N - 12, 8, 4)
    q, k, v = (torch.randn(1, H, N, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
    k[:, :, : N - 12], v[:, :, : N - 12] = 0.5, 1.0  # video alone could be approximated at no cost
    mask = torch.ones(N, N, dtype=torch.bool)
    mask[: N - 4, N - 4 :] = mask[N - 4 :, : N - 4] = False
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for backbone in BACKBONES.values():
        served = engine(backbone, tau=0.2)
        out = served.attend(call(0, text=[text]), q, k, v, sdpa)
        assert (out - dense).abs().max() <= 2e-6


def test_error_rank_maps_anew_at_every_call():
    """Only labels are kept between calls; what is computed is the map of the present tokens."""
    q, k, v = (torch.randn(1, H, N, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
    backbone, generator, seen = SVG2(4, 8, rank="error"), torch.Generator().manual_seed(9), []
    served = engine(backbone, tau=0.2)
    for step, (q_now, v_now) in enumerate(((q, v), (torch.randn(q.shape, generator=generator), v * v))):
        out = served.attend(call(step), q_now, k, v_now, sdpa)
        group = next(iter(served._states.values())).groups[0]
        assert group.plan is None and group.packed.bits.untyped_storage().nbytes() == 1
        seen.append(backbone.remap(group.packed.unpack(), q_now, k, v_now, [0.2] * H))
        assert torch.allclose(out, eager.KERNEL.run(eager.KERNEL.plan(seen[-1], "mean"), q_now, k, v_now), atol=2e-6)
    assert torch.equal(seen[0].q_labels, seen[1].q_labels) and not torch.equal(seen[0].map, seen[1].map)


def test_stats_tell_cost_and_the_mass_of_what_is_approximated():
    q, k, v = (torch.randn(1, H, N, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
    served = engine(SVG2(4, 8, min_ratio=0), tau=0.1, reuse=Always())
    served.attend(call(0), q, k, v, sdpa)
    record = served.stats()["records"][0]
    assert 0 < record["density"][0][0][0] < record["cost"][0][0][0] < 1
    mass = record["rest_mass"][0][0][0]
    assert mass is None or 0 < mass < 1


def test_a_wrong_rest_is_refused():
    with pytest.raises(HeartError, match="rest is 'keep'"):
        HeartConfig(rest="keep")
