"""Observation I of the paper: masks of some heads stay alike from step to step, those of others do not."""

from __future__ import annotations

import numpy as np

from .adjacent import Table
from .common import save


def _summary(table: Table) -> dict:
    by_head = table.token_iou.mean((0, 1)).ravel()
    blocks = table.block_iou.mean((0, 1)).ravel()
    return {
        "token_iou_mean": float(table.token_iou.mean()),
        "token_iou_head_min": float(by_head.min()),
        "token_iou_head_max": float(by_head.max()),
        "token_iou_head_std": float(by_head.std()),
        "block_iou_mean": float(table.block_iou.mean()),
        "block_iou_head_min": float(blocks.min()),
        "block_iou_head_max": float(blocks.max()),
        "prompt_spread": float(np.ptp(table.token_iou.mean((1, 2, 3)))),
    }


def _paragraph(trained: dict, control: dict) -> str:
    spread, flat = (s["token_iou_head_max"] - s["token_iou_head_min"] for s in (trained, control))
    verdict = "as the paper finds" if spread > max(0.1, 1.5 * flat) else "less than the paper's figures suggest"
    return (
        f"Adjacent-step token IoU (Eq. 1, 256 query rows a head) is {trained['token_iou_mean']:.3f} on average and "
        f"ranges over heads from {trained['token_iou_head_min']:.3f} to {trained['token_iou_head_max']:.3f}: heads differ "
        f"in how long their masks last, {verdict}. Random weights of the same shape give "
        f"{control['token_iou_mean']:.3f}, from {control['token_iou_head_min']:.3f} to {control['token_iou_head_max']:.3f}. "
        f"IoU of XAttention's block masks, another quantity, is {trained['block_iou_mean']:.3f} "
        f"(random weights {control['block_iou_mean']:.3f})."
    )


def run(trained: Table, control: Table, out) -> dict:
    """Numbers, figure and paragraph."""
    ours, theirs = _summary(trained), _summary(control)

    def draw(plt):
        figure, axes = plt.subplots(1, 3, figsize=(15, 4))
        layer = trained.token_iou.shape[2] // 2
        for head in range(trained.token_iou.shape[3]):
            axes[0].plot(trained.token_iou.mean(0)[:, layer, head], label=f"head {head}")
        axes[0].set(title=f"heads of layer {layer}", xlabel="step", ylabel="adjacent-step token IoU", ylim=(0, 1))
        axes[0].legend()
        for i, curve in enumerate(trained.token_iou.mean((2, 3))):
            axes[1].plot(curve, label=f"prompt {i}")
        axes[1].plot(control.token_iou.mean((0, 2, 3)), "k--", label="random weights")
        axes[1].set(title="prompts, all layers and heads", xlabel="step", ylim=(0, 1))
        axes[1].legend()
        image = axes[2].imshow(trained.token_iou[0].mean(2).T, aspect="auto", vmin=0, vmax=1)
        axes[2].set(title="layer × step, first prompt", xlabel="step", ylabel="layer")
        figure.colorbar(image, ax=axes[2])
        return figure

    return save(out, "iou", {"trained": ours, "control": theirs}, _paragraph(ours, theirs), draw)
