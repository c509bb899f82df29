"""δ from one dense generation: the replay against the engine itself, the curve, the choice, the command."""

import json

import pytest
import torch
import torch.nn.functional as F

from heart_attention.backbones import SVG2, XAttention
from heart_attention.config import HeartConfig
from heart_attention.errors import HeartError
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine
from heart_attention.online.reuse import TMR
from heart_attention.tuning import delta
from heart_attention.tuning.delta import CurvePoint, MaskProbe, choose, tune

H, N, D, LAYERS = 4, 96, 8, 2
X = XAttention(stride=4, block=16)
S = SVG2(q_clusters=6, k_clusters=10)


def steps(count=9, seed=0):
    g = torch.Generator().manual_seed(seed)
    base, noise = torch.randn(2, LAYERS, 3, 1, H, N, D, generator=g).unbind(0)
    pace = torch.linspace(0.05, 0.4, H).view(H, 1, 1)
    drift = torch.randn(LAYERS, 3, 1, H, 1, D, generator=g)
    return [2 * base + i * pace * (drift + noise) for i in range(count)]


def drive(handler, tensors, branches=("cond",)):
    for step, layers in enumerate(tensors):
        for branch in branches:
            for layer, (q, k, v) in enumerate(layers):
                handler.attend(
                    CallContext(layer=layer, step=step, branch=branch), q, k, v, F.scaled_dot_product_attention
                )


def probe(backbone=X, tau=0.6, dense_steps=2, **kw):
    made = MaskProbe(backbone, [[(tau,) * H] * LAYERS], dense_steps, False)
    drive(made, steps(**kw))
    return made


def test_the_probe_is_invisible_and_skips_warm_up():
    made = MaskProbe(X, [[(0.6,) * H] * LAYERS], 2, False)
    q, k, v = steps(1)[0][0]
    out = made.attend(CallContext(layer=0, step=0, branch="c"), q, k, v, F.scaled_dot_product_attention)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v)) and not made.tracks
    assert {t.steps[0] for t in probe().tracks.values()} == {2}


def test_iou_against_sets():
    track = next(iter(probe().tracks.values()))
    iou = track.iou()
    tensors = steps()[2:]
    masks = [X.predict(x[0][0], x[0][1], 0.6).blocks[0] for x in tensors]
    for h in range(H):
        for a in range(3):
            one, two = (set(map(tuple, masks[s][h].nonzero().tolist())) for s in (a, a + 2))
            assert float(iou[h, a, a + 2]) == pytest.approx(len(one & two) / len(one | two))
    assert torch.allclose(iou.diagonal(dim1=1, dim2=2), torch.ones(()))


def test_cluster_masks_are_compared_on_the_same_sampled_pairs():
    track = next(iter(probe(S).tracks.values()))
    iou = track.iou()
    assert track.entries == delta.SAMPLE[0] * delta.SAMPLE[1]
    assert torch.allclose(iou.diagonal(dim1=1, dim2=2), torch.ones(()))
    assert 0 < float(iou.min()) < 1


@pytest.mark.parametrize("policy", [TMR(delta=1.0), TMR(delta=2.5, gate=(0, 1)), TMR(relative=0.2, gate=(0.2, 0.6))])
@pytest.mark.parametrize("backbone", [X, S], ids=["xattention", "svg2"])
def test_the_replay_reuses_what_the_engine_reuses(backbone, policy):
    made = probe(backbone)
    config = HeartConfig(backbone, 0.6, policy, dense_steps=2, kernel="eager", force_sparse=True)
    engine = Engine(config, LAYERS, H)
    drive(engine, steps())
    refreshed = engine.stats()["records"][0]["refreshed"]
    for (_, layer, _, _), track in made.tracks.items():
        reused, total, alike = delta.replay(track, track.iou(), policy)
        expected = sum(1 - x for row in refreshed[layer][3:] for x in row)
        assert (reused, total) == (expected, H * 6)
        assert 0 <= alike <= reused


def test_the_curve_rises_in_reuse_and_the_choice_keeps_the_target():
    tuned = tune(probe(), target=0.8)
    reuse = [p.reuse for p in tuned.points]
    assert reuse[0] < 0.2 and reuse[-1] > 0.8
    assert tuned.point.iou >= 0.8 and tuned.delta == tuned.point.delta
    better = [p for p in tuned.points if p.iou >= 0.8 and p.reuse > tuned.point.reuse]
    assert not better
    assert tuned.policy() == TMR(delta=tuned.delta)


def test_per_layer_and_relative():
    tuned = tune(probe(), target=0.8, relative=True, per_layer=True)
    assert len(tuned.delta) == LAYERS == len(tuned.layers)
    assert all(p.iou >= 0.8 for p in tuned.layers) and tuned.point.iou >= 0.8
    policy = tuned.policy((0.3, 0.9))
    assert policy.relative == tuple(tuned.delta) and policy.gate == (0.3, 0.9)
    policy.check(LAYERS)


def test_an_unreachable_target_gives_delta_zero():
    assert choose([CurvePoint(1.0, 0.5, 0.7, 0.8)], 0.9) == CurvePoint(0.0, 0.0, 1.0, 1.0)


def test_wrong_use():
    with pytest.raises(HeartError, match="fewer than two sparse steps"):
        tune(probe(count=3), 0.9)
    with pytest.raises(HeartError, match=r"target IoU is 1\.5"):
        tune(probe(), 1.5)


QUICK = ["tune-delta", "--size", "64x64", "--frames", "4", "--steps", "8"]


def test_the_command_on_the_embedded_model(tmp_path, capsys):
    import heart_attention as heart
    from heart_attention import tiny
    from heart_attention.cli import main

    out = tmp_path / "c.json"
    assert main.main([*QUICK, "--json", "--relative", "--per-layer", "--target", "0.8", "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["delta"]) == 9 and told["iou"] >= 0.8 and len(told["curve"]) > 5
    pipe = tiny.load()
    with heart.enabled(pipe, out):
        assert heart.stats(pipe)["config"]["_data"]["reuse"]["_data"]["relative"] == told["delta"]
    assert main.main([*QUICK, "--backbone", "svg2"]) == 0
    text = capsys.readouterr().out
    assert "IoU reused" in text and "TMR(delta=" in text


def test_the_command_refuses_a_wrong_target(capsys):
    from heart_attention.cli import main

    assert main.main([*QUICK, "--target", "7"]) == 1
    assert "--target is 7.0" in capsys.readouterr().err
