"""SVG2's clusters cut into equal groups: blocks in an order of their own for queries and for keys of every head."""

import pytest
import torch
import torch.nn.functional as F

from heart_attention import kernels
from heart_attention.backbones import EAR, SVG2
from heart_attention.backbones.base import Backbone
from heart_attention.backbones.cluster_walk import walk
from heart_attention.config import HeartConfig
from heart_attention.errors import HeartError
from heart_attention.kernels import cpu, eager, gather
from heart_attention.masks import GroupMask, Text
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine
from heart_attention.online.reuse import Interval

H, N, D, GROUP = 2, 100, 16, 16


def backbone(rank="error", **more):
    return SVG2(6, 10, min_ratio=0.0, init_iters=3, rank=rank, equal_groups=GROUP, **more)


def qkv(n=N, batch=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, n, H, D, generator=g).transpose(1, 2) for _ in range(3)]


@pytest.mark.parametrize("rank", ["mass", "error"])
def test_groups_are_equal_and_follow_the_clusters(rank):
    q, k, v = qkv()
    mask = backbone(rank).predict(q, k, 0.3, v=v)
    assert isinstance(mask, GroupMask) and mask.block_shape == (GROUP, GROUP)
    for labels, sizes in zip((mask.q_labels, mask.k_labels), mask.sizes()):
        for h in range(H):
            assert labels[0, h].long().bincount().tolist() == sizes[0, h].tolist() == [GROUP] * 6 + [4]
    plain = SVG2(6, 10, min_ratio=0.0, init_iters=3, rank=rank).predict(q, k, 0.3, v=v)
    for h in range(H):  # a cluster is one stretch of the sorted tokens
        order, cluster = mask.layout().q_perm[0, h].long(), plain.q_labels[0, h]
        first = [int(mask.q_labels[0, h][cluster == c].min()) for c in cluster.unique()]
        last = [int(mask.q_labels[0, h][cluster == c].max()) for c in cluster.unique()]
        within = sorted(zip(first, last))
        assert all(a[1] <= b[0] for a, b in zip(within, within[1:]))
        assert order.sort().values.tolist() == list(range(N))
    density = mask.density()
    assert bool((density < 0.6).all()) and bool((density > 0.1).all())


@pytest.mark.parametrize("text", [None, Text(80, 12, 8), Text(0, 10, 0)])
@pytest.mark.parametrize("kernel", [eager.KERNEL, cpu.KERNEL, gather.KERNEL])
def test_all_kept_is_dense(text, kernel):
    q, k, v = qkv()
    mask = backbone().predict(q, k, 1.0, v=v, text=text)
    used = N - (text.unused if text else 0)
    want = F.scaled_dot_product_attention(*(x[:, :, :used] for x in (q, k, v)))
    for rest in ("drop", "mean"):
        got = kernel.run(kernel.plan(mask, rest), q, k, v)
        assert (got[:, :, :used] - want).abs().max() <= 2e-6


@pytest.mark.parametrize("rest", ["drop", "mean"])
@pytest.mark.parametrize("text", [None, Text(80, 12, 8)])
@pytest.mark.parametrize("kernel", [cpu.KERNEL, gather.KERNEL])
def test_kernels_agree_with_the_definition(rest, text, kernel):
    q, k, v = qkv(batch=2)
    mask = backbone().predict(q, k, [0.2, 0.5], v=v, text=text)
    want, share, other = eager.KERNEL.run(eager.KERNEL.plan(mask, rest), q, k, v), torch.empty(2, H), torch.empty(2, H)
    assert (kernels.run(kernel.plan(mask, rest), q, k, v, mass=share) - want).abs().max() <= 2e-6
    kernels.run(eager.KERNEL.plan(mask, rest), q, k, v, mass=other)
    assert (share - other).abs().max() <= 1e-6
    if rest == "drop":  # and the definition with attention under the mask of tokens: everything is back in its place
        plain = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense_tokens())
        assert (want - plain).abs().max() <= 2e-6


