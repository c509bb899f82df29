"""How far a sparse velocity is from the dense one: the paper's 4-band spectral error and its relatives.

The definition (the paper's Eq. 6): with a 3D FFT over (T, H, W) of each channel, `e = Σ_q w_q
Σ_{ω∈Ω_q}|ε̂(ω)|² / (Σ_ω|ŷ(ω)|² + 1e-10)`. An axis index is low iff `|index - n//2| ≤ n//4` after fftshift.
That set always contains -f with f, so "low on this axis" is a real orthogonal projection P and by Parseval
the error is a quadratic form `⟨ε, Wε⟩ / ‖y‖²`, with W = w_HH·I + (w_LH-w_HH)·P_t + (w_HL-w_HH)·P_s +
(w_LL-w_LH-w_HL+w_HH)·P_t·P_s. So no FFT is needed: small matrix products with the low frequencies' cosines
and sines. Sums are taken in float64.

A new error is a class with `name`, `on` and `measure(velocity, reference) -> float`, made known by
`register`. With `apply_weight` and `apply_sqrt` besides (see `QuadraticError`) the gradient methods can use
it too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ...errors import HeartError

WEIGHTS = (1.0, 0.5, 0.01, 0.01)  # the paper's, of LL, LH, HL, HH: temporal band first, then spatial
BANDS = ("LL", "LH", "HL", "HH")
TINY = 1e-10  # the paper's ε, added to the reference's energy in the frequency domain


@functools.lru_cache(maxsize=64)
def low_basis(n: int) -> torch.Tensor:
    """Orthonormal real basis of the low frequencies of an axis of length n, float64 [n, 2·(n//4)+1]."""
    x = np.arange(n)
    columns = [np.full(n, 1 / math.sqrt(n))]
    for f in range(1, n // 4 + 1):  # f ≤ n//4 < n/2: never the Nyquist frequency, so cos and sin both exist
        angle = 2 * np.pi * ((f * x) % n) / n
        columns += [math.sqrt(2 / n) * np.cos(angle), math.sqrt(2 / n) * np.sin(angle)]
    return torch.from_numpy(np.stack(columns, 1))


def _as_tensor(x: Any, name: str) -> torch.Tensor:
    x = torch.as_tensor(x).detach()
    if x.ndim != 5 or x.numel() == 0:
        raise HeartError(f"{name} has shape {tuple(x.shape)}, not [B, C, T, H, W] with at least one element")
    return (x.cpu() if x.device.type == "mps" else x).double()  # mps has no float64


def _pair(velocity: Any, reference: Any) -> tuple[torch.Tensor, torch.Tensor]:
    v, y = _as_tensor(velocity, "the velocity"), _as_tensor(reference, "the reference")
    if v.shape != y.shape:
        raise HeartError(f"the velocity's shape {tuple(v.shape)} differs from the reference's {tuple(y.shape)}")
    return v - y.to(v.device), y


def _along(x: torch.Tensor, matrix: torch.Tensor, axis: int) -> torch.Tensor:
    """Multiply `axis` (2, 3 or 4) of x by matrixᵀ: [..., n, ...] -> [..., columns of matrix, ...]."""
    matrix = matrix.to(x)
    if axis == 4:
        return x @ matrix
    if axis == 3:
        return matrix.T @ x
    return (matrix.T @ x.flatten(3)).unflatten(3, x.shape[3:])


def _energy(x: torch.Tensor) -> float:
    return float(x.square().sum())


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise HeartError("the error is not a finite number: the velocity or its reference holds NaN or infinity")
    return value


def denominator(reference: Any) -> float:
    """What errors are divided by: the reference's energy (by Parseval the spectrum's, over the grid size)."""
    y = _as_tensor(reference, "the reference")
    return _finite(_energy(y) + TINY / math.prod(y.shape[2:]))


def band_energies(x: Any) -> np.ndarray:
    """Energy of x [B, C, T, H, W] in LL, LH, HL, HH, float64 [4]; their sum is ‖x‖²."""
    x = _as_tensor(x, "the signal")
    t, h, w = (low_basis(n) for n in x.shape[2:])
    low_t = _along(x, t, 2)  # coefficients, [B, C, 2·(T//4)+1, H, W]; their energy is that of P_t x
    low_s = _along(_along(x, w, 4), h, 3)
    ll = _energy(_along(low_s, t, 2))
    all_t, all_s, everything = _energy(low_t), _energy(low_s), _energy(x)
    out = np.array([ll, all_t - ll, all_s - ll, everything - all_t - all_s + ll])
    _finite(float(out.sum()))
    return np.maximum(out, 0.0)  # rounding may leave -1e-17 where a band is empty


def bands(velocity: Any, reference: Any) -> np.ndarray:
    """The four unweighted relative band energies of the error (LL, LH, HL, HH), float64 [4].

    `spectral` with any weights is their dot product with them, so storing these saves new probes.
    """
    difference, y = _pair(velocity, reference)
    return band_energies(difference) / denominator(y)


def check_weights(weights: Sequence[float]) -> tuple[float, float, float, float]:
    """Four finite non-negative numbers, or a HeartError."""
    values = tuple(float(w) for w in weights)
    if len(values) != 4 or not all(math.isfinite(w) and w >= 0 for w in values):
        raise HeartError(f"band weights must be four finite numbers ≥ 0 (LL, LH, HL, HH), not {values}")
    return values  # type: ignore[return-value]


def spectral(velocity: Any, reference: Any, weights: Sequence[float] = WEIGHTS) -> float:
    """The paper's weighted 4-band error of a velocity [B, C, T, H, W] against the dense reference."""
    return float(np.dot(check_weights(weights), bands(velocity, reference)))


def velocity_mse(velocity: Any, reference: Any) -> float:
    """‖v - y‖² / ‖y‖²: the spectral error with all weights 1 (Parseval)."""
    difference, y = _pair(velocity, reference)
    return _finite(_energy(difference) / denominator(y))


def attention_output(output: Any, reference: Any) -> float:
    """‖o - o_dense‖² / ‖o_dense‖² of attention outputs of any one shape, e.g. one head's [B, N, D]."""
    o, r = torch.as_tensor(output).detach(), torch.as_tensor(reference).detach()
    if o.shape != r.shape or o.numel() == 0:
        raise HeartError(f"attention outputs have shapes {tuple(o.shape)} and {tuple(r.shape)}: they must be equal")
    o, r = (x.cpu().double() if x.device.type == "mps" else x.double() for x in (o, r))
    return _finite(_energy(o - r) / (_energy(r) + TINY))


def apply_weight(x: torch.Tensor, weights: Sequence[float] = WEIGHTS) -> torch.Tensor:
    """W·x, so that `⟨x, W x⟩ = Σ_q w_q · energy of band q`; same dtype and device, differentiable."""
    ll, lh, hl, hh = check_weights(weights)
    if x.ndim != 5:
        raise HeartError(f"the signal has shape {tuple(x.shape)}, not [B, C, T, H, W]")
    work = x if x.dtype in (torch.float32, torch.float64) else x.float()
    t, h, w = (low_basis(n) for n in x.shape[2:])

    def spatial(y: torch.Tensor) -> torch.Tensor:
        return _along(_along(_along(_along(y, w, 4), h, 3), h.T, 3), w.T, 4)

    low_t = _along(work, t, 2)  # W commutes with going back from coefficients, so P_t x is expanded last
    mixed = (lh - hh) * low_t
    if (both := ll - lh - hl + hh) != 0:
        mixed = mixed + both * spatial(low_t)
    out = hh * work + _along(mixed, t.T, 2)
    if hl != hh:
        out = out + (hl - hh) * spatial(work)
    return out.to(x.dtype)


def apply_sqrt(x: torch.Tensor, weights: Sequence[float] = WEIGHTS) -> torch.Tensor:
    """W^½·x: the bands are orthogonal, so this is `apply_weight` with the weights' roots."""
    return apply_weight(x, tuple(math.sqrt(w) for w in check_weights(weights)))


@runtime_checkable
class ErrorMeasure(Protocol):
    """What calibration asks of an error: a name, what it looks at, and a number for two tensors."""

    name: str
    on: str  # "velocity": tensors are [B, C, T, H, W]; "attention": the head's output [B, N, D]

    def measure(self, velocity: Any, reference: Any) -> float:
        """The error of `velocity` against the dense `reference`: 0 where equal, never negative."""
        ...


@runtime_checkable
class QuadraticError(ErrorMeasure, Protocol):
    """An error of the form ⟨ε, Wε⟩ / `denominator(y)`: what the gradient methods need."""

    def apply_weight(self, x: torch.Tensor) -> torch.Tensor:
        """W·x."""
        ...

    def apply_sqrt(self, x: torch.Tensor) -> torch.Tensor:
        """W^½·x."""
        ...


@dataclass(frozen=True)
class Spectral:
    """The paper's error; `weights` of LL, LH, HL, HH."""

    weights: tuple[float, float, float, float] = WEIGHTS
    name: str = "spectral"
    on: str = "velocity"

    def measure(self, velocity: Any, reference: Any) -> float:
        """See `spectral`."""
        return spectral(velocity, reference, self.weights)

    def apply_weight(self, x: torch.Tensor) -> torch.Tensor:
        """See `apply_weight`."""
        return apply_weight(x, self.weights)

    def apply_sqrt(self, x: torch.Tensor) -> torch.Tensor:
        """See `apply_sqrt`."""
        return apply_sqrt(x, self.weights)


@dataclass(frozen=True)
class VelocityMSE:
    """Relative mean squared error of the velocity."""

    name: str = "mse"
    on: str = "velocity"

    def measure(self, velocity: Any, reference: Any) -> float:
        """See `velocity_mse`."""
        return velocity_mse(velocity, reference)

    def apply_weight(self, x: torch.Tensor) -> torch.Tensor:
        """x itself: W is the identity."""
        return x

    def apply_sqrt(self, x: torch.Tensor) -> torch.Tensor:
        """x itself: W is the identity."""
        return x


@dataclass(frozen=True)
class AttentionOutput:
    """Relative squared error of the head's attention output; blind to what later layers make of it."""

    name: str = "attention"
    on: str = "attention"

    def measure(self, velocity: Any, reference: Any) -> float:
        """See `attention_output`."""
        return attention_output(velocity, reference)


_REGISTRY: dict[str, Callable[..., Any]] = {
    "spectral": Spectral,
    "mse": VelocityMSE,
    "attention": AttentionOutput,
}


def names() -> list[str]:
    """The errors that `--error` knows."""
    return list(_REGISTRY)


def register(name: str, make: Callable[..., ErrorMeasure]) -> None:
    """Make a new error known under `name`; `make(**settings)` returns the measure."""
    if name in _REGISTRY:
        raise HeartError(f"an error named {name!r} is known already: choose another name")
    _REGISTRY[name] = make


def by_name(name: str, **settings: Any) -> ErrorMeasure:
    """The error registered under `name`."""
    if name not in _REGISTRY:
        raise HeartError(f"there is no error named {name!r}: choose one of {', '.join(_REGISTRY)}")
    measure = _REGISTRY[name](**settings)
    if not isinstance(measure, ErrorMeasure) or measure.on not in ("velocity", "attention"):
        raise HeartError(
            f"the error {name!r} lacks name, on ('velocity' or 'attention') or measure(velocity, reference)"
        )
    return measure
