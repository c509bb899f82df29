"""What a wrong word costs: by how much the loss rises when the caption says another one than the clip shows."""

import torch
from torch.nn import functional

from heart_attention.tiny.scene import BACKGROUND_COLOURS, MOTIONS, OBJECT_COLOURS, SHAPES, Combo, caption, splits

from . import data, model


def wrong_word_costs(pipe, clips: int = 32, frames: int = 6, side: int = 80) -> dict:
    """By how much the loss rises when one word of each caption is exchanged, by kind of word and noise level."""
    batch = data.batch(123, 5, clips, frames, (side, side))
    x = model.encode(batch.video, model.fit_codec())
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    kinds = {"colour": OBJECT_COLOURS, "shape": SHAPES, "motion": MOTIONS, "background": BACKGROUND_COLOURS}
    rows = {}
    for sigma in (0.95, 0.9, 0.8, 0.6):
        right = _loss(pipe, x, noise, sigma, batch.combos)
        rows[str(sigma)] = {
            kind: round(
                _loss(pipe, x, noise, sigma, [_exchange(c, i, list(words)) for c in batch.combos]) / right - 1, 4
            )
            for i, (kind, words) in enumerate(kinds.items())
        }
    return {"clips": clips, "tokens": [frames, side // 8, side // 8], "rise": rows}


def _exchange(combo: Combo, place: int, words: list[str]) -> Combo:
    """The combination with the word at a place exchanged for the next of its kind."""
    other = words[(words.index(combo[place]) + 1) % len(words)]
    return (*combo[:place], other, *combo[place + 1 :])


def _loss(pipe, x: torch.Tensor, noise: torch.Tensor, sigma: float, combos: list[Combo]) -> float:
    errors = _errors(pipe, x, noise, sigma, combos, torch.ones_like(x[:, :1]))
    return _mean(errors)


@torch.no_grad()
def _errors(pipe, x, noise, sigma: float, combos: list[Combo], near: torch.Tensor) -> list[float]:
    """Squared error of the predicted velocity, clip by clip, where `near` [B, 1, T, H, W] is one."""
    captions = [caption(c) for c in combos]
    text, _ = pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=64)
    time_step = torch.full((len(x),), 1000 * sigma)
    velocity = pipe.transformer((1 - sigma) * x + sigma * noise, time_step, text, return_dict=False)[0]
    return (near * (velocity - (noise - x)).square()).mean((1, 2, 3, 4)).tolist()


def wrong_shape_costs(pipe, clips: int = 16, frames: int = 4, side: int = 96) -> dict:
    """By how much the loss near the object rises when a shape is called another: {noise level: {"ring as circle": ...}}."""
    combos, rng = splits()["heldout"][:clips], torch.Generator().manual_seed(9)
    video, near = data.draw(combos, frames, (side, side), rng, data.CALM)
    x = model.encode(video, model.fit_codec())
    near = functional.avg_pool3d(near, (1, model.PATCH, model.PATCH))
    noise = torch.randn(x.shape, generator=rng)
    rows = {}
    for sigma in (0.95, 0.85, 0.7, 0.5, 0.3):
        right = _errors(pipe, x, noise, sigma, combos, near)
        called = {s: _errors(pipe, x, noise, sigma, [(c, s, m, g) for c, _, m, g in combos], near) for s in SHAPES}
        rows[str(sigma)] = {
            f"{shown} as {said}": round(_mean([called[said][i] / right[i] - 1 for i in _places(combos, shown)]), 3)
            for shown in SHAPES
            for said in SHAPES
            if said != shown and _places(combos, shown)
        }
    return {"clips": clips, "tokens": [frames, side // 8, side // 8], "rise": rows}


def _places(combos: list[Combo], shape: str) -> list[int]:
    return [i for i, c in enumerate(combos) if c[1] == shape]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
