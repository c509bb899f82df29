"""Observation I of the paper: masks of some heads stay alike from step to step, those of others do not."""

from __future__ import annotations

from typing import Any

import numpy as np

from .adjacent import Table
from .common import draw_layer, save


def _summary(table: Table) -> dict:
    by_head = table.token_iou.mean((0, 1)).ravel()
    return {
        "token_iou_mean": float(table.token_iou.mean()),
        "token_iou_head_min": float(by_head.min()),
        "token_iou_head_max": float(by_head.max()),
        "token_iou_head_std": float(by_head.std()),
        "mask_iou": {name: float(values.mean()) for name, values in table.mask_iou.items()},
        "prompt_spread": float(np.ptp(table.token_iou.mean((1, 2, 3)))),
    }


def _paragraph(trained: dict, control: dict | None) -> str:
    spread, flat = (s["token_iou_head_max"] - s["token_iou_head_min"] if s else 0.0 for s in (trained, control))
    verdict = "as the paper finds" if spread > max(0.1, 1.5 * flat) else "less than the paper's figures suggest"
    text = (
        f"Adjacent-step token IoU (Eq. 1, 256 query rows a head) is {trained['token_iou_mean']:.3f} on average and "
        f"ranges over heads from {trained['token_iou_head_min']:.3f} to {trained['token_iou_head_max']:.3f}: heads differ "
        f"in how long their masks last, {verdict}. " + _masks(trained["mask_iou"])
    )
    if control is None:
        return text
    return (
        f"{text} Random weights of the same shape give {control['token_iou_mean']:.3f}, from "
        f"{control['token_iou_head_min']:.3f} to {control['token_iou_head_max']:.3f}; {_masks(control['mask_iou'])}"
    )


def _masks(means: dict[str, float]) -> str:
    listed = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    return f"IoU of predicted masks, another quantity: {listed}."


def run(trained: Table, control: Table | None, out: Any, seed: int = 0) -> dict:
    """Numbers, figure and paragraph; the figure shows the heads of one layer, drawn by the seed."""
    ours, theirs = _summary(trained), None if control is None else _summary(control)
    layer = draw_layer(trained.token_iou.shape[2], seed)

    def draw(plt):
        figure, axes = plt.subplots(1, 3, figsize=(15, 4))
        for head in range(trained.token_iou.shape[3]):
            axes[0].plot(trained.token_iou.mean(0)[:, layer, head], label=f"head {head}")
        axes[0].set(title=f"heads of layer {layer}", xlabel="step", ylabel="adjacent-step token IoU", ylim=(0, 1))
        axes[0].legend()
        for i, curve in enumerate(trained.token_iou.mean((2, 3))):
            axes[1].plot(curve, label=f"prompt {i}")
        if control:
            axes[1].plot(control.token_iou.mean((0, 2, 3)), "k--", label="random weights")
        axes[1].set(title="prompts, all layers and heads", xlabel="step", ylim=(0, 1))
        axes[1].legend()
        image = axes[2].imshow(trained.token_iou[0].mean(2).T, aspect="auto", vmin=0, vmax=1)
        axes[2].set(title="layer × step, first prompt", xlabel="step", ylabel="layer")
        figure.colorbar(image, ax=axes[2])
        return figure

    return save(out, "iou", {"layer": layer, "trained": ours, "control": theirs}, _paragraph(ours, theirs), draw)