def test_equal_keys_and_values_inside_groups_cost_nothing():
    q, k, v = qkv()
    mask = backbone().predict(q, k, 0.2, v=v)
    groups = mask.k_labels.long()[..., None].expand(-1, -1, -1, D)
    same = [x[:, :, :7].gather(2, groups) for x in (k, v)]
    got = eager.KERNEL.run(eager.KERNEL.plan(mask, "mean"), q, *same)
    assert (got - F.scaled_dot_product_attention(q, *same)).abs().max() <= 2e-6


def test_the_prompt_is_linked_with_everything():
    text = Text(80, 12, 8)
    q, k, v = qkv()
    mask = backbone("mass").predict(q, k, 0.1, v=v, text=text)
    tokens = mask.dense_tokens()
    assert tokens[:, :, 80:92, :92].all() and tokens[:, :, :92, 80:92].all()
    assert not tokens[:, :, 92:, :92].any() and not tokens[:, :, :92, 92:].any()


def test_many_thresholds_are_those_of_one_by_one():
    q, k, v = qkv()
    masks, full = backbone().predict_many(q, k, [0.1, 0.4], v=v)
    assert full.map.all() and masks[0].density().sum() < masks[1].density().sum()
    for mask, tau in zip(masks, (0.1, 0.4)):
        one = backbone().predict(q, k, tau, v=v)
        assert torch.equal(one.map, mask.map) and torch.equal(one.q_labels, mask.q_labels)


def test_the_engine_ranks_groups_anew_on_old_labels():
    config = HeartConfig(backbone(), 0.2, Interval(10), dense_steps=0, force_sparse=True, rest="mean", kernel="eager")
    served = Engine(config, 1, H)
    maps = []
    for step in range(2):
        q, k, v = qkv(seed=step)
        out = served.attend(
            CallContext(layer=0, layers=1, step=step, branch="c"), q, k, v, F.scaled_dot_product_attention
        )
        group = next(iter(served._states.values())).groups[0]
        mask = group.backbone.remap(group.packed.unpack(), q, k, v, [0.2] * H)  # what is kept is not stored
        assert torch.allclose(out, eager.KERNEL.run(eager.KERNEL.plan(mask, "mean"), q, k, v), atol=2e-6)
        maps.append(mask)
    assert torch.equal(maps[0].q_labels, maps[1].q_labels) and not torch.equal(maps[0].map, maps[1].map)


def test_heads_that_stay_dense_stand_beside_them():
    q, k, v = qkv()
    mask = backbone().predict(q, k, 0.2, v=v)
    whole = mask.full_like(1, H, None)
    mixed = mask.put([0], whole.heads([0]))
    got = cpu.KERNEL.run(cpu.KERNEL.plan(mixed), q, k, v)
    assert (got[:, 0] - F.scaled_dot_product_attention(q, k, v)[:, 0]).abs().max() <= 2e-6


def test_a_walk_visits_near_points_in_turn():
    line = torch.randn(2, 3, 37, 1, generator=torch.Generator().manual_seed(1)) * torch.ones(5)
    places = walk(line)
    assert torch.equal(places.sort(-1).values, torch.arange(37).expand(2, 3, 37))
    along = line[..., 0].gather(-1, places.argsort(-1))
    steps = along.diff().abs().sum(-1)
    assert (steps <= 4 * (along.max(-1).values - along.min(-1).values)).all()


def test_settings_there_and_back():
    made = backbone()
    assert Backbone.from_dict.__func__(SVG2, made.to_dict()) == made and made.to_dict()["equal_groups"] == GROUP
    assert "equal_groups" not in SVG2().to_dict() and SVG2.from_dict(SVG2().to_dict()) == SVG2()
    for wrong in (0, -1, "64", True):
        with pytest.raises(HeartError, match="equal_groups"):
            SVG2(equal_groups=wrong)
    with pytest.raises(HeartError, match="equal_groups=64"):
        EAR(equal_groups=64)
    with pytest.raises(HeartError, match="only at the end"):
        q, k, v = qkv()
        backbone().predict(q, k, 0.3, v=v, text=Text(0, 10, 4))
