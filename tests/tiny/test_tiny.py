"""The embedded model: loads, generates, and its program check reads clips rightly."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from heart_attention import tiny
from heart_attention.tiny import scene

CALL = {**tiny.QUICK, "height": 32, "width": 32, "num_frames": 4, "num_inference_steps": 2}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors here are too small for more; on a busy machine waiting threads cost far more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=("model", "hunyuan"))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pipe(name):
    return tiny.load(name)


def call_of(name: str) -> dict:
    """Arguments of a short call; HunyuanVideo's own defaults for guidance and text slots."""
    names = ("height", "width", "num_frames", "num_inference_steps")
    return CALL if name == "model" else {"output_type": "np", **{n: CALL[n] for n in names}}


def test_generates_finite_frames(pipe, name):
    frames = pipe(tiny.prompts("demo")[0], **call_of(name)).frames[0]
    assert frames.shape == (4, 32, 32, 3)
    assert np.isfinite(frames).all() and 0 <= frames.min() <= frames.max() <= 1


def test_same_seed_same_clip(pipe, name):
    call = call_of(name)
    one, two = (pipe("a red circle", generator=torch.Generator().manual_seed(3), **call).frames for _ in range(2))
    assert np.array_equal(one, two)


def test_random_control_has_the_same_shapes_and_other_weights(pipe, name):
    trained, control, again = (
        p.transformer.state_dict() for p in (pipe, *(tiny.load_random(name=name) for _ in range(2)))
    )
    assert {n: p.shape for n, p in control.items()} == {n: p.shape for n, p in trained.items()}
    key = next(n for n in trained if n.endswith("attn1.to_q.weight") or n.endswith("blocks.0.attn.to_q.weight"))
    assert not torch.equal(control[key], trained[key])
    assert torch.equal(control[key], again[key])


def test_package_stays_small_and_pickle_free():
    files = [f for name in tiny.FOLDERS for f in Path(tiny.path(name)).rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 20e6  # the student too
    assert {f.suffix for f in files} <= {".json", ".safetensors"}


def test_native_size_is_whole_tiles():
    grid = tiny.tokens(**tiny.NATIVE)
    assert 4000 <= np.prod(grid) <= 5000
    assert all(n % 4 == 0 for n in grid) and all(n % 4 == 0 for n in tiny.tokens(**tiny.QUICK))


def test_prompts_are_disjoint_and_readable():
    splits = {s: tiny.prompts(s) for s in ("heldout", "demo", "calibration", "train")}
    assert len(splits["heldout"]) == 24 and len(splits["demo"]) == 8 and len(splits["calibration"]) >= 10
    unseen = {scene.parse(p) for p in splits["heldout"] + splits["demo"]}
    assert len(unseen) == 32
    assert unseen.isdisjoint({scene.parse(p) for p in splits["train"] + splits["calibration"]})
    with pytest.raises(ValueError, match="split must be"):
        tiny.prompts("test")


def test_every_word_is_in_the_held_out_prompts():
    seen = set(" ".join(tiny.prompts("heldout")).split())
    for kind in (scene.OBJECT_COLOURS, scene.SHAPES, scene.MOTIONS, scene.BACKGROUND_COLOURS):
        assert set(kind) <= seen


def test_parse_refuses_what_is_missing():
    with pytest.raises(ValueError, match="expected one of"):
        scene.parse("a red circle on a navy background")


def clip_of(colour, lit: bool) -> np.ndarray:
    """A clip of nothing but one colour, under the world's light or not."""
    plain = np.broadcast_to(np.array(colour, dtype=np.float32), (5, 40, 40, 3))
    return np.clip(plain + scene.light(5, 40, 40), 0, 255) if lit else plain


def test_no_object_colour_passes_for_ground_and_no_ground_for_another():
    for name, ground in scene.BACKGROUND_COLOURS.items():
        for paint in scene.OBJECT_COLOURS.values():
            # Where the light is brightest, beige comes near white: late, and away from the middle.
            assert scene._explained(clip_of(paint, lit=False), ground).mean() <= 0.25
        shares = {
            other: np.mean(
                [scene._explained(clip_of(np.add(colour, patch), lit=True), ground) for patch in (-30, 0, 30)]
            )
            for other, colour in scene.BACKGROUND_COLOURS.items()
        }
        assert shares.pop(name) == 1.0
        assert max(shares.values()) <= 0.35


def test_check_sees_no_object_in_an_empty_clip():
    for lit in (True, False):
        frames = clip_of(scene.BACKGROUND_COLOURS["navy"], lit).astype(np.uint8)
        found = tiny.check(frames, "a red circle moves left on a navy background")
        assert found["background"] and not found["colour"] and not found["motion"]


def test_import_is_light():
    code = "import sys; from heart_attention.tiny import scene; print('diffusers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
