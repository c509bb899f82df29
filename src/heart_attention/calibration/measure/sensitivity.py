"""What the reference point's errors do to the final latent, by the phase of denoising in which they happen.

Velocity errors of different phases do not compare as they are: early ones decide the composition, late ones are small
beside what stands by then. So one generation a phase runs every head at the reference point in that phase alone, and the
final latent is compared with the dense one. White noise in place of a point's own error misleads: it is new at every step
and has no shape, so that early steps average it out and later ones denoise it, while what a mask leaves out is alike from
step to step and moves whole objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import draws
from .candidates import DENSE, ChosenPoints, Spec, Trials
from .replay import Replay, Serve
from .trajectory import quiet

STEPS = 16  # of a generation: what a phase does depends on noise levels, not on how finely they are cut


def phase_effects(
    pipe: Any, replay: Replay, spec: Spec, choice: Sequence[Sequence[int]], prompt: int, text: str,
    call: Mapping[str, Any], seed: int, edges: Sequence[float],
) -> list[float]:  # fmt: skip
    """Relative squared change of the final latent when heads run at `choice` [L][H] of `spec`'s points in each phase alone.

    `edges`: noise levels that bound the phases, descending, one more than there are phases.
    """
    given = {**call, "num_inference_steps": min(int(call.get("num_inference_steps", 50)), STEPS)}

    def latent(serve: Serve | None) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(draws.torch_seed(seed, "noise", prompt))
        with torch.no_grad(), replay.handler.serving(serve), quiet(pipe):
            out = pipe(prompt=text, generator=generator, output_type="latent", return_dict=False, **given)
        return out[0].float().cpu()

    plain = latent(None)
    changes = [latent(_between(high, low, spec, choice)) - plain for high, low in itertools.pairwise(edges)]
    return [float(change.square().sum() / plain.square().sum()) for change in changes]


def _between(high: float, low: float, spec: Spec, choice: Sequence[Sequence[int]]) -> Serve:
    """Attention at the chosen points while the noise level lies in an interval, else dense."""
    rows = [ChosenPoints(spec, row) for row in choice]

    def serve(call: Any, q: Tensor, k: Tensor, v: Tensor, dense: Any) -> Tensor:
        if call.sigma is None or not low <= call.sigma <= high:
            return dense(q, k, v)
        row = rows[call.layer]
        trials = Trials(row.spec, call, call.branch, q, k, v)
        return trials.mixed(row.choice, dense(q, k, v) if DENSE in row.choice else None)

    return serve
