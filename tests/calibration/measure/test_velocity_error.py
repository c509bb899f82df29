"""The spectral error against its literal FFT definition, and the laws it must obey."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.calibration.measure import velocity_error
from heart_attention.errors import HeartError

sizes = st.integers(1, 13)


def literal_bands(velocity, reference):
    """The definition word for word: FFT, fftshift, |index - n//2| ≤ n//4."""
    axes = (2, 3, 4)
    y = np.asarray(reference, dtype=np.float64)
    spectrum = np.abs(np.fft.fftshift(np.fft.fftn(np.asarray(velocity, np.float64) - y, axes=axes), axes=axes)) ** 2
    t, h, w = (np.abs(np.arange(n) - n // 2) <= n // 4 for n in y.shape[2:])
    low_t = t[:, None, None] & np.ones_like(spectrum[0, 0], bool)
    low_s = (h[:, None] & w[None, :])[None] & np.ones_like(low_t)
    total = (np.abs(np.fft.fftn(y, axes=axes)) ** 2).sum() + 1e-10
    masks = (low_t & low_s, low_t & ~low_s, ~low_t & low_s, ~low_t & ~low_s)
    return np.array([spectrum[:, :, m].sum() / total for m in masks])


def pair(shape, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.standard_normal(shape)
    return y + 0.1 * rng.standard_normal(shape), y


@settings(max_examples=examples(80), deadline=None)
@given(st.tuples(st.integers(1, 2), st.integers(1, 3), sizes, sizes, sizes), st.integers(0, 10**6))
def test_bands_equal_the_literal_definition(shape, seed):
    v, y = pair(shape, seed)
    expected = literal_bands(v, y)
    np.testing.assert_allclose(velocity_error.bands(v, y), expected, rtol=1e-12, atol=1e-15 * expected.sum())


@pytest.mark.parametrize("shape", [(1, 16, 21, 60, 104), (1, 3, 1, 16, 20), (2, 4, 5, 8, 7)])
@pytest.mark.parametrize("weights", [velocity_error.WEIGHTS, (0.3, 2.0, 0.7, 0.1), (0, 0, 1, 0)])
def test_spectral_at_video_sizes_and_other_weights(shape, weights):
    v, y = pair(shape)
    assert velocity_error.spectral(v, y, weights) == pytest.approx(np.dot(weights, literal_bands(v, y)), rel=1e-12)


def test_a_single_frame_is_all_temporally_low():
    v, y = pair((1, 2, 1, 9, 8))
    assert velocity_error.bands(v, y)[2:].max() < 1e-15


@given(st.integers(1, 200))
def test_the_low_set_is_symmetric_so_that_the_projection_is_real(n):
    frequencies = np.arange(n) - n // 2
    low = frequencies[np.abs(np.arange(n) - n // 2) <= n // 4]
    assert set(low) == set(-low)
    basis = velocity_error.low_basis(n).numpy()
    assert basis.shape[1] == len(low)
    np.testing.assert_allclose(basis.T @ basis, np.eye(len(low)), atol=1e-13)


def test_all_weights_one_is_the_relative_mse():
    v, y = pair((2, 3, 5, 6, 7))
    mse = ((v - y) ** 2).sum() / (y**2).sum()
    assert velocity_error.spectral(v, y, (1, 1, 1, 1)) == pytest.approx(mse, rel=1e-12)
    assert velocity_error.velocity_mse(v, y) == pytest.approx(mse, rel=1e-12)


def test_equal_tensors_have_error_zero_and_zero_reference_is_allowed():
    _, y = pair((1, 2, 4, 4, 4))
    assert velocity_error.spectral(y, y) == 0.0
    zero = np.zeros((1, 1, 2, 2, 2))
    assert velocity_error.spectral(zero, zero) == 0.0
    assert velocity_error.velocity_mse(zero + 1, zero) == pytest.approx(literal_bands(zero + 1, zero).sum(), rel=1e-12)


def test_scale_does_not_matter():
    v, y = pair((1, 2, 4, 6, 6))
    assert velocity_error.spectral(1e4 * v, 1e4 * y) == pytest.approx(velocity_error.spectral(v, y), rel=1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 2), sizes, sizes, sizes),
    st.tuples(*[st.floats(0, 2)] * 4),
    st.integers(0, 10**6),
)
def test_apply_weight_is_the_quadratic_form(shape, weights, seed):
    x = torch.from_numpy(pair(shape, seed)[0])
    expected = np.dot(weights, velocity_error.band_energies(x))
    form = float((x * velocity_error.apply_weight(x, weights)).sum())
    assert form == pytest.approx(expected, rel=1e-11, abs=1e-13 * float(x.square().sum()))
    half = velocity_error.apply_sqrt(x, weights)
    assert float(half.square().sum()) == pytest.approx(expected, rel=1e-11, abs=1e-13 * float(x.square().sum()))
    torch.testing.assert_close(
        velocity_error.apply_sqrt(half, weights), velocity_error.apply_weight(x, weights), rtol=1e-10, atol=1e-11
    )


def test_apply_weight_is_half_the_gradient_of_the_error():
    x = torch.randn(1, 2, 5, 6, 7, dtype=torch.float64, requires_grad=True)
    form = (x * velocity_error.apply_weight(x)).sum()
    (gradient,) = torch.autograd.grad(form, x)
    torch.testing.assert_close(gradient, 2 * velocity_error.apply_weight(x.detach()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_summed_in_double(dtype):
    v, y = (torch.from_numpy(a).to(dtype) for a in pair((1, 4, 5, 8, 8)))
    assert velocity_error.spectral(v, y) == pytest.approx(
        np.dot(velocity_error.WEIGHTS, literal_bands(v.double(), y.double())), rel=1e-12
    )
    assert velocity_error.apply_weight(v).dtype == dtype


def test_attention_output_error():
    o, r = torch.randn(1, 8, 4), torch.randn(1, 8, 4)
    assert velocity_error.attention_output(o, r) == pytest.approx(
        float((o - r).square().sum() / r.square().sum()), rel=1e-5
    )
    with pytest.raises(HeartError, match="must be equal"):
        velocity_error.attention_output(o, r[:, :4])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_inputs_are_refused(bad):
    v, y = pair((1, 1, 2, 2, 2))
    v[0, 0, 0, 0, 0] = bad
    for measure in (velocity_error.spectral, velocity_error.velocity_mse, velocity_error.attention_output):
        with pytest.raises(HeartError, match="not a finite number"):
            measure(v, y)


def test_bad_shapes_and_weights_are_refused():
    v, y = pair((1, 1, 2, 2, 2))
    with pytest.raises(HeartError, match=r"\[B, C, T, H, W\]"):
        velocity_error.spectral(v[0], y[0])
    with pytest.raises(HeartError, match="differs from the reference"):
        velocity_error.spectral(v, y[:, :, :1])
    for weights in [(1, 2, 3), (1, 1, 1, -1), (1, 1, 1, math.nan)]:
        with pytest.raises(HeartError, match="four finite numbers"):
            velocity_error.spectral(v, y, weights)


def test_a_new_error_by_the_protocol(monkeypatch):
    """The worked example of docs/extending: the largest relative deviation as an error."""

    class Largest:
        name, on = "largest", "velocity"

        def measure(self, velocity, reference):
            return float(np.abs(velocity - reference).max() / np.abs(reference).max())

    monkeypatch.setattr(velocity_error, "_REGISTRY", dict(velocity_error._REGISTRY))
    velocity_error.register("largest", Largest)
    measure = velocity_error.by_name("largest")
    v, y = pair((1, 1, 2, 3, 4))
    assert measure.measure(v, y) == pytest.approx(np.abs(v - y).max() / np.abs(y).max())
    assert not isinstance(measure, velocity_error.QuadraticError)  # so the gradient methods will refuse it
    assert "largest" in velocity_error.names()
    with pytest.raises(HeartError, match="known already"):
        velocity_error.register("largest", Largest)


def test_the_registry():
    v, y = pair((1, 1, 2, 3, 4))
    assert velocity_error.by_name("spectral").measure(v, y) == velocity_error.spectral(v, y)
    assert velocity_error.by_name("spectral", weights=(1, 1, 1, 1)).measure(v, y) == pytest.approx(
        velocity_error.velocity_mse(v, y)
    )
    assert isinstance(velocity_error.by_name("spectral"), velocity_error.QuadraticError)
    assert isinstance(velocity_error.by_name("mse"), velocity_error.QuadraticError)
    assert not isinstance(velocity_error.by_name("attention"), velocity_error.QuadraticError)
    with pytest.raises(HeartError, match="choose one of"):
        velocity_error.by_name("nonsense")
