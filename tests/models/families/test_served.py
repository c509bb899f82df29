"""Every class of the table in docs/models.md: the engine is entered, a mask of all ones is dense, disabling restores.

The table is also held against the video transformers that the installed diffusers has: a new one is a failing row.
"""

import inspect
import re
from pathlib import Path

import diffusers
import pytest
import tiny_models as tiny
import torch
from diffusers.models import transformers as package

import heart_attention as heart
from heart_attention.models import FAMILIES, REFUSED

MODELS = tiny.every_model()
TABLE = Path(__file__).parents[3] / "docs" / "models.md"
STEPS = 3


def config(threshold, **changes):
    given = {"reuse": heart.Always(), "dense_steps": 0, "force_sparse": True, **changes}
    return heart.HeartConfig(heart.XAttention(stride=2, block=4), threshold, **given)


def generate(case, model, batch=2):
    """A few steps of two prompts, of different lengths where the model pads them."""
    given = [case.inputs(900.0 - 100 * step, batch=batch, seed=step) for step in range(STEPS)]
    return torch.stack([tiny.run(model, x) for x in given])


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_is_entered_by_every_layer_and_nothing_falls_back(name):
    case = MODELS[name]
    model = case.build()
    plain = generate(case, model)
    heart.enable(model, config(0.3))
    sparse = generate(case, model)
    stats = heart.stats(model)
    assert stats["dense_reasons"] == {} and stats["dense_calls"] == 0
    assert {row["layer"] for row in stats["layers"]} == set(range(case.layers))
    assert all(row["density"] < 1 for row in stats["layers"])
    assert torch.isfinite(sparse).all() and not torch.allclose(sparse, plain, atol=1e-5)
    heart.disable(model)
    assert torch.equal(generate(case, model), plain)


@pytest.mark.parametrize("name", MODELS)
def test_a_mask_of_all_ones_is_dense(name):
    case = MODELS[name]
    model = case.build()
    plain = generate(case, model)
    with heart.enabled(model, config(0.9999999)):
        full = generate(case, model)
        stats = heart.stats(model)
    assert stats["dense_calls"] == 0 and all(row["density"] == 1 for row in stats["layers"])
    torch.testing.assert_close(full, plain, rtol=1e-4, atol=2e-5)


# Classes with tokens beside the video, before it, after it, on both sides; and one without.
BESIDE = ["cogvideox", "helios", "minimax-h3", "hunyuan", "motif", "framepack", "mochi", "kandinsky-6"]
SVG2 = heart.SVG2(q_clusters=4, k_clusters=6)


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("rest", ["drop", "mean"])
def test_clusters_and_means_of_the_rest(name, rest):
    case = MODELS[name]
    model = case.build()
    plain = generate(case, model)
    heart.enable(model, config(0.3, rest=rest).replace(backbone=SVG2))
    sparse = generate(case, model)
    stats = heart.stats(model)
    assert stats["dense_calls"] == 0 and {row["layer"] for row in stats["layers"]} == set(range(case.layers))
    assert torch.isfinite(sparse).all() and not torch.equal(sparse, plain)
    heart.disable(model)
    assert torch.equal(generate(case, model), plain)


def test_every_served_class_has_a_tiny_model():
    assert {case.cls for case in MODELS.values()} == set(FAMILIES)


# ---------------------------------------- the table against the installed diffusers


def video_transformers():
    """Public transformers of diffusers that take video: 3D by name, or known to be for video by us."""
    public = {name for name in dir(diffusers) if inspect.isclass(getattr(diffusers, name))}
    inside = {name for name, cls in vars(package).items() if inspect.isclass(cls)}
    named = {name for name in public & inside if re.search(r"3DModel$", name) and name not in IMAGES}
    return named | ({*FAMILIES, *REFUSED} & (public | inside))


IMAGES = {"JoyImageEditTransformer3DModel", "JoyImageEditPlusTransformer3DModel"}  # "3D" for several images, no video


def rows():
    """(class, answer) of the table in the docs."""
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", TABLE.read_text(), re.M))


def test_the_table_has_every_video_transformer_of_the_installed_diffusers():
    table = rows()
    assert (
        video_transformers() - set(table) == set()
    )  # a class that a new release brought: give it a family, or refuse it
    assert set(table) == {*FAMILIES, *REFUSED}


def test_the_table_says_what_the_code_does():
    for name, answer in rows().items():
        assert answer == ("served" if name in FAMILIES else "refused"), name
    text = TABLE.read_text()
    assert all(reason in text for reason in REFUSED.values())
    assert f"{len(FAMILIES)} classes are served and {len(REFUSED)} refused" in text
