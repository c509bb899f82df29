"""Sparsity of a fixed threshold over the denoising steps: why calibration samples several of them."""

from __future__ import annotations

import numpy as np

from .adjacent import Table
from .common import save


def _summary(table: Table) -> dict:
    sparsity = 1 - table.density  # [prompt, step, layer, head]
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


def _paragraph(ours: dict, control: dict) -> str:
    varies = "varies, as in the paper" if ours["swing_mean"] > 0.1 else "varies less than in the paper"
    return (
        f"At a fixed threshold of 0.9 a head's sparsity {varies}: over the steps it swings by {ours['swing_mean']:.3f} on "
        f"average and {ours['swing_max']:.3f} at most, and over heads it lies between {ours['head_min']:.3f} and "
        f"{ours['head_max']:.3f}. It goes from {ours['sparsity_first_steps']:.3f} in the first tenth of the steps to "
        f"{ours['sparsity_last_steps']:.3f} in the last. Random weights: swing {control['swing_mean']:.3f}, heads between "
        f"{control['head_min']:.3f} and {control['head_max']:.3f}."
    )


def run(trained: Table, control: Table, out) -> dict:
    """Numbers, figure and paragraph."""
    ours, theirs = _summary(trained), _summary(control)

    def draw(plt):
        figure, axis = plt.subplots(figsize=(7, 4))
        sparsity = 1 - trained.density.mean(0)  # [step, layer, head]
        flat = sparsity.reshape(len(sparsity), -1)
        for head in np.argsort(flat.mean(0))[:: max(1, flat.shape[1] // 8)]:
            axis.plot(flat[:, head], label=f"layer {head // sparsity.shape[2]}, head {head % sparsity.shape[2]}")
        axis.plot(1 - control.density.mean((0, 2, 3)), "k--", label="random weights, mean")
        axis.set(xlabel="step", ylabel="sparsity at threshold 0.9", ylim=(0, 1))
        axis.legend(fontsize=7)
        return figure

    return save(out, "timesteps", {"trained": ours, "control": theirs}, _paragraph(ours, theirs), draw)
