"""Isolated probes: from cached block inputs they equal full forwards bit for bit, and no mask is run twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models_for_tests import hunyuan_context, hunyuan_transformer, wan_context, wan_transformer

from heart_attention.backbones import SVG2, XAttention
from heart_attention.calibration.measure import candidates, probes, velocity_error
from heart_attention.calibration.measure.candidates import DENSE, Spec
from heart_attention.calibration.measure.replay import Replay
from heart_attention.errors import HeartError

BACKBONES = {"xattention": XAttention(stride=4, block=8), "svg2": SVG2(6, 10, init_iters=10)}
FAMILIES = {"wan": (wan_transformer, wan_context), "hunyuan": (hunyuan_transformer, hunyuan_context)}


def _all(replay):
    return {layer: [0, 1] for layer in range(len(replay.layers))}


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("family", FAMILIES)
def test_probes_equal_full_forwards_bit_for_bit(family, backbone):
    make, context_of = FAMILIES[family]
    model = make()
    context, spec = context_of(model), Spec(BACKBONES[backbone], (0.5, 0.7, 0.9))
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
    context, spec = wan_context(model, guidance=None), Spec(BACKBONES["xattention"], (0.7,))
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
    spec = Spec(BACKBONES["xattention"], (0.5, 0.5000001, 0.7, 0.9999999, 1.0))
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
                Spec(BACKBONES["xattention"], (0.5,)),
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
    context, spec = wan_context(model), Spec(BACKBONES["xattention"], (0.5,))
    with Replay(model) as replay:
        by = {
            m.name: next(probes.probe(replay, context, {0: [1]}, spec, m))[1]["heads"]["1"]
            for m in (velocity_error.AttentionOutput(), velocity_error.VelocityMSE(), Louder())
        }
    assert by["attention"]["error"] == by["mse"]["attention"]
    assert by["louder"]["error"][0] == pytest.approx(10 * by["mse"]["error"][0])
    assert by["mse"]["error"][0] == pytest.approx(sum(by["mse"]["bands"][0]))


def test_svg2_candidates_share_one_clustering(monkeypatch):
    from heart_attention.backbones import svg2

    runs = []
    original = svg2.lloyd_heads

    def counted(tokens, *rest):
        runs.extend(tokens)
        return original(tokens, *rest)

    monkeypatch.setattr(svg2, "lloyd_heads", counted)
    q, k = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    masks, full = BACKBONES["svg2"].predict_many(q, k, (0.3, 0.6, 0.9), key=(1, "cond", 0))
    assert len(runs) == 4  # queries and keys of two heads
    for tau, mask in zip((0.3, 0.6, 0.9), masks):
        alone = BACKBONES["svg2"].predict(q, k, tau, key=(1, "cond", 0))
        assert torch.equal(mask.map, alone.map) and torch.equal(mask.q_labels, alone.q_labels)
    assert full.density().min() == 1


@pytest.mark.parametrize("order", ["raster", "tiles"])
def test_xattention_candidates_equal_single_predictions(order):
    from heart_attention.token_order import tile_order

    x, q, k = BACKBONES["xattention"], torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    permutation = tile_order((4, 4, 4), 8) if order == "tiles" else None
    masks, _ = x.predict_many(q, k, (0.3, 0.9), order=permutation, key=(0, "cond", 0))
    for tau, mask in zip((0.3, 0.9), masks):
        assert torch.equal(mask.blocks, x.predict(q, k, tau, order=permutation).blocks)


def test_candidates_in_an_order_for_every_head():
    from heart_attention.online.call import CallContext
    from heart_attention.token_order import tile_order_of

    x, taus, row = BACKBONES["xattention"], (0.3, 0.9), ("2x4x1", "raster", "1x2x4", "2x4x1")
    q, k, v = torch.randn(3, 1, 4, 64, 16)
    spec = candidates.Spec(x, taus, order=(("raster",) * 4, row))
    call = candidates.Trials(
        spec, CallContext(layer=1, layers=2, step=0, branch="cond", grid=(4, 4, 4)), "cond", q, k, v
    )
    masks, full = call.masks[0]
    assert full.density().min() == 1
    outs = [call.run(range(4), c) for c in (0, 1)]
    for h, name in enumerate(row):
        order = None if name == "raster" else tile_order_of((4, 4, 4), tuple(map(int, name.split("x"))))
        for c, tau in enumerate(taus):
            alone = x.predict(q[:, h : h + 1], k[:, h : h + 1], tau, order=order)
            assert torch.equal(masks[c].dense_tokens()[:, h : h + 1], alone.dense_tokens())
            want = F.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h], attn_mask=alone.dense_tokens()[:, 0])
            torch.testing.assert_close(outs[c][:, h], want, atol=5e-6, rtol=0)
    for n, out in enumerate(call.climb()):
        torch.testing.assert_close(out, outs[n], atol=5e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_from_any_block_give_the_models_output(family):
    make, context_of = FAMILIES[family]
    model = make()
    branch = context_of(model).branches[0]
    before = {n: type(m).forward for n, m in model.named_modules()}
    with torch.no_grad(), Replay(model) as replay:
        output, streams = replay.forward_recorded(branch.inputs)
        assert torch.equal(output, branch.output) and len(streams) == replay.blocks(branch.inputs) == 4 - (
            family == "wan"
        )
        stream = ()
        for block in range(len(streams)):
            assert all(torch.equal(a, b) for a, b in zip(stream, streams[block], strict=True))
            assert torch.equal(replay.finish(branch.inputs, block, streams[block]), output)
            stream = replay.advance(branch.inputs, block, streams[block])
        assert torch.equal(stream[0], output)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert {n: type(m).forward for n, m in model.named_modules()} == before


def test_a_model_without_blocks_is_refused():
    from heart_attention.calibration.measure.replay import block_path

    with pytest.raises(HeartError, match="lies in no list of blocks"):
        block_path(torch.nn.Sequential(), "training")
