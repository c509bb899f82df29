"""Observation II of the paper: how each head answers to its threshold, measured one head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..statistics import spearman
from . import common

TAUS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


def plan(call: dict, prompts: list[str], seed: int, control: bool) -> list[tuple[int, dict]]:
    """One prompt at an early and a late step (the control: the early one), for every backbone that the paper has."""
    count = call["num_inference_steps"]
    steps = [count // 3] if control else [count // 3, 4 * count // 5]
    return [(0, {"call": call, "steps": steps, "backbone": b, "seed": seed}) for b in common.PAPER_BACKBONES]


def measure(pipe: Any, text: str, prompt: int, call: dict, steps: list[int], backbone: str, seed: int) -> dict:
    """The answers of all heads to the thresholds, one prompt and one backbone."""
    found = answers(pipe, common.configs(pipe, [backbone])[backbone], call, text, steps, seed, prompt)
    return {"backbone": backbone, **{name: np.round(values, 12).tolist() for name, values in found.items()}}


def answers(pipe, config, call: dict, text: str, steps: list[int], seed: int = 0, prompt: int = 0, taus=TAUS) -> dict:
    """Arrays [layer, head, τ]: attention-output error, velocity error (4-band spectral) and sparsity, mean over contexts."""
    from ...calibration.measure.candidates import Spec
    from ...calibration.measure.probes import probe
    from ...calibration.measure.replay import Replay
    from ...calibration.measure.trajectory import record
    from ...calibration.measure.velocity_error import by_name
    from ...models.inspect import layers_and_heads, transformers_of

    names: dict[str, list] = {"attention": [], "error": [], "sparsity": []}
    spec = Spec.of(config.backbone, tuple(taus), scale_clusters=config.scale_clusters)
    measure_error, contexts = by_name("spectral"), []
    transformer = transformers_of(pipe)[0]
    heads = layers_and_heads(transformer)[1]
    with Replay(transformer, scheduler=pipe.scheduler) as replay:
        record(pipe, replay, prompt, text, steps, call, seed, contexts.append)
        for context in contexts:
            wanted = {layer: range(heads) for layer in range(len(replay.layers))}
            found = dict(probe(replay, context.conditional(), wanted, spec, measure_error, null=False))
            for name, values in names.items():
                values.append([[found[lay]["heads"][str(h)][name] for h in some] for lay, some in wanted.items()])
    return {name: np.mean(values, axis=0) for name, values in names.items()}


def _summary(found: dict) -> dict:
    at = TAUS.index(0.9)
    error, sparsity, local = (found[k][..., at].ravel() for k in ("error", "sparsity", "attention"))
    positive = error[error > 0]
    return {
        "error_ratio_max_to_median": float(positive.max() / np.median(positive)) if positive.size else 0.0,
        "sparsity_min": float(sparsity.min()),
        "sparsity_max": float(sparsity.max()),
        "rank_agreement_local_velocity": spearman(local, error),
        **{k: v.tolist() for k, v in found.items()},
    }


def _paragraph(name: str, ours: dict, control: dict | None) -> str:
    text = (
        f"{name}: at the same threshold of 0.9, heads reach sparsities from {ours['sparsity_min']:.3f} to "
        f"{ours['sparsity_max']:.3f} and the worst head's velocity error is {ours['error_ratio_max_to_median']:.1f} times the "
        f"median's: one threshold puts heads into different regimes. Ranking heads by their own output's error agrees with "
        f"ranking by velocity error only to Spearman {ours['rank_agreement_local_velocity']:.2f}."
    )
    if control is None:
        return text
    return (
        f"{text} Random weights: sparsities from {control['sparsity_min']:.3f} to {control['sparsity_max']:.3f}, worst to median "
        f"{control['error_ratio_max_to_median']:.1f}, rank agreement {control['rank_agreement_local_velocity']:.2f}."
    )


def run(trained: list[dict], control: list[dict] | None, out: Any, seed: int = 0) -> dict:
    """Numbers, figure and paragraph, for every backbone that was measured."""
    raw = {part["backbone"]: _arrays(part) for part in trained}
    ours = {name: _summary(values) for name, values in raw.items()}
    theirs = {part["backbone"]: _summary(_arrays(part)) for part in control} if control else None
    text = " ".join(_paragraph(n, values, theirs and theirs[n]) for n, values in ours.items())
    numbers = {"taus": TAUS, "trained": ours, "control": theirs}
    return common.save(out, "response", numbers, text, lambda plt: _draw(plt, raw))


def _arrays(part: dict) -> dict[str, np.ndarray]:
    return {name: np.asarray(values, float) for name, values in part.items() if name != "backbone"}


def _draw(plt: Any, raw: dict[str, dict]) -> Any:
    figure, axes = plt.subplots(len(raw), 3, figsize=(15, 4 * len(raw)), squeeze=False)
    titles = (("attention", "attention-output error"), ("error", "velocity error"), ("sparsity", "sparsity"))
    for row, (backbone, values) in zip(axes, raw.items()):
        for axis, (name, title) in zip(row, titles):
            for curve in values[name].reshape(-1, len(TAUS)):
                axis.plot(TAUS, np.maximum(curve, 1e-12) if name != "sparsity" else curve, lw=0.8)
            scale = "linear" if name == "sparsity" else "log"
            axis.set(xlabel="threshold", title=f"{backbone}: {title}", yscale=scale)
    return figure
