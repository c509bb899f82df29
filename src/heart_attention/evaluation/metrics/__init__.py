"""How near two videos are and how good they look; each metric's name says its convention.

`register_metric` adds one of your own; from then on tables, ablations and the report know its name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import HeartError
from . import similarity
from .similarity import psnr, psnr_pooled, ssim, ssim_box

__all__ = [
    "CONVENTIONS", "Metric", "check", "compare", "defaults", "names", "psnr", "psnr_pooled", "register_metric", "ssim",
    "ssim_box",
]  # fmt: skip

log = logging.getLogger(__name__)


class Metric(NamedTuple):
    """A measure of a video against its reference, both uint8 [T, H, W, 3].

    `convention` says in a sentence what is computed; `needs` raises a HeartError if something is missing for it.
    """

    function: Callable[[Any, Any], float]
    convention: str
    needs: Callable[[], Any] = lambda: None


def _lpips(video: Any, reference: Any, net: str, unit_range: bool = False) -> float:
    from .lpips import lpips

    return lpips(video, reference, net, unit_range)


def _lpips_weights(net: str) -> None:
    from .lpips import weights

    weights(net)


def _vmaf(video: Any, reference: Any) -> float:
    from .vmaf import vmaf

    return vmaf(video, reference)


_ALEX, _VGG = functools.partial(_lpips_weights, "alex"), functools.partial(_lpips_weights, "vgg")
_METRICS: dict[str, Metric] = {
    "psnr": Metric(
        similarity.psnr, "mean over frames of 10·log10(255²/MSE) on uint8 RGB, identical frames count 100 dB"
    ),
    "psnr_pooled": Metric(similarity.psnr_pooled, "10·log10(255²/MSE) with the MSE of the whole video"),
    "ssim": Metric(similarity.ssim, "Gaussian window 11×11, σ 1.5, per RGB channel, valid region, mean over frames"),
    "ssim_box": Metric(
        similarity.ssim_box, "uniform window 11×11, otherwise as ssim (the way of Sparse-VideoGen's evaluation)"
    ),
    "lpips_alex": Metric(
        functools.partial(_lpips, net="alex"), "LPIPS 0.1, AlexNet, inputs in [-1, 1], mean over frames", _ALEX
    ),
    "lpips_vgg": Metric(
        functools.partial(_lpips, net="vgg"), "LPIPS 0.1, VGG16, inputs in [-1, 1], mean over frames", _VGG
    ),
    "lpips_vgg01": Metric(
        functools.partial(_lpips, net="vgg", unit_range=True),
        "LPIPS 0.1, VGG16, inputs left in [0, 1] (the way of Sparse-VideoGen's evaluation)",
        _VGG,
    ),
    "vmaf": Metric(_vmaf, "libvmaf v0.6.1 of the bundled ffmpeg, mean over frames, yuv420p"),
}
ALIASES = {"lpips": "lpips_alex"}  # the usual word


class _Conventions(Mapping[str, str]):
    """Column name -> the convention behind it, printed under every table that has the column."""

    def __getitem__(self, name: str) -> str:
        return _METRICS[name].convention

    def __iter__(self) -> Iterator[str]:
        return iter(_METRICS)

    def __len__(self) -> int:
        return len(_METRICS)


CONVENTIONS = _Conventions()


def register_metric(name: str, function: Callable[[Any, Any], float], convention: str) -> None:
    """Make a metric known by its name.

    Args:
        name: the column's name, a word that no metric has yet.
        function: `function(video, reference) -> float`, both uint8 [T, H, W, 3].
        convention: what it computes, in words; stands under every table that has the column.
    """
    if not name.isidentifier() or name in _METRICS or name in ALIASES:
        raise HeartError(f"a metric cannot be called {name!r}: give a word that no metric has yet")
    if not callable(function):
        raise HeartError(f"the metric {name!r} is {function!r}: give a function of a video and its reference")
    _METRICS[name] = Metric(function, convention)


def names() -> list[str]:
    """Names of all metrics."""
    return list(_METRICS)


def defaults() -> tuple[str, ...]:
    """The paper's: PSNR, SSIM, and LPIPS where its weights are at hand (else that is said once)."""
    try:
        _METRICS["lpips_alex"].needs()
    except HeartError:
        _say_once("no LPIPS column: `heart fetch-weights lpips` puts its weights into the cache")
        return ("psnr", "ssim")
    return ("psnr", "ssim", "lpips_alex")


@functools.cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


def check(wanted: Sequence[str]) -> tuple[str, ...]:
    """The metrics' full names; raises if one is unknown or lacks its weights: better now than after a generation."""
    full = tuple(dict.fromkeys(ALIASES.get(name, name) for name in wanted))
    unknown = [name for name in full if name not in _METRICS]
    if unknown:
        raise HeartError(f"unknown metric {unknown[0]!r}: choose from {', '.join([*ALIASES, *_METRICS])}")
    for name in full:
        _METRICS[name].needs()
    return full


def compare(video: Any, reference: Any, names: Sequence[str] = ("psnr", "ssim")) -> dict[str, float]:
    """The named metrics of `video` against `reference`, both uint8 [T, H, W, 3]."""
    return {name: float(_METRICS[name].function(video, reference)) for name in check(names)}
