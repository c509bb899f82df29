"""Procedural captioned clips, rendered in batches with torch, as a pure function of (seed, step).

A clip is one coloured shape moving at constant speed over a background of one colour with lighter and darker
patches that are drawn anew for every clip. They cannot be known from the caption, only from the same place in other
frames: they make looking along time worth learning.

Rotary positions are relative: a token does not know where in the clip it is, so "moves left" could only be learned
as a relation between neighbouring frames, and in unlit worlds it was not. So the world is lit: a soft light
reddens the ground to the right, greens it to the bottom and brightens it with time. The model learns to draw that
light (a canvas has edges, and heads notice them), and with it every token knows where and when it is.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from heart_attention.tiny import scene
from heart_attention.tiny.silhouette import distance

CELL = 4  # speckle size in pixels
LATE = 4  # how many stretches count as the last
TIMELINE = 16  # frames of a whole clip at the native size
NEAR = 1.35  # radii around a shape's centre that count as near it: the same disc for every shape


@dataclass(frozen=True)
class World:
    """What may vary between clips."""

    radius: tuple[float, float]  # of shapes, as a share of the canvas' shorter side
    patch: int  # size in pixels of the ground's patches, half of them lighter, half darker
    contrast: float  # of patches, of the strongest that the program check reads as ground
    reach: float  # how far from the middle paths begin and end, of the canvas
    across: float  # how far they may lie to either side of it
    late: bool = False  # only the last stretches
    window: bool = False  # clips under half the native length are stretches of it, not all of it in fewer frames


# Shapes large enough for tokens of 8 x 8 pixels, wholly inside at every canvas, on a ground that asks for little.
CALM = World(radius=(0.15, 0.175), patch=16, contrast=0.5, reach=0.3, across=0.1)
# A short clip, down to a single picture, is cut out of a whole one: things look and move as they do at the native size.
CUT = replace(CALM, window=True)
LATE_CUT = replace(CUT, late=True)  # at the end of its way a shape is where it went
# What the codec was fitted to, unlit and on fine speckles: radius in pixels, speed in pixels a frame.
CODEC_RADIUS, CODEC_SPEED = (13.0, 18.0), (3.6, 4.8)


@dataclass
class Batch:
    """Clips as bytes in floats and their captions."""

    video: torch.Tensor  # [B, 3, T, H, W], -1..1
    captions: list[str]
    combos: list[scene.Combo]
    near: torch.Tensor  # [B, 1, T, H, W], 1 on the object and a little around it, else 0


def _uniform(n: int, low, high, rng: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(n, generator=rng)


def _moments(clips: int, frames: int, world: World, rng: torch.Generator) -> torch.Tensor:
    """When the frames of each clip are [B, T], from -1, where a whole clip begins, to 1, where it ends."""
    if not world.window or frames >= TIMELINE // 2:
        return torch.linspace(-1, 1, frames).expand(clips, frames)
    count = LATE if world.late else TIMELINE - frames + 1
    first = TIMELINE - frames - torch.randint(count, (clips, 1), generator=rng)
    return torch.linspace(-1, 1, TIMELINE)[first + torch.arange(frames)]


def _centres(time: torch.Tensor, size: tuple[int, int], direction: torch.Tensor, world: World, rng) -> torch.Tensor:
    """Paths [B, T, 2] that are in the middle of the canvas at half time, a little to either side of it."""
    extent = torch.tensor([size[1], size[0]], dtype=torch.float32)
    across = world.across * extent * (2 * torch.rand(len(direction), 1, generator=rng) - 1) * (direction == 0)
    return extent / 2 + across[:, None] + world.reach * extent * time[..., None] * direction[:, None]


def _light(time: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The scene's light [B, 3, T, H, W] at these moments [B, T]."""
    begin, end = torch.from_numpy(scene.light(2, *size)).permute(3, 0, 1, 2).split(1, 1)  # each [3, 1, H, W]
    part = (time[:, None, :, None, None] + 1) / 2
    return begin + part * (end - begin)


