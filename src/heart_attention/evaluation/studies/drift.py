"""Does query-key drift tell how much a mask changed? The paper's Spearman correlations, with their control."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..statistics import spearman
from .adjacent import Table
from .common import save

PAPER = {"full": -0.7914, "mean": -0.7568}


def _summary(table: Table) -> dict:
    pairs = {"full": table.full_drift, "mean": table.mean_drift}
    found: dict = {}
    for name, values in pairs.items():
        found[name] = spearman(values.ravel(), table.token_iou.ravel())
        found[f"{name}_masks"] = {b: spearman(values.ravel(), v.ravel()) for b, v in table.mask_iou.items()}
        found[f"{name}_within_head"] = _within(values, table.token_iou)
    found["mean_drift_quantiles"] = [float(q) for q in np.quantile(table.mean_drift, (0.1, 0.25, 0.5, 0.75, 0.9))]
    return found


def _within(values: np.ndarray, iou: np.ndarray) -> float:
    """Mean over heads of the correlation inside one head: what a per-head rule lives on."""
    flat_v, flat_i = (a.reshape(-1, a.shape[2] * a.shape[3]) for a in (values, iou))
    return float(np.mean([spearman(flat_v[:, h], flat_i[:, h]) for h in range(flat_v.shape[1])]))


def _paragraph(ours: dict, control: dict | None) -> str:
    text = (
        f"Spearman correlation of token IoU with full-token drift is {ours['full']:.3f} and with the mean-pooled drift "
        f"{ours['mean']:.3f} (paper, Wan2.1-1.3B: {PAPER['full']} and {PAPER['mean']}); inside single heads "
        f"{ours['full_within_head']:.3f} and {ours['mean_within_head']:.3f}."
    )
    if control is None:
        return text
    stronger = abs(control["mean"]) >= abs(ours["mean"])
    judge = (
        "The control is as strong, so the correlation alone is no evidence that drift knows the trained heads."
        if stronger
        else "The control is weaker, so the trained heads carry the relation."
    )
    return f"{text} Random weights give {control['full']:.3f} and {control['mean']:.3f}. {judge}"


def run(trained: Table, control: Table | None, out: Any, seed: int = 0) -> dict:
    """Numbers, figure and paragraph; without `control` for the trained model alone."""
    ours, theirs = _summary(trained), None if control is None else _summary(control)

    def draw(plt):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
        for axis, name, title in zip(axes, ("full_drift", "mean_drift"), ("full-token drift", "mean-pooled drift")):
            shown = [(control, "random weights")] if control else []
            for table, label in [*shown, (trained, "trained")]:
                axis.scatter(getattr(table, name).ravel(), table.token_iou.ravel(), s=5, alpha=0.4, label=label)
            axis.set(xlabel=title, xscale="log")
            axis.legend()
        axes[0].set_ylabel("adjacent-step token IoU")
        return figure

    return save(out, "drift", {"trained": ours, "control": theirs, "paper": PAPER}, _paragraph(ours, theirs), draw)
