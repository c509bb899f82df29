"""The little world of the embedded model: its words, its colours, its prompts, and the program check.

Everything here is numpy, so that the training data (``tools/train_tiny/data.py``) and the package
share one definition and importing it stays cheap.
"""

import itertools
import random
import re
from typing import Any

import numpy as np

from . import silhouette

OBJECT_COLOURS = {
    "red": (235, 35, 35),
    "green": (40, 215, 60),
    "blue": (45, 90, 255),
    "yellow": (250, 225, 40),
    "purple": (180, 50, 230),
    "orange": (255, 140, 20),
    "white": (250, 250, 250),
    "cyan": (40, 225, 235),
}
# Disjoint from the object colours, and at least 100 (of 255, Euclidean) away from each of them, so that one
# threshold separates an object from any background, speckles included.
BACKGROUND_COLOURS = {
    "black": (34, 34, 38),
    "gray": (112, 112, 112),
    "navy": (22, 34, 120),
    "maroon": (110, 20, 36),
    "teal": (10, 95, 95),
    "beige": (216, 196, 156),
}
SHAPES = ("circle", "square", "triangle", "ring")
MOTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # (x, y), y downwards
VERBS = ("moves", "slides", "drifts")
TEMPLATES = (
    "a {colour} {shape} {verb} {motion} on a {background} background",
    "on a {background} background a {colour} {shape} {verb} {motion}",
    "{colour} {shape} {verb} {motion}, {background} background",
)
SPECKLE = 30  # patches and speckles lighten or darken a background by at most this much
LIGHT = 32  # how much the light changes a colour from the middle to an edge, and from half time to either end
OBJECT_RANGE = 80.0  # how far a pixel may be off an object's colour
STEADY = 0.12  # how far an object's area may vary over its frames, standard deviation over mean
GROUND_RANGE = 45.0  # how far (of 255, Euclidean) a pixel may be off its ground as patches and light change it

Combo = tuple[str, str, str, str]  # (colour, shape, motion, background)


def combos() -> list[Combo]:
    """All 768 (colour, shape, motion, background) combinations, in a fixed order."""
    return list(itertools.product(OBJECT_COLOURS, SHAPES, MOTIONS, BACKGROUND_COLOURS))


def caption(combo: Combo, template: int = 0, verb: int = 0) -> str:
    """The sentence for a combination."""
    colour, shape, motion, background = combo
    sentence = TEMPLATES[template].format(
        colour=colour, shape=shape, motion=motion, background=background, verb=VERBS[verb]
    )
    return sentence.replace("a orange", "an orange")


def parse(prompt: str) -> Combo:
    """(colour, shape, motion, background) named in a prompt; ValueError when one is missing."""
    words = re.findall(r"[a-z]+", prompt.lower())
    found = []
    for kind in (OBJECT_COLOURS, SHAPES, MOTIONS, BACKGROUND_COLOURS):
        hits = [w for w in words if w in kind]
        if len(hits) != 1:
            raise ValueError(f"expected one of {sorted(kind)} in the prompt, found {hits}: {prompt!r}")
        found.append(hits[0])
    return tuple(found)


def _balanced(pool: list[Combo], n: int, rng: random.Random) -> list[Combo]:
    """n combinations from the pool in which every word of each kind is used about equally often."""
    counts: dict[tuple[int, str], int] = {}
    chosen: list[Combo] = []
    for _ in range(n):
        best = min(
            (c for c in pool if c not in chosen),
            key=lambda c: (sum(counts.get(kw, 0) ** 2 for kw in enumerate(c)), rng.random()),
        )
        chosen.append(best)
        for kw in enumerate(best):
            counts[kw] = counts.get(kw, 0) + 1
    return chosen


