"""Sparsity of a fixed threshold over the denoising steps: why calibration samples several of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .adjacent import Table
from .common import draw_layer, save


def _summary(density: np.ndarray) -> dict:
    sparsity = 1 - density  # [prompt, step, layer, head]
    by_head = sparsity.mean(0)
    swing = np.ptp(by_head, axis=0)
    return {
        "sparsity_mean": float(sparsity.mean()),
        "sparsity_first_steps": float(sparsity[:, : max(1, sparsity.shape[1] // 10)].mean()),
        "sparsity_last_steps": float(sparsity[:, -max(1, sparsity.shape[1] // 10) :].mean()),
        "swing_mean": float(swing.mean()),
        "swing_max": float(swing.max()),
        "head_min": float(by_head.mean(0).min()),
        "head_max": float(by_head.mean(0).max()),
    }


def _paragraph(name: str, ours: dict, control: dict | None) -> str:
    varies = "varies, as in the paper" if ours["swing_mean"] > 0.1 else "varies less than in the paper"
    text = (
        f"{name}: at a fixed threshold of 0.9 a head's sparsity {varies}: over the steps it swings by "
        f"{ours['swing_mean']:.3f} on average and {ours['swing_max']:.3f} at most, and over heads it lies "
        f"between {ours['head_min']:.3f} and {ours['head_max']:.3f}. It goes from "
        f"{ours['sparsity_first_steps']:.3f} in the first tenth of the steps to {ours['sparsity_last_steps']:.3f} in the last."
    )
    if control is None:
        return text
    return (
        f"{text} Random weights: swing {control['swing_mean']:.3f}, heads between "
        f"{control['head_min']:.3f} and {control['head_max']:.3f}."
    )


def run(trained: Table, control: Table | None, out: Any, seed: int = 0) -> dict:
    """Numbers, figure and paragraph, for every backbone whose masks were predicted."""
    ours = {name: _summary(density) for name, density in trained.density.items()}
    theirs = {name: _summary(density) for name, density in control.density.items()} if control else None
    text = " ".join(_paragraph(name, values, theirs and theirs[name]) for name, values in ours.items())
    layer = draw_layer(next(iter(trained.density.values())).shape[2], seed)

    def draw(plt):
        figure, axes = plt.subplots(1, len(ours), figsize=(7 * len(ours), 4), squeeze=False)
        for axis, (name, density) in zip(axes[0], trained.density.items()):
            for head, curve in enumerate((1 - density.mean(0))[:, layer].T):
                axis.plot(curve, label=f"layer {layer}, head {head}")
            if control:
                axis.plot(1 - control.density[name].mean((0, 2, 3)), "k--", label="random weights, mean")
            axis.set(title=name, xlabel="step", ylabel="sparsity at threshold 0.9", ylim=(0, 1))
            axis.legend(fontsize=7)
        return figure

    return save(out, "timesteps", {"layer": layer, "trained": ours, "control": theirs}, text, draw)
