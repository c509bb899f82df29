"""Gradients against twins: autograd through plain masked attention, exact probes, and counted memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models_for_tests import hunyuan_context, hunyuan_transformer, plain_attention, wan_context, wan_transformer
from scipy.stats import spearmanr

from heart_attention.backbones import SVG2, XAttention
from heart_attention.calibration.measure import gradient, probes, velocity_error
from heart_attention.calibration.measure.candidates import DENSE, Spec, Trials
from heart_attention.calibration.measure.replay import Replay
from heart_attention.calibration.points import points_of
from heart_attention.errors import HeartError

BACKBONES = {"xattention": XAttention(stride=4, block=8), "svg2": SVG2(6, 10, init_iters=10)}
TAUS = (0.5, 0.7, 0.9)
FAMILIES = {"wan": (wan_transformer, wan_context), "hunyuan": (hunyuan_transformer, hunyuan_context)}


def _twin(replay, context, spec, choice):
    """m by autograd through the whole model with plain masked attention and a zero leaf a layer."""
    leaves, deltas, outputs = {}, {}, []
    for branch in context.branches:

        def serve(call, q, k, v, dense, name=branch.name):
            trials = Trials(spec, call, name, q, k, v)
            out = torch.zeros_like(q)
            for part in trials.parts(0, choice[call.layer]):
                out[:, part.heads] = plain_attention(part.mask, part.rest, *(x[:, part.heads] for x in (q, k, v)))
            leaf = leaves[name, call.layer] = torch.zeros_like(out, requires_grad=True)
            heads = range(out.shape[1])
            deltas[name, call.layer] = [trials.run(heads, c) - out.detach() for c in range(len(spec.points))]
            return out + leaf

        with torch.enable_grad(), replay.handler.serving(serve):
            outputs.append(replay.forward(branch.inputs))
    epsilon, reference = context.combine(outputs) - context.reference(), context.reference()
    e = (epsilon * velocity_error.apply_weight(epsilon)).sum() / velocity_error.denominator(reference)
    grads = dict(zip(leaves, torch.autograd.grad(e, list(leaves.values()))))
    m = np.zeros((len(choice), 2, len(spec.points)))
    for (name, layer), g in grads.items():
        for c, delta in enumerate(deltas[name, layer]):
            m[layer, :, c] += (g * delta).sum((0, 2, 3)).numpy()
    return float(e.detach()), m


SPECS = {name: Spec.of(backbone, TAUS) for name, backbone in BACKBONES.items()}
SPECS["svg2, rest"] = Spec.of(BACKBONES["svg2"], TAUS, rest="mean")
SPECS["xattention, rest"] = Spec.of(BACKBONES["xattention"], TAUS, rest="mean")
SPECS["mixed"] = Spec(
    (
        *points_of(BACKBONES["xattention"], (0.5,)),
        *points_of(BACKBONES["svg2"], (0.3, 0.7), rest="mean"),
        *points_of(BACKBONES["svg2"], (0.7,)),
        *points_of(BACKBONES["xattention"], (0.7,), rest="mean", order="tiles"),
    )
)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_first_order_terms_equal_autograd_through_the_model(family, kind):
    make, context_of = FAMILIES[family]
    model = make()
    context, spec = context_of(model), SPECS[kind]
    with Replay(model) as replay:
        choice = [[1, 2] if layer % 2 else [2, 1] for layer in range(len(replay.layers))]
        found = gradient.differentiate(replay, context, spec, choice, velocity_error.Spectral(), seed=0)
        e, m = _twin(replay, context, spec, choice)
        plain = probes.full_forward(replay, context, spec, dict(enumerate(choice)))
        verified = gradient.verify(replay, context, spec, choice, velocity_error.Spectral())
    assert found.error == verified["error"] == velocity_error.spectral(plain, context.reference())
    assert found.error == pytest.approx(e, rel=1e-5)
    assert np.abs(found.first - m).max() < 1e-5 * np.abs(m).max()
    assert np.array_equal(found.realised, np.asarray(verified["sparsity"]))
    for layer, row in enumerate(choice):  # where a head is, nothing changes
        assert all(found.first[layer, h, c] == 0 == found.second[layer, h, c] for h, c in enumerate(row))


def test_first_order_terms_predict_small_moves():
    """With δ scaled down the true change of the joint error approaches m."""
    model = wan_transformer(layers=2)
    context, spec, choice = wan_context(model), Spec.of(BACKBONES["xattention"], TAUS), [[1, 1], [1, 1]]
    with Replay(model) as replay:
        found = gradient.differentiate(replay, context, spec, choice, velocity_error.Spectral(), seed=0)
        step, outputs = 1e-2, []
        for branch in context.branches:

            def serve(call, q, k, v, dense, name=branch.name):
                trials = Trials(spec, call, name, q, k, v)
                out = trials.mixed(choice[call.layer], None)
                if call.layer == 0:
                    out = out + step * (trials.mixed([1, 2], None) - out)
                return out

            with torch.no_grad(), replay.handler.serving(serve):
                outputs.append(replay.forward(branch.inputs))
    change = velocity_error.spectral(context.combine(outputs), context.reference()) - found.error
    assert change / step == pytest.approx(found.first[0, 1, 2], rel=0.05)


def test_isolated_estimates_rank_heads_as_exact_probes_do():
    model = wan_transformer(layers=3, heads=4)
    context, spec = wan_context(model), Spec.of(BACKBONES["xattention"], TAUS)
    dense = [[DENSE] * 4] * 3
    with Replay(model) as replay:
        passes = [
            gradient.differentiate(replay, context, spec, dense, velocity_error.Spectral(), 0, draw)
            for draw in range(12)
        ]
        exact = np.zeros((3, 4, 3))
        for layer, record in probes.probe(
            replay, context, {n: range(4) for n in range(3)}, spec, velocity_error.Spectral()
        ):
            exact[layer] = [record["heads"][str(h)]["error"] for h in range(4)]
            sparsity = [record["heads"][str(h)]["sparsity"] for h in range(4)]
            assert np.array_equal(passes[0].sparsity[layer], np.asarray(sparsity))
    estimate = np.mean([p.second for p in passes], axis=0)
    assert spearmanr(estimate.ravel(), exact.ravel()).statistic > 0.9
    assert not passes[0].first.any() and not passes[0].realised.any()
    assert not np.array_equal(passes[0].second, passes[1].second)


def test_candidates_with_equal_masks_get_equal_terms():
    model = wan_transformer(layers=1)
    spec = Spec.of(BACKBONES["xattention"], (0.5, 0.5000001, 0.7, 0.9999999, 1.0))
    with Replay(model) as replay:
        found = gradient.differentiate(replay, wan_context(model), spec, [[2, 0]], velocity_error.Spectral(), 0)
    for table in (found.first, found.second):
        assert table[0, 0, 0] == table[0, 0, 1] != 0 and table[0, 0, 3] == table[0, 0, 4] != 0
        assert table[0, 0, 2] == 0 and table[0, 1, 0] == table[0, 1, 1] == 0


def _peak_of_saved(layers: int) -> int:
    """Bytes that autograd holds at its fullest during one `differentiate`."""
    held, peak = [0], [0]

    class Box:
        def __init__(self, tensor):
            self.tensor, self.size = tensor.detach(), tensor.numel() * tensor.element_size()
            held[0] += self.size
            peak[0] = max(peak[0], held[0])

        def __del__(self):
            held[0] -= self.size

    model = wan_transformer(layers=layers)
    context, spec = wan_context(model, guidance=None), Spec.of(BACKBONES["xattention"], TAUS)
    with Replay(model) as replay, torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        gradient.differentiate(replay, context, spec, [[1, 1]] * layers, velocity_error.Spectral(), 0)
    return peak[0]


def test_memory_is_that_of_one_block_not_of_all():
    assert _peak_of_saved(6) == _peak_of_saved(2) > 0


def test_self_terms_add_squares_of_tokens_after_the_branches():
    a, b = torch.randn(2, gradient.NOISES, 3, 4, 5).unbind(0)  # [R, K, H, N]
    expected = (a + b).double().square().sum(-1).mean(0).T
    np.testing.assert_allclose(gradient._mean_square([a, b]), expected.numpy(), rtol=1e-6)
    assert gradient._mean_square([a]).shape == (4, 3)


def test_an_error_that_is_no_quadratic_form_is_refused():
    model = wan_transformer(layers=1)
    with Replay(model) as replay, pytest.raises(HeartError, match="not a quadratic form"):
        gradient.differentiate(
            replay,
            wan_context(model),
            Spec.of(BACKBONES["xattention"], TAUS),
            [[1, 1]],
            velocity_error.AttentionOutput(),
            0,
        )


def test_a_pass_goes_through_json():
    table = np.arange(6.0).reshape(1, 2, 3)
    made = gradient.Pass(0.5, [0.1, 0.2, 0.1, 0.1], table / 10, table / 9, table[..., 0], table, table * 2)
    again = gradient.Pass.from_dict(made.to_dict())
    assert again.to_dict() == made.to_dict() and again.second.dtype == np.float64