def splits() -> dict[str, list[Combo]]:
    """Which combinations are for what: ``heldout`` (24) and ``demo`` (8) are never trained on, nor used to calibrate."""
    rng = random.Random(20240601)
    unseen = _balanced(combos(), 32, rng)
    rest = [c for c in combos() if c not in unseen]
    return {
        "heldout": unseen[:24],
        "demo": unseen[24:],
        "calibration": _balanced(rest, 12, rng),
        "train": rest,  # calibration prompts are training prompts, as they would be for a downloaded model
    }


def prompts(split: str = "heldout") -> list[str]:
    """Prompts of a split, all in the first template."""
    known = splits()
    if split not in known:
        raise ValueError(f"split must be one of {sorted(known)}, not {split!r}")
    return [caption(c) for c in known[split]]


def light(frames: int, height: int, width: int) -> np.ndarray:
    """What the light adds to the ground's colour [T, H, W, 3]: red to the right, green to the bottom, more with time."""
    axes = [np.linspace(-1, 1, n, dtype=np.float32) for n in (frames, height, width)]
    t, y, x = np.meshgrid(*axes, indexing="ij")
    by_axis = t[..., None] * (1, 1, 1) + y[..., None] * (-0.5, 1, -0.5) + x[..., None] * (1, 0, -1)
    return LIGHT * by_axis.astype(np.float32)


def _nearest(rgb: np.ndarray, palette: dict[str, tuple[int, int, int]]) -> str:
    return min(palette, key=lambda name: float(np.sum((rgb - np.array(palette[name])) ** 2)))


def _grounds(shape: tuple[int, ...], ground: tuple[int, int, int]):
    """The lit ground [T, H, W, 3] of a clip, lightened and darkened by patches, strength by strength."""
    lit = np.array(ground, dtype=np.float32) + light(*shape[:3])
    for patch in np.linspace(-SPECKLE, SPECKLE, 5):
        yield np.clip(lit + np.float32(patch), 0, 255)


def _explained(pixels: np.ndarray, ground: tuple[int, int, int]) -> np.ndarray:
    """Which pixels of a clip [T, H, W, 3] are this ground, lit and lightened or darkened by a patch."""
    off = np.min([_apart(pixels, shown) for shown in _grounds(pixels.shape, ground)], axis=0)
    return off <= GROUND_RANGE


def _apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Euclidean distance of colours [..., 3]."""
    return np.sqrt(((one - other) ** 2).sum(-1))


def _object(pixels: np.ndarray, paint: tuple[int, int, int], ground: tuple[int, int, int]) -> np.ndarray:
    """Which pixels [T, H, W] are nearer to the object's colour than to the ground, and about on the way between them."""
    colour = np.array(paint, dtype=np.float32)
    to_paint = _apart(pixels, colour)
    found = np.ones(pixels.shape[:3], dtype=bool)
    between = np.zeros_like(found)
    for shown in _grounds(pixels.shape, ground):
        to_ground = _apart(pixels, shown)
        found &= to_paint < to_ground
        between |= to_paint + to_ground <= _apart(shown, colour) + OBJECT_RANGE
    return found & between


def _painted(pixels: np.ndarray) -> np.ndarray:
    """Which pixels have about the colour of some object: what is neither this nor ground is a fault, not an object."""
    paints = np.array(list(OBJECT_COLOURS.values()), dtype=np.float32)
    off = [_apart(pixels, paint) for paint in paints]
    return np.min(off, axis=0) <= OBJECT_RANGE


