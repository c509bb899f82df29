"""Procedural captioned clips, rendered in batches with torch, as a pure function of (seed, step).

A clip is one coloured shape moving at constant speed over a background of one colour with lighter and darker
patches (in early training: fine speckles) that are drawn anew for every clip. They cannot be known from the
caption, only from the same place in other frames: they make looking along time worth learning.

Rotary positions are relative: a token does not know where in the clip it is, so "moves left" could only be learned
as a relation between neighbouring frames, and in several worlds it was not. So the last worlds are lit: a soft light
reddens the ground to the right, greens it to the bottom and brightens it with time. The model learns to draw that
light (a canvas has edges, and heads notice them), and with it every token knows where and when it is.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from heart_attention.tiny import scene
from heart_attention.tiny.silhouette import distance

CELL = 4  # speckle size in pixels
TIMELINE = 16  # frames of a whole clip at the native size
NEAR = 1.35  # radii around a shape's centre that count as near it: the same disc for every shape


@dataclass(frozen=True)
class World:
    """What may vary between clips: radius in pixels, speed in pixels a frame, strength of the afterglows."""

    radius: tuple[float, float]
    speed: tuple[float, float]
    glow: tuple[float, ...] = ()  # opacity of the shape as it was one, two, ... frames ago
    room: float = 1.0  # how much of the free room around its path a shape may use; 0: always through the middle
    belt: bool = False  # the ground moves with the shape
    patch: int = 0  # size in pixels of the ground's patches, half of them lighter, half darker; 0: speckles only
    lit: bool = False  # light that tells where and when one is, and paths that keep to it:
    reach: float = 0.3  # how far from the middle they begin and end, of the canvas
    across: float = 0.12  # how far they may lie to either side of it
    share: tuple[float, float] | None = None  # radius as a share of the canvas' shorter side, instead of pixels
    contrast: float = 1.0  # of patches and speckles, of the strongest that the program check reads as ground
    window: bool = False  # clips under half the native length are stretches of it, not all of it in fewer frames


SLOW = World(radius=(13.0, 18.0), speed=(3.6, 4.8))
FAST = World(radius=(15.0, 20.0), speed=(8.0, 8.0), glow=(0.45, 0.2))
CENTRED = World(radius=(15.0, 20.0), speed=(8.0, 8.0), glow=(0.45, 0.2), room=0.2)
# Ground and shape move as one: every token, not only the few under the shape, could learn from "left" where the
# same thing was a frame ago. Two tokens a frame and coarse patches make looking elsewhere than ahead useless.
BELT = World(radius=(17.0, 23.0), speed=(8.0, 8.0), room=0.6, belt=True)
FAST_BELT = World(radius=(13.0, 16.0), speed=(16.0, 16.0), belt=True)
COARSE_BELT = World(radius=(15.0, 19.0), speed=(16.0, 16.0), belt=True, patch=16)
# A ground of coarse patches that stands still, as before most cameras: what a place looks like is known from the
# same place in other frames, also under much noise.
STILL = World(radius=(17.0, 23.0), speed=(8.0, 8.0), room=0.6, patch=16)
# The ground is lit: redder to the right, greener to the bottom, brighter with time. Rotary positions are relative,
# so this is how a token can know where and when it is, and what "left" means for it: there at the begin, here now.
LIT = World(radius=(13.0, 18.0), speed=(0.0, 0.0), patch=16, lit=True)
LIT_SHORT = replace(LIT, radius=(15.0, 21.0), reach=0.25, across=0.25)
LIT_WIDE, LIT_NARROW = replace(LIT, across=0.25), replace(LIT, across=0.05)
# Shapes large enough for tokens of 8 x 8 pixels, wholly inside at every canvas, on a ground that asks for less.
CALM = replace(LIT, across=0.1, share=(0.15, 0.175), contrast=0.5)
# A short clip, down to a single picture, is cut out of a whole one: things look and move as they do at the native size.
CUT = replace(CALM, window=True)


@dataclass
class Batch:
    """Clips as bytes in floats and their captions."""

    video: torch.Tensor  # [B, 3, T, H, W], -1..1
    captions: list[str]
    combos: list[scene.Combo]
    near: torch.Tensor | None = None  # [B, 1, T, H, W], 1 on the object and a little around it, else 0
    alike: int = 1  # how many clips in a row differ in nothing but their shapes


def _uniform(n: int, low, high, rng: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(n, generator=rng)


def _centres(frames: int, size: tuple[int, int], step: torch.Tensor, radius: torch.Tensor, world: World, rng):
    """Straight paths [B, T, 2] that stay inside the canvas where they fit, and cross its middle where not."""
    half = step.abs() * (frames - 1) / 2 + radius[:, None]  # [B, 2]
    extent = torch.tensor([size[1], size[0]], dtype=torch.float32)
    slack = world.room * (extent / 2 - half).clamp(min=0)
    middle = extent / 2 + slack * (2 * torch.rand(len(step), 2, generator=rng) - 1)
    time = torch.arange(frames) - (frames - 1) / 2
    return middle[:, None] + time[None, :, None] * step[:, None]


def _moments(clips: int, frames: int, world: World, rng: torch.Generator) -> torch.Tensor:
    """When the frames of each clip are [B, T], from -1, where a whole clip begins, to 1, where it ends."""
    if not world.window or frames >= TIMELINE // 2:
        return torch.linspace(-1, 1, frames).expand(clips, frames)
    first = torch.randint(TIMELINE - frames + 1, (clips, 1), generator=rng)
    return torch.linspace(-1, 1, TIMELINE)[first + torch.arange(frames)]


def _lit_centres(time: torch.Tensor, size: tuple[int, int], direction: torch.Tensor, world: World, rng) -> torch.Tensor:
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


def _belt(step: torch.Tensor, frames: int, size: tuple[int, int], patch: int, rng: torch.Generator) -> torch.Tensor:
    """Brightness offsets [B, 1, T, H, W] of grounds that move by `step` [B, 2] pixels (x, y) a frame."""
    height, width = size
    moved = [[(round(float(sx) * t), round(float(sy) * t)) for t in range(frames)] for sx, sy in step]
    margin = max(abs(d) for path in moved for xy in path for d in xy)
    full = (height + 2 * margin, width + 2 * margin)
    wide = _patches(len(step), *full, patch, rng) if patch else _speckles(len(step), *full, rng)
    wide = wide[:, :, 0]  # [B, 1, H', W']
    return torch.stack(
        [
            torch.stack([w[:, margin - y : margin - y + height, margin - x : margin - x + width] for x, y in path], 1)
            for w, path in zip(wide, moved, strict=True)
        ]
    )


def _cover(shapes: list[str], centre: torch.Tensor, radius: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """How much of each pixel the shape covers [B, 1, T, H, W], with one pixel of antialiasing."""
    y = (torch.arange(size[0])[:, None] + 0.5 - centre[..., 1, None, None]).numpy()  # [B, T, H, 1]
    x = (torch.arange(size[1])[None, :] + 0.5 - centre[..., 0, None, None]).numpy()  # [B, T, 1, W]
    far = [distance(shape, x[i], y[i], float(radius[i])) for i, shape in enumerate(shapes)]
    return (0.5 - torch.from_numpy(np.stack(far))).clamp(0, 1)[:, None]


def _ground(
    combos: list[scene.Combo], time: torch.Tensor, size: tuple[int, int], step, world: World, rng
) -> torch.Tensor:
    """What lies behind the shape [B, 3, T or 1, H, W], in 0..255: colour, patches or speckles, light."""
    b, (height, width) = len(combos), size
    if world.belt:
        speckles = _belt(step, time.shape[1], size, world.patch, rng)
    else:
        speckles = _patches(b, height, width, world.patch, rng) if world.patch else _speckles(b, height, width, rng)
    colour = torch.tensor([scene.BACKGROUND_COLOURS[c[3]] for c in combos], dtype=torch.float32)
    ground = colour[:, :, None, None, None] + world.contrast * speckles
    if world.lit:
        ground = ground + _light(time, size)
    return ground.clamp(0, 255)


def draw(
    combos: list[scene.Combo], frames: int, size: tuple[int, int], rng: torch.Generator, world: World, alike: int = 1
):
    """Clips [B, 3, T, H, W] in -1..1, and the discs around their shapes [B, 1, T, H, W].

    Of every `alike` clips in a row the first says where, how large and before what ground the shape is.
    """
    firsts = combos[::alike]
    low, high = world.radius if world.share is None else (min(size) * part for part in world.share)
    radius = _uniform(len(firsts), low, high, rng)
    direction = torch.tensor([scene.MOTIONS[c[2]] for c in firsts], dtype=torch.float32)
    step = direction * _uniform(len(firsts), *world.speed, rng)[:, None]
    time = _moments(len(firsts), frames, world, rng)
    if world.lit:
        centre = _lit_centres(time, size, direction, world, rng)  # [B, T, 2]
    else:
        centre = _centres(frames, size, step, radius, world, rng)
    ground = _ground(firsts, time, size, step, world, rng)
    radius, step, centre, ground = (part.repeat_interleave(alike, 0) for part in (radius, step, centre, ground))
    paint = torch.tensor([scene.OBJECT_COLOURS[c[0]] for c in combos], dtype=torch.float32)
    cover = _cover([c[1] for c in combos], centre, radius, size)
    for age, opacity in enumerate(world.glow, start=1):
        before = _cover([c[1] for c in combos], centre - age * step[:, None], radius, size)
        cover = torch.maximum(cover, opacity * before)
    video = ground + cover * (paint[:, :, None, None, None] - ground)
    return video / 127.5 - 1, _cover(["circle"] * len(combos), centre, NEAR * radius, size)


def render(
    combos: list[scene.Combo], frames: int, size: tuple[int, int], rng: torch.Generator, world: World = LIT
) -> torch.Tensor:
    """Clips [B, 3, T, H, W] in -1..1 for the given combinations; size is (height, width)."""
    return draw(combos, frames, size, rng, world)[0]


def _pick(rng: torch.Generator, n: int) -> int:
    return int(torch.randint(n, (1,), generator=rng))


def _choose(size: int, alike: int, rng: torch.Generator) -> list[scene.Combo]:
    """Combinations for a batch; with `alike`, as many of each colour, motion and ground, one of each shape."""
    if alike == 1:
        return [TRAIN[_pick(rng, len(TRAIN))] for _ in range(size)]
    if alike != len(scene.SHAPES) or size % alike:
        raise ValueError(f"{size} clips cannot come in sets of {alike}: a set has one of each of {scene.SHAPES}")
    chosen = [WHOLE[_pick(rng, len(WHOLE))] for _ in range(size // alike)]
    return [(colour, shape, motion, ground) for colour, motion, ground in chosen for shape in scene.SHAPES]


def batch(
    seed: int, step: int, size: int, frames: int, pixels: tuple[int, int], world: World = LIT, alike: int = 1
) -> Batch:
    """The training batch of a step: the same (seed, step) always gives the same clips and captions."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
    chosen = _choose(size, alike, rng)
    captions = [scene.caption(c, _pick(rng, len(scene.TEMPLATES)), _pick(rng, len(scene.VERBS))) for c in chosen]
    video, near = draw(chosen, frames, pixels, rng, world, alike)
    return Batch(video, captions, chosen, near, alike)


TRAIN = scene.splits()["train"]
# What can be trained with every shape: (colour, motion, ground) of which no shape is held out.
WHOLE = sorted({(c, m, g) for c, _, m, g in TRAIN} - {(c, m, g) for c, _, m, g in set(scene.combos()) - set(TRAIN)})