def _speckles(b: int, height: int, width: int, rng: torch.Generator) -> torch.Tensor:
    """Still per-clip brightness offsets [B, 1, 1, H, W]."""
    cells = 2 * torch.rand(b, 1, 1, -(-height // CELL), -(-width // CELL), generator=rng) - 1
    cells = cells.repeat_interleave(CELL, 3).repeat_interleave(CELL, 4)
    return scene.SPECKLE * cells[..., :height, :width]


def _patches(b: int, height: int, width: int, side: int, rng: torch.Generator) -> torch.Tensor:
    """Lighter and darker squares [B, 1, 1, H, W], each square by the toss of a coin."""
    coins = torch.randint(2, (b, 1, 1, -(-height // side), -(-width // side)), generator=rng)
    squares = (2.0 * coins - 1).repeat_interleave(side, 3).repeat_interleave(side, 4)
    return scene.SPECKLE * squares[..., :height, :width]


def _cover(shapes: list[str], centre: torch.Tensor, radius: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """How much of each pixel the shape covers [B, 1, T, H, W], with one pixel of antialiasing."""
    y = (torch.arange(size[0])[:, None] + 0.5 - centre[..., 1, None, None]).numpy()  # [B, T, H, 1]
    x = (torch.arange(size[1])[None, :] + 0.5 - centre[..., 0, None, None]).numpy()  # [B, T, 1, W]
    far = [distance(shape, x[i], y[i], float(radius[i])) for i, shape in enumerate(shapes)]
    return (0.5 - torch.from_numpy(np.stack(far))).clamp(0, 1)[:, None]


def draw(combos: list[scene.Combo], frames: int, size: tuple[int, int], rng: torch.Generator, world: World = CUT):
    """Clips [B, 3, T, H, W] in -1..1, and the discs around their shapes [B, 1, T, H, W]."""
    b, (height, width) = len(combos), size
    low, high = (min(size) * part for part in world.radius)
    radius = _uniform(b, low, high, rng)
    direction = torch.tensor([scene.MOTIONS[c[2]] for c in combos], dtype=torch.float32)
    time = _moments(b, frames, world, rng)
    centre = _centres(time, size, direction, world, rng)  # [B, T, 2]
    ground = _colours(scene.BACKGROUND_COLOURS, [c[3] for c in combos])
    ground = ground + world.contrast * _patches(b, height, width, world.patch, rng) + _light(time, size)
    return _paint(combos, centre, radius, ground.clamp(0, 255))


def _paint(combos: list[scene.Combo], centre: torch.Tensor, radius: torch.Tensor, ground: torch.Tensor):
    """Shapes before grounds [B, 3, T or 1, H, W] in 0..255: what `draw` returns."""
    size = ground.shape[-2:]
    paint = _colours(scene.OBJECT_COLOURS, [c[0] for c in combos])
    video = ground + _cover([c[1] for c in combos], centre, radius, size) * (paint - ground)
    return video / 127.5 - 1, _cover(["circle"] * len(combos), centre, NEAR * radius, size)


def _colours(known: dict[str, tuple[int, int, int]], names: list[str]) -> torch.Tensor:
    return torch.tensor([known[name] for name in names], dtype=torch.float32)[:, :, None, None, None]


def render(
    combos: list[scene.Combo], frames: int, size: tuple[int, int], rng: torch.Generator, world: World = CUT
) -> torch.Tensor:
    """Clips [B, 3, T, H, W] in -1..1 for the given combinations; size is (height, width)."""
    return draw(combos, frames, size, rng, world)[0]


def codec_clips(seed: int, step: int, clips: int, frames: int, size: tuple[int, int]) -> torch.Tensor:
    """What the codec is fitted to [B, 3, T, H, W]: unlit shapes, on speckles as fine as its patches."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
    combos, _ = _choose(clips, rng)
    radius = _uniform(clips, *CODEC_RADIUS, rng)
    direction = torch.tensor([scene.MOTIONS[c[2]] for c in combos], dtype=torch.float32)
    pace = direction * _uniform(clips, *CODEC_SPEED, rng)[:, None]
    half = pace.abs() * (frames - 1) / 2 + radius[:, None]  # [B, 2]
    extent = torch.tensor([size[1], size[0]], dtype=torch.float32)
    slack = (extent / 2 - half).clamp(min=0)  # paths stay inside where they fit, and cross the middle where not
    middle = extent / 2 + slack * (2 * torch.rand(clips, 2, generator=rng) - 1)
    time = torch.arange(frames) - (frames - 1) / 2
    centre = middle[:, None] + time[None, :, None] * pace[:, None]
    ground = _colours(scene.BACKGROUND_COLOURS, [c[3] for c in combos]) + _speckles(clips, *size, rng)
    return _paint(combos, centre, radius, ground.clamp(0, 255))[0]


def _pick(rng: torch.Generator, n: int) -> int:
    return int(torch.randint(n, (1,), generator=rng))


def _choose(size: int, rng: torch.Generator) -> tuple[list[scene.Combo], list[str]]:
    """Combinations for a batch and their captions."""
    chosen = [TRAIN[_pick(rng, len(TRAIN))] for _ in range(size)]
    return chosen, [scene.caption(c, _pick(rng, len(scene.TEMPLATES)), _pick(rng, len(scene.VERBS))) for c in chosen]


def batch(seed: int, step: int, size: int, frames: int, pixels: tuple[int, int], world: World = CUT) -> Batch:
    """The training batch of a step: the same (seed, step) always gives the same clips and captions."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
    chosen, captions = _choose(size, rng)
    video, near = draw(chosen, frames, pixels, rng, world)
    return Batch(video, captions, chosen, near)


TRAIN = scene.splits()["train"]
