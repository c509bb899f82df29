"""Silhouettes are read rightly: shapes, pieces, holes and areas, on rendered clips and on faults made on purpose."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tools/ is not installed

from tools.train_tiny import data, model

from heart_attention import tiny
from heart_attention.tiny import scene, silhouette

WORLDS = {"whole": data.CALM, "cut": data.CUT}


def frames_of(video) -> np.ndarray:
    """[B, T, H, W, 3] in 0..1."""
    return (video.permute(0, 2, 3, 4, 1) * 0.5 + 0.5).clamp(0, 1).numpy()


def drawn(shape: str, x: float = 48, y: float = 48, r: float = 15, side: int = 96) -> np.ndarray:
    """A mask with one shape."""
    at = np.arange(side) + 0.5
    return silhouette.distance(shape, at[None] - x, at[:, None] - y, r) < 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("frames", "side", "clips"),
    [(8, 96, 24), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((8, 96, 48), (16, 128, 16)))],
)
def test_rendered_clips_pass(world, frames, side, clips):
    batch = data.batch(6, 0, clips, frames, (side, side), WORLDS[world])
    found = [tiny.check(f, c) for f, c in zip(frames_of(batch.video), batch.captions, strict=True)]
    for key in ("background", "colour", "motion", "shape", "one_piece", "steady", "hole"):
        values = [f[key] for f in found if f[key] is not None]
        assert np.mean(values) >= 0.97, key


def test_clips_pass_through_the_codec():
    batch = data.batch(7, 0, 24, 8, (96, 96), data.CALM)
    codec = model.fit_codec()
    shape = (1, -1, 1, 1, 1)
    latents = model.encode(batch.video, codec) * codec["std"].view(shape) + codec["mean"].view(shape)
    back = model.build_vae(codec).decode(latents).sample.detach()
    found = [tiny.check(f, c) for f, c in zip(frames_of(back), batch.captions, strict=True)]
    for key in ("shape", "one_piece", "steady", "hole"):
        assert np.mean([f[key] for f in found if f[key] is not None]) >= 0.97, key


def test_another_shape_is_not_taken_for_the_prompts():
    batch = data.batch(8, 0, 16, 4, (96, 96), data.CALM)
    for clip, (colour, shape, motion, ground) in zip(frames_of(batch.video), batch.combos, strict=True):
        others = [s for s in scene.SHAPES if s != shape]
        found = [tiny.check(clip, scene.caption((colour, s, motion, ground)))["shape"] for s in others]
        assert max(found) <= 0.05


@pytest.mark.parametrize("shape", scene.SHAPES)
@pytest.mark.parametrize(("x", "y", "r"), [(48, 48, 15), (30.4, 61.7, 13.2), (71, 25.5, 18)])
def test_a_drawn_shape_is_matched_wherever_it_is(shape, x, y, r):
    overlaps = silhouette.match(drawn(shape, x, y, r)[None], scene.SHAPES)[0]
    assert scene.SHAPES[overlaps.argmax()] == shape and overlaps.max() >= 0.9


@pytest.mark.parametrize("shape", scene.SHAPES)
def test_a_shape_cut_by_the_edge_is_matched_within_the_canvas(shape):
    whole, cut = drawn(shape, 60), drawn(shape, 92)
    overlaps = silhouette.match(np.stack([whole, whole, cut]), scene.SHAPES)
    assert scene.SHAPES[overlaps[2].argmax()] == shape and overlaps[2].max() >= 0.9


def test_relative_areas_are_those_of_the_drawn_shapes():
    for shape, area in silhouette.RELATIVE_AREA.items():
        assert drawn(shape, 200, 200, 150, 400).sum() / 150**2 == pytest.approx(area, rel=5e-3)


def test_pieces_are_counted_without_specks():
    one = drawn("circle")
    assert silhouette.pieces(one) == 1
    assert silhouette.pieces(one | drawn("circle", 15, 15, 6)) == 2
    speck = one.copy()
    speck[3:6, 3:6] = True
    assert silhouette.pieces(speck) == 1
    assert silhouette.pieces(np.zeros((20, 20), dtype=bool)) == 0


def test_holes_are_seen_when_they_are_closed_and_large():
    assert silhouette.has_hole(drawn("ring"))
    assert not silhouette.has_hole(drawn("circle"))
    open_ring = drawn("ring")
    open_ring[46:50, 48:] = False
    assert not silhouette.has_hole(open_ring)
    pinhole = drawn("circle")
    pinhole[47:50, 47:50] = False
    assert not silhouette.has_hole(pinhole)


def test_area_varies_when_an_object_pulses_or_vanishes():
    steady = np.stack([drawn("square", x=20 + 4 * t) for t in range(12)])
    assert silhouette.variation(steady) < 0.03
    pulsing = np.stack([drawn("square", r=15 + 4 * (t % 2)) for t in range(12)])
    assert silhouette.variation(pulsing) > scene.STEADY
    steady[5] = False
    assert silhouette.variation(steady) > scene.STEADY


def test_frames_at_the_edge_do_not_count_for_the_area():
    leaving = np.stack([drawn("circle", x=48 + 8 * t) for t in range(8)])
    assert silhouette.inside(leaving).tolist() == [True] * 5 + [False] * 3
    assert silhouette.variation(leaving) < 0.03
    assert silhouette.variation(leaving[6:]) is None


def test_a_clip_without_object_fails_every_check_of_the_silhouette():
    empty = np.full((4, 64, 64, 3), scene.BACKGROUND_COLOURS["navy"], dtype=np.uint8)
    found = tiny.check(empty, "a red ring moves left on a navy background")
    assert (found["shape"], found["one_piece"], found["steady"], found["hole"]) == (0.0, 0.0, False, 0.0)
    assert tiny.check(empty, "a red circle moves left on a navy background")["hole"] is None


def test_components_and_holes_are_scipys():
    """Ours need no scipy at run time; its labels and filled holes are the twin."""
    ndimage = pytest.importorskip("scipy.ndimage")
    rng = np.random.default_rng(0)
    for density in (0.2, 0.5, 0.7, 0.9):
        mask = rng.random((40, 33)) < density
        for corners, structure in ((False, None), (True, np.ones((3, 3)))):
            labels, _ = ndimage.label(mask, structure)
            sizes = np.bincount(labels.ravel())[1:]
            assert sorted(size for size, _ in silhouette._components(mask, corners)) == sorted(sizes.tolist())
        enclosed = sum(size for size, at_edge in silhouette._components(~mask) if not at_edge)
        assert enclosed == int(ndimage.binary_fill_holes(mask).sum() - mask.sum())


def test_nothing_of_the_package_needs_scipy_to_run():
    """scipy is no dependency: only tests may import it."""
    source = Path(silhouette.__file__).parents[1]
    assert not [p.name for p in source.rglob("*.py") if re.search(r"^\s*(import|from) scipy", p.read_text(), re.M)]
