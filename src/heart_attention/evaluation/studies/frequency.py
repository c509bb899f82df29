"""The paper's Table 1: perturbations of equal size in different frequency bands of the velocity, and their harm."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...calibration.measure.velocity_error import BANDS, apply_weight
from ...models.inspect import transformers_of
from .. import metrics, video
from .common import save

PAPER = {"LL": 28.19, "LH": 29.58, "HL": 29.85, "HH": 30.35}  # PSNR in dB, Wan2.1-1.3B
# SSIM and LPIPS
PAPER_MORE = {"LL": (0.8452, 0.1024), "LH": (0.8485, 0.0970), "HL": (0.8529, 0.0818), "HH": (0.8634, 0.0791)}
SIZE = 0.1  # of the noise, in norms of the velocity


def band_noise(like: torch.Tensor, band: int, size: float, generator: torch.Generator) -> torch.Tensor:
    """Noise that lies in one band only, with norm `size` times that of `like` [B, C, T, H, W]."""
    weights = [0.0] * 4
    weights[band] = 1.0
    noise = torch.randn(like.shape, generator=generator).to(like.device)
    noise = apply_weight(noise.double(), weights)  # with weights of 0 and 1 this is the projection onto the band
    return (noise * (size * like.double().norm() / noise.norm().clamp(min=1e-30))).to(like.dtype)


@contextmanager
def perturbed(pipe, band: int, size: float, seed: int):
    """Add the noise to every velocity; both guidance branches of a step get the same, so guidance leaves it as it is."""
    state: dict = {"timestep": None, "noise": None}
    generator = torch.Generator().manual_seed(seed)

    def hook(module, args, kwargs, output):
        timestep = kwargs.get("timestep", args[1] if len(args) > 1 else None)
        velocity = output[0]
        if state["timestep"] is None or not torch.equal(timestep, state["timestep"]):
            state["timestep"] = timestep.clone()
            state["noise"] = band_noise(velocity, band, size, generator)
        return (
            (velocity + state["noise"], *output[1:])
            if isinstance(output, tuple)
            else type(output)(velocity + state["noise"])
        )

    handle = transformers_of(pipe)[0].register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _generate(pipe, call: dict, prompt: str, seed: int):
    generator = torch.Generator("cpu").manual_seed(seed)
    return video.to_uint8(pipe(prompt, generator=generator, output_type="np", **call).frames[0])


def plan(call: dict, prompts: list[str], seed: int, control: bool) -> list[tuple[int, dict]]:
    """All prompts; the control has one."""
    settings = {"call": call, "size": SIZE, "names": metrics.defaults(), "seed": seed}
    return [(i, settings) for i in range(1 if control else len(prompts))]


def measure(pipe: Any, text: str, prompt: int, call: dict, size: float, names: Sequence[str], seed: int) -> dict:
    """Metrics of the perturbed videos of one prompt against the unperturbed, by band."""
    reference, found = _generate(pipe, call, text, seed + prompt), {}
    for b, band in enumerate(BANDS):
        with perturbed(pipe, b, size, seed + prompt):
            frames = _generate(pipe, call, text, seed + prompt)
        found[band] = metrics.compare(frames, reference, tuple(names))
    return found


def _mean(parts: list[dict]) -> dict:
    """The mean over prompts, by band and metric."""
    return {b: {m: sum(p[b][m] for p in parts) / len(parts) for m in parts[0][b]} for b in BANDS}


def _paragraph(ours: dict, control: dict | None, size: float) -> str:
    order = sorted(BANDS, key=lambda b: ours[b]["psnr"])
    same = order == sorted(BANDS, key=lambda b: PAPER[b])
    verdict = (
        "the paper's order" if same else f"not the paper's order ({' < '.join(sorted(BANDS, key=lambda b: PAPER[b]))})"
    )
    listed = ", ".join(f"{b} {ours[b]['psnr']:.2f}" for b in BANDS)
    text = (
        f"Noise of {size:.0%} of the velocity's norm, put into one band at every step, leaves PSNR (dB) of {listed}; from most "
        f"to least harmful: {' < '.join(order)}, {verdict}. Paper: {', '.join(f'{b} {v}' for b, v in PAPER.items())}."
    )
    if control is None:
        return text
    listed = ", ".join(f"{b} {control[b]['psnr']:.2f}" for b in BANDS)
    return f"{text} Random weights: {listed}."


def run(trained: list[dict], control: list[dict] | None, out: Any, seed: int = 0) -> dict:
    """Numbers, figure and paragraph."""
    ours, theirs = _mean(trained), None if control is None else _mean(control)

    def draw(plt):
        figure, axis = plt.subplots(figsize=(6, 4))
        axis.bar([i - 0.2 for i in range(4)], [ours[b]["psnr"] for b in BANDS], 0.4, label="trained")
        if theirs:
            axis.bar([i + 0.2 for i in range(4)], [theirs[b]["psnr"] for b in BANDS], 0.4, label="random weights")
        axis.plot(range(4), [PAPER[b] for b in BANDS], "k_", markersize=24, label="paper")
        axis.set(xticks=range(4), xticklabels=BANDS, ylabel="PSNR dB, higher is less harm")
        axis.legend()
        return figure

    numbers = {"size": SIZE, "trained": ours, "control": theirs, "paper": PAPER}
    return save(out, "frequency", numbers, _paragraph(ours, theirs, SIZE), draw)
