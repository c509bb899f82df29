"""Isolated probes: from cached block inputs they equal full forwards bit for bit, and no mask is run twice."""

from __future__ import annotations

import pytest
from models_for_tests import hunyuan_context, hunyuan_transformer, wan_context, wan_transformer

from heart_attention.backbones import SVG2, XAttention
from heart_attention.calibration.measure import probes, velocity_error
from heart_attention.calibration.measure.candidates import DENSE, Spec
from heart_attention.calibration.measure.replay import Replay
from heart_attention.calibration.points import points_of

BACKBONES = {"xattention": XAttention(stride=4, block=8), "svg2": SVG2(6, 10, init_iters=10)}
FAMILIES = {"wan": (wan_transformer, wan_context), "hunyuan": (hunyuan_transformer, hunyuan_context)}


def _all(replay):
    return {layer: [0, 1] for layer in range(len(replay.layers))}


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("family", FAMILIES)
def test_probes_equal_full_forwards_bit_for_bit(family, backbone):
    make, context_of = FAMILIES[family]
    model = make()
    context, spec = context_of(model), Spec.of(BACKBONES[backbone], (0.5, 0.7, 0.9))
    with Replay(model) as replay:
        for layer, record in probes.probe(replay, context, _all(replay), spec, velocity_error.Spectral()):
            for head in (0, 1):
                found = record["heads"][str(head)]
                for k in range(3):
                    pick = {layer: [k if h == head else DENSE for h in range(2)]}
                    velocity = probes.full_forward(replay, context, spec, pick)
                    assert found["error"][k] == velocity_error.spectral(velocity, context.reference()) > 0
                    assert found["bands"][k] == velocity_error.bands(velocity, context.reference()).tolist()
                assert found["sparsity"] == sorted(found["sparsity"], reverse=True)


def test_only_the_layers_from_the_probed_one_on_are_run():
    model = wan_transformer(layers=4)
    context, spec = wan_context(model, guidance=None), Spec.of(BACKBONES["xattention"], (0.7,))
    calls = []
    for i, block in enumerate(model.blocks):
        block.ffn.register_forward_hook(lambda *_, i=i: calls.append(i))
    with Replay(model) as replay:
        replay.analysis(context.branches[0].inputs)
        calls.clear()
        list(probes.probe(replay, context, {2: [0]}, spec, velocity_error.Spectral(), null=False))
    assert calls == [0, 1, 2, 2, 3]  # one dense pass up to the layer, then the probe from there


def test_equal_masks_are_measured_once_and_all_ones_cost_nothing():
    model = wan_transformer(layers=1)
    context = wan_context(model, guidance=None)
    spec = Spec.of(BACKBONES["xattention"], (0.5, 0.5000001, 0.7, 0.9999999, 1.0))
    with Replay(model) as replay:
        ((_, record),) = probes.probe(replay, context, {0: [0]}, spec, velocity_error.Spectral())
    found = record["heads"]["0"]
    assert found["error"][0] == found["error"][1] > found["error"][2]
    assert found["error"][3:] == [0.0, 0.0] and found["sparsity"][3:] == [0.0, 0.0]
    assert found["runs"] == 2


def test_the_null_probe_tells_the_floor_once_a_context():
    model = wan_transformer(layers=2)
    with Replay(model) as replay:
        found = dict(
            probes.probe(
                replay,
                wan_context(model),
                _all(replay),
                Spec.of(BACKBONES["xattention"], (0.5,)),
                velocity_error.Spectral(),
            )
        )
    assert "null" not in found[1] and found[0]["null"]["layer"] == 0
    assert found[0]["null"]["error"] < 1e-9 < min(found[0]["heads"]["0"]["error"])


def test_errors_on_the_attention_output_and_of_ones_own():
    class Louder:
        name, on = "louder", "velocity"

        def measure(self, velocity, reference):
            return 10 * velocity_error.velocity_mse(velocity, reference)

    model = wan_transformer(layers=1)
    context, spec = wan_context(model), Spec.of(BACKBONES["xattention"], (0.5,))
    with Replay(model) as replay:
        by = {
            m.name: next(probes.probe(replay, context, {0: [1]}, spec, m))[1]["heads"]["1"]
            for m in (velocity_error.AttentionOutput(), velocity_error.VelocityMSE(), Louder())
        }
    assert by["attention"]["error"] == by["mse"]["attention"]
    assert by["louder"]["error"][0] == pytest.approx(10 * by["mse"]["error"][0])
    assert by["mse"]["error"][0] == pytest.approx(sum(by["mse"]["bands"][0]))


def test_a_probe_of_one_head_clusters_only_that_head(monkeypatch):
    from heart_attention.backbones import svg2

    runs, original = [], svg2.lloyd_heads

    def counted(tokens, *rest):
        runs.extend(tokens)
        return original(tokens, *rest)

    monkeypatch.setattr(svg2, "lloyd_heads", counted)
    model = wan_transformer(layers=2)
    context, spec = wan_context(model), Spec.of(BACKBONES["svg2"], (0.5, 0.9))
    with Replay(model) as replay:
        alone = dict(probes.probe(replay, context, {1: [1]}, spec, velocity_error.Spectral(), null=True))
        assert len(runs) == 2 * 2  # queries and keys of one head, two branches
        together = dict(probes.probe(replay, context, {0: [0], 1: [0, 1]}, spec, velocity_error.Spectral(), null=False))
    assert alone[1]["heads"]["1"] == together[1]["heads"]["1"]  # whichever heads are looked at


def test_points_of_several_kinds_are_probed_together():
    model = wan_transformer(layers=2)
    points = (
        *points_of(BACKBONES["xattention"], (0.5, 0.9)),
        *points_of(BACKBONES["svg2"], (0.5,)),
        *points_of(BACKBONES["svg2"], (0.5,), rest="mean"),
    )
    context = wan_context(model)
    with Replay(model) as replay:
        mixed = dict(probes.probe(replay, context, {0: [1]}, Spec(points), velocity_error.Spectral()))[0]["heads"]["1"]
        for k, point in enumerate(points):
            (single,) = (
                record["heads"]["1"]
                for _, record in probes.probe(replay, context, {0: [1]}, Spec((point,)), velocity_error.Spectral())
            )
            assert all(
                mixed[name][k] == single[name][0] for name in ("error", "sparsity", "cost", "bands", "attention")
            )
    assert mixed["runs"] == 4 and mixed["cost"][3] > mixed["cost"][2] == pytest.approx(1 - mixed["sparsity"][2])
    assert mixed["sparsity"][2] == mixed["sparsity"][3] and mixed["attention"][3] < mixed["attention"][2]
