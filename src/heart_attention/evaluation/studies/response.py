"""Observation II of the paper: how each head answers to its threshold, measured one head at a time."""

from __future__ import annotations

import numpy as np

from .common import save

TAUS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


def measure(pipe, backbone, call: dict, prompts: list[str], steps: list[int], seed: int = 0, taus=TAUS) -> dict:
    """Arrays [layer, head, τ]: attention-output error, velocity error (4-band spectral) and sparsity, mean over contexts."""
    from ...calibration.measure.candidates import Spec
    from ...calibration.measure.probes import probe
    from ...calibration.measure.replay import Replay
    from ...calibration.measure.trajectory import record
    from ...calibration.measure.velocity_error import by_name
    from ...models.inspect import transformers_of

    names = {"attention": [], "error": [], "sparsity": []}
    spec, measure_error = Spec(backbone, tuple(taus)), by_name("spectral")
    with Replay(transformers_of(pipe)[0], scheduler=pipe.scheduler) as replay:
        for i, prompt in enumerate(prompts):
            contexts: list = []
            record(pipe, replay, i, prompt, steps, call, seed, contexts.append)
            for context in contexts:
                wanted = {layer: range(_heads(replay)) for layer in range(len(replay.layers))}
                found = dict(probe(replay, context.conditional(), wanted, spec, measure_error, null=False))
                for name, values in names.items():
                    values.append([[found[lay]["heads"][str(h)][name] for h in heads] for lay, heads in wanted.items()])
    return {name: np.mean(values, axis=0) for name, values in names.items()}


def _heads(replay) -> int:
    module = replay.layers[0].module
    return int(getattr(module, "heads", None) or module.num_heads)


def _summary(found: dict) -> dict:
    at = TAUS.index(0.9)
    error, sparsity, local = (found[k][..., at].ravel() for k in ("error", "sparsity", "attention"))
    positive = error[error > 0]
    from .common import spearman

    return {
        "error_ratio_max_to_median": float(positive.max() / np.median(positive)) if positive.size else 0.0,
        "sparsity_min": float(sparsity.min()),
        "sparsity_max": float(sparsity.max()),
        "rank_agreement_local_velocity": spearman(local, error),
        **{k: np.round(v, 12).tolist() for k, v in found.items()},
    }


def _paragraph(ours: dict, control: dict) -> str:
    return (
        f"At the same threshold of 0.9, heads reach sparsities from {ours['sparsity_min']:.3f} to {ours['sparsity_max']:.3f} "
        f"and the worst head's velocity error is {ours['error_ratio_max_to_median']:.1f} times the median's: one threshold "
        f"puts heads into different regimes. Ranking heads by their own output's error agrees with ranking by velocity error "
        f"only to Spearman {ours['rank_agreement_local_velocity']:.2f}. Random weights: sparsities from "
        f"{control['sparsity_min']:.3f} to {control['sparsity_max']:.3f}, worst to median "
        f"{control['error_ratio_max_to_median']:.1f}, rank agreement {control['rank_agreement_local_velocity']:.2f}."
    )


def run(pipe, control, backbone, call: dict, prompts: list[str], out, steps: list[int]) -> dict:
    """Numbers, figure and paragraph."""
    raw = measure(pipe, backbone, call, prompts, steps)
    ours = _summary(raw)
    theirs = _summary(measure(control, backbone, call, prompts[:1], steps[:1]))

    def draw(plt):
        figure, axes = plt.subplots(1, 3, figsize=(15, 4))
        titles = (("attention", "attention-output error"), ("error", "velocity error"), ("sparsity", "sparsity"))
        for axis, (name, title) in zip(axes, titles):
            for curve in raw[name].reshape(-1, len(TAUS)):
                axis.plot(TAUS, np.maximum(curve, 1e-12) if name != "sparsity" else curve, lw=0.8)
            axis.set(xlabel="threshold", title=title, yscale="linear" if name == "sparsity" else "log")
        return figure

    return save(out, "response", {"taus": TAUS, "trained": ours, "control": theirs}, _paragraph(ours, theirs), draw)
