"""What a velocity error does to the final latent, by the phase of denoising in which it happens.

Velocity errors of different phases do not compare as they are: early ones are smoothed out by later steps or decide
the composition, late ones stay as they are. So seeded noise of a known relative energy is added to the velocity in one
phase alone, and the final latent is compared with the undisturbed one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import draws
from .replay import Replay
from .trajectory import quiet

LEVEL = 1e-3  # energy of the noise, relative to the velocity's
STEPS = 16  # of a generation: what a phase does depends on noise levels, not on how finely they are cut


def phase_effects(
    pipe: Any, replay: Replay, prompt: int, text: str, call: Mapping[str, Any], seed: int, edges: Sequence[float]
) -> list[float]:
    """Relative squared change of the final latent over that of the velocity, for noise in each phase alone.

    `edges`: noise levels that bound the phases, descending, one more than there are phases.
    """
    given = {**call, "num_inference_steps": min(int(call.get("num_inference_steps", 50)), STEPS)}
    plain = _latent(pipe, replay, prompt, text, given, seed, lambda step, level, velocity: velocity)
    effects = []
    for high, low in itertools.pairwise(edges):

        def disturb(step: int, level: float, velocity: Tensor, high: float = high, low: float = low) -> Tensor:
            return velocity + _noise(velocity, seed, prompt, step) if low <= level <= high else velocity

        latent = _latent(pipe, replay, prompt, text, given, seed, disturb)
        effects.append(float((latent - plain).square().sum() / plain.square().sum()) / LEVEL)
    return effects


def _noise(velocity: Tensor, seed: int, prompt: int, step: int) -> Tensor:
    """Seeded noise with `LEVEL` of the velocity's energy."""
    generator = torch.Generator().manual_seed(draws.torch_seed(seed, "velocity noise", prompt, step))
    noise = torch.randn(velocity.shape, generator=generator).to(velocity.device)
    scale = LEVEL**0.5 * velocity.float().norm() / noise.norm()
    return (scale * noise).to(velocity.dtype)


Disturb = Callable[[int, float, Tensor], Tensor]  # (step, noise level, velocity) -> velocity


def _latent(
    pipe: Any, replay: Replay, prompt: int, text: str, call: Mapping[str, Any], seed: int, disturb: Disturb
) -> Tensor:
    """The final latent of a dense generation whose velocities go through `disturb`, fp32 on the host."""
    generator = torch.Generator("cpu").manual_seed(draws.torch_seed(seed, "noise", prompt))
    with torch.no_grad(), _disturbed(pipe.scheduler, disturb), replay.handler.serving(None), quiet(pipe):
        out = pipe(prompt=text, generator=generator, output_type="latent", return_dict=False, **call)
    return out[0].float().cpu()


@contextlib.contextmanager
def _disturbed(scheduler: Any, disturb: Disturb) -> Iterator[None]:
    original, overridden, count = scheduler.step, "step" in vars(scheduler), 0

    def step(model_output: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        level = float(timestep) / scheduler.config.num_train_timesteps
        velocity, count = disturb(count, level, model_output), count + 1
        return original(velocity, timestep, *args, **kwargs)

    scheduler.step = step
    try:
        yield
    finally:
        if overridden:
            scheduler.step = original
        else:
            del scheduler.step