def read_scene(frames: np.ndarray) -> dict:
    """Read colour, motion and silhouette from frames by thresholding. frames [T, H, W, 3], 0..1 or 0..255."""
    pixels = np.asarray(frames, dtype=np.float32)
    if pixels.ndim != 4 or pixels.shape[-1] != 3:
        raise ValueError(f"frames must be [T, H, W, 3], not {pixels.shape}")
    if pixels.max() <= 1.5:
        pixels = pixels * 255.0
    grounds = {name: _explained(pixels, colour) for name, colour in BACKGROUND_COLOURS.items()}  # each [T, H, W]
    background = max(grounds, key=lambda name: int(grounds[name].sum()))
    apart = ~grounds[background] & _painted(pixels)
    seen: dict[str, Any] = {"background": background, "colour": None, "motion": None, "path": None, "silhouette": None}
    seen["area"] = float(apart.mean())
    # Fewer pixels than a disc of 5 px radius, in the median frame, is no object.
    if np.median(apart.sum((1, 2))) < 80:
        return seen
    seen["colour"] = _nearest(np.median(pixels[apart], axis=0), OBJECT_COLOURS)
    seen["path"] = _centroids(apart)
    seen["motion"] = _direction(seen["path"])
    masks = _object(pixels, OBJECT_COLOURS[seen["colour"]], BACKGROUND_COLOURS[background])
    return {**seen, **_read_silhouette(masks)}


def _read_silhouette(masks: np.ndarray) -> dict:
    """Shape, overlap with it, pieces and hole by frame, and how the area varies; masks [T, H, W]."""
    overlaps = silhouette.match(masks, SHAPES)  # [T, shapes]
    return {
        "silhouette": masks,
        "shapes": [SHAPES[i] if most else None for i, most in zip(overlaps.argmax(1), overlaps.max(1), strict=True)],
        "overlap": float(overlaps.max(1).mean()),
        "pieces": [silhouette.pieces(m) for m in masks],
        "holes": [silhouette.has_hole(m) for m in masks],
        "variation": silhouette.variation(masks),
    }


def _centroids(mask: np.ndarray) -> np.ndarray:
    """Centre of the masked pixels in each frame that has some: rows (frame, x, y)."""
    rows = []
    for t, m in enumerate(mask):
        y, x = np.nonzero(m)
        if len(x) >= 20:
            rows.append((t, x.mean(), y.mean()))
    return np.array(rows)


def _direction(path: np.ndarray) -> str | None:
    """The one of four directions that a straight line through the centroids has; None below 1 px a frame."""
    if len(path) < 2:
        return None
    vx, vy = (np.polyfit(path[:, 0], path[:, i], 1)[0] for i in (1, 2))
    if max(abs(vx), abs(vy)) < 1.0:
        return None
    if abs(vx) >= abs(vy):
        return "right" if vx > 0 else "left"
    return "down" if vy > 0 else "up"


def check(frames: np.ndarray, prompt: str) -> dict:
    """Does the clip show what the prompt says? By thresholding, no learned judge.

    Args:
        frames: [T, H, W, 3], floats in 0..1 or bytes.
        prompt: a sentence with one object colour, shape, motion and background.

    Returns:
        ``background``, ``colour``, ``motion``: bool. ``shape``: share of frames whose silhouette is more like the
        prompt's shape than like the three others. ``one_piece``: share of frames with the object in a single piece.
        ``steady``: bool, the area varies by at most 12 % while the object is wholly inside. ``hole``: share of frames
        with a hole if the prompt says ring, None if not. ``seen``: what was read, of which ``overlap`` is how well the
        silhouettes are covered by the best shape.
    """
    colour, shape, motion, background = parse(prompt)
    seen = read_scene(frames)
    return {
        "background": seen["background"] == background,
        "colour": seen["colour"] == colour,
        "motion": seen["motion"] == motion,
        **_judge_silhouette(seen, shape),
        "seen": seen,
    }


def _judge_silhouette(seen: dict, shape: str) -> dict:
    """The four judgements of ``check`` that go by the silhouette."""
    ring = shape == "ring"
    if seen["silhouette"] is None:
        return {"shape": 0.0, "one_piece": 0.0, "steady": False, "hole": 0.0 if ring else None}
    return {
        "shape": float(np.mean([found == shape for found in seen["shapes"]])),
        "one_piece": float(np.mean([n == 1 for n in seen["pieces"]])),
        "steady": seen["variation"] is not None and seen["variation"] <= STEADY,
        "hole": float(np.mean(seen["holes"])) if ring else None,
    }
