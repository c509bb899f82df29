"""Operating points: groups of heads, phases by noise level, and a layer that mixes backbones."""

import pytest
import torch
import torch.nn.functional as F

from heart_attention.backbones import SVG2, XAttention
from heart_attention.config import HeartConfig, Point, PointTable
from heart_attention.errors import HeartError
from heart_attention.online import engine as engine_module
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine
from heart_attention.online.points import ModelPoints, restrict
from heart_attention.online.reuse import Always

H, N, D = 4, 64, 16
X, S = XAttention(4, 8), SVG2(4, 8)
POINTS = (Point(X, 0.5), Point(X, 0.8), Point(S, 0.4, "mean"), Point(X, 0.5, order="2x2x2"), Point(S, 1.0),
          Point(X, 0.5, order="tiles"))  # fmt: skip


def sdpa(q, k, v, items=None):
    return F.scaled_dot_product_attention(q, k, v)


def config(choice, phases=(), **more):
    table = PointTable(POINTS, choice, phases)
    return HeartConfig(reuse=Always(), dense_steps=0, force_sparse=True, points=table, **more)


def qkv(seed=0):
    return [torch.randn(1, H, N, D, generator=torch.Generator().manual_seed(seed + i)) for i in range(3)]


def test_heads_are_grouped_by_backbone_and_rest():
    points = ModelPoints(config([[[[0, 2, 1, 2]]]]), 1, 1, H)
    first, second = points.groups(0, 0, 0)
    assert first.heads == (0, 2) and first.tau == (0.5, 0.8) and first.rest == "drop"
    assert second.heads == (1, 3) and second.rest == "mean"
    assert [(spec.heads, places) for spec, places in restrict((first, second), [3, 2])] == [((2,), [1]), ((3,), [0])]


@pytest.mark.parametrize("choice", [[0, 2, 1, 2], [3, 0, 2, 1], [2, 2, 2, 2], [4, 0, 4, 2], [5, 0, 3, 5]])
def test_a_mixed_layer_gives_each_head_what_it_has_alone(choice):
    q, k, v = qkv()
    call = CallContext(layer=0, layers=1, step=0, grid=(4, 4, 4))
    mixed = Engine(config([[[choice]]]), 1, H).attend(call, q, k, v, sdpa)
    for head, index in enumerate(choice):
        point = POINTS[index]
        alone = HeartConfig(
            point.backbone, point.threshold, Always(), order=(((point.order,) * H),) if "x" in point.order else point.order,
            dense_steps=0, force_sparse=True, rest=point.rest,
        )  # fmt: skip
        expected = Engine(alone, 1, H).attend(call, q, k, v, sdpa)
        assert (mixed[:, head] - expected[:, head]).abs().max() <= 2e-6


def test_plans_of_a_mixed_layer_are_kept_or_not_as_one(monkeypatch):
    """A layer of many groups may hold no more in plans than a layer of one."""
    q, k, v = qkv()
    call = CallContext(layer=0, layers=1, step=0, grid=(4, 4, 4))
    engine = Engine(config([[[[0, 2, 0, 2]]]]), 1, H)
    want = engine.attend(call, q, k, v, sdpa)
    (state,) = engine._states.values()
    first, second = (2 * group.plan.nbytes for group in state.groups)
    assert first and second
    for limit, kept in ((first + second, True), (first + second - 1, False)):  # each of them alone would fit
        monkeypatch.setattr(engine_module, "PLAN_BYTES", limit)
        engine = Engine(config([[[[0, 2, 0, 2]]]]), 1, H)
        assert torch.equal(engine.attend(call, q, k, v, sdpa), want)
        assert (engine.memory()["plans"] > 0) == kept


def test_a_phase_changes_at_its_noise_level_and_its_heads_refresh():
    engine = Engine(config([[[[0] * H], [[2] * H]]], phases=(0.5,)), 1, H)
    q, k, v = qkv()
    for step, sigma in enumerate((0.9, 0.5, 0.1)):
        engine.attend(CallContext(layer=0, layers=1, step=step, sigma=sigma), q, k, v, sdpa)
    record = engine.stats()["records"][0]
    cost, density = record["cost"][0], record["density"][0]
    assert cost[0] == density[0] and cost[1][0] > density[1][0] and cost[1] == cost[2]
    assert record["refreshed"][0][1] == [1.0] * H


@pytest.mark.parametrize("point", [1, 3])
def test_a_phase_that_changes_a_threshold_or_an_order_alone_is_taken(point):
    q, k, v = qkv()
    calls = [
        CallContext(layer=0, layers=1, step=step, sigma=sigma, grid=(4, 4, 4)) for step, sigma in ((0, 0.9), (1, 0.1))
    ]
    changing = Engine(config([[[[0] * H], [[point] * H]]], phases=(0.5,)), 1, H)
    first, second = (changing.attend(call, q, k, v, sdpa) for call in calls)
    expected = Engine(config([[[[point] * H]]]), 1, H).attend(calls[1], q, k, v, sdpa)
    assert torch.equal(second, expected) and not torch.equal(first, expected)


@pytest.mark.parametrize("arguments, says", [
    (((), [[[[0]]]]), "give \\[transformers\\]"),
    ((POINTS, [[[[9]]]]), "chooses point 9 of 6"),
    ((POINTS, [[[[0]]]], (0.5,)), "1 boundaries for 1 phases"),
    ((POINTS, [[[[0]], [[0]], [[0]]]], (0.2, 0.5)), "descending"),
    ((POINTS, [[[[0], [0, 1]]]]), "ragged"),
    ((POINTS, [[[["x"]]]]), "whole numbers"),
])  # fmt: skip
def test_wrong_tables_are_refused(arguments, says):
    with pytest.raises(HeartError, match=says):
        PointTable(*arguments)


def test_points_survive_json():
    chosen = config([[[[0, 2, 1, 3]]]])
    assert HeartConfig.from_dict(chosen.to_dict()) == chosen


def test_points_of_another_model_are_refused():
    with pytest.raises(HeartError, match="calibrate this model"):
        Engine(config([[[[0, 1]]]]), 1, H)
