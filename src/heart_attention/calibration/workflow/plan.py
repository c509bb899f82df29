"""The plan of a calibration: which prompts and steps are measured, and the document that names the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...models.caches import Cache
from .. import experts, file
from ..measure import draws, gradient
from .phases import noise_levels
from .settings import Settings


@dataclass(frozen=True)
class Contexts:
    """The (prompt, step) pairs of a calibration; held-out prompts are numbered after the calibration prompts."""

    probes: dict[tuple[int, int], dict[int, tuple[int, ...]]]  # (prompt, step) -> layer -> heads
    calibration: list[tuple[int, int]]
    held_out: list[tuple[int, int]]

    def steps(self) -> dict[int, tuple[int, ...]]:
        """The steps of each prompt that must be recorded."""
        of_prompt: dict[int, set[int]] = {}
        for prompt, step in [*self.probes, *self.calibration, *self.held_out]:
            of_prompt.setdefault(prompt, set()).add(step)
        return {prompt: tuple(sorted(steps)) for prompt, steps in sorted(of_prompt.items())}


def _strata(settings: Settings, kind: str, served: tuple[int, int] | None) -> list[tuple[int, int]]:
    """The step intervals that draws are taken from, within the steps that the transformer serves."""
    first, last = served or (0, settings.steps - 1)
    count = max(draws.COUNT, settings.phases)
    intervals = draws.strata(last - first + 1, kind, max(0, settings.first_dense_steps - first), count)
    return [(first + a, first + b) for a, b in intervals]


def draw_contexts(settings: Settings, layers: int, heads: int, served: tuple[int, int] | None = None) -> Contexts:
    """All draws of a calibration: pure functions of the seed. `served`: first and last step, if not all."""
    count, seed = len(settings.prompts), settings.seed
    intervals = _strata(settings, settings.strata or "sparse", served)
    probes: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
    if settings.method == "probes":
        prompt = draws.prompt_of_heads(seed, layers, heads, count)
        for layer in range(layers):
            for head in range(heads):
                for step in draws.steps_of_head(seed, layer, head, intervals):
                    wanted = probes.setdefault((int(prompt[layer, head]), step), {})
                    wanted[layer] = (*wanted.get(layer, ()), head)
    used = _strata(settings, "sparse", served)
    common = intervals if settings.method != "probes" else used
    calibration = draws.contexts(seed, "calibration", count, common, settings.contexts)
    held_out: list[tuple[int, int]] = []
    if settings.held_out and settings.held_out_contexts:
        drawn = draws.contexts(seed, "held-out", len(settings.held_out), used, settings.held_out_contexts)
        held_out = [(count + p, s) for p, s in drawn]
    return Contexts(probes, calibration, held_out)


def plan(pipe: Any, settings: Settings) -> dict[str, Any]:
    """Everything that decides the result, as plain JSON; its hash names the work."""
    transformer, served = experts.chosen(pipe, settings.transformer), None
    if experts.are_two(pipe):
        served = list(experts.served(pipe, settings.transformer, settings.steps))
    cache = Cache(transformer).to_dict()
    return {
        "model": file.fingerprint(transformer),
        "dtype": str(transformer.dtype).removeprefix("torch."),
        "scheduler": type(pipe.scheduler).__name__,
        "noise_levels": noise_levels(pipe.scheduler, settings.steps) if settings.phases > 1 else None,
        **settings.planned(),
        "generator": draws.GENERATOR,
        "versions": file.versions(),
        **({} if settings.method == "probes" else {"estimator": gradient.ESTIMATOR}),
        **({} if served is None else {"served": served}),
        **({} if cache is None else {"cache": cache}),
    }
