"""Laws that hold for every built-in backbone."""

import pytest
import torch

import heart_attention as heart
from heart_attention import backbones, kernels
from heart_attention.backbones.registry import BUILT_IN

torch.set_num_threads(1)
GRID = (4, 4, 8)
SMALL = {
    "xattention": {"stride": 4, "block": 16},
    "svg2": {"q_clusters": 4, "k_clusters": 8, "init_iters": 4},
    "ear": {"q_clusters": 4, "k_clusters": 8, "init_iters": 4},
    "pisa": {"block": 16},
    "band": {"block": 16},
    "sparge": {"block_q": 32, "block_k": 16, "similarity": -1.0},
    "svg": {},
    "radial": {"block": 16},
    "exact": {"block": 16},
    "lite": {"tile_q": 32, "tile_k": 16},
}
every = pytest.mark.parametrize("name", list(BUILT_IN))


def inputs(heads=3, n=128, d=16):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, n, d, generator=g) for _ in range(3)]


def predict(backbone, q, k, v, tau, **more):
    given = {"v": v} if backbone.reads_values else {}
    given |= {"grid": GRID} if backbone.reads_grid else {}
    return backbone.predict(q, k, tau, backbone.new_state(), key=(0, "cond", 0), **given, **more)


@every
def test_public_by_name_and_from_a_file(name):
    backbone = backbones.by_name(name, **SMALL[name])
    assert getattr(heart, type(backbone).__name__) is type(backbone)
    assert backbones.from_dict(backbone.to_dict()) == backbone
    assert 0 < backbone.default_threshold < 1 and all(0 < tau < 1 for tau in backbone.candidates)
    assert backbone.default_rest in backbone.rests
    assert heart.HeartConfig(name, rest=backbone.default_rest).backbone == backbones.by_name(name)


@every
def test_threshold_one_is_dense_attention(name):
    q, k, v = inputs()
    mask = predict(backbones.by_name(name, **SMALL[name]), q, k, v, 1.0)
    assert mask.density().eq(1).all()
    out = kernels.run(kernels.plan("eager", mask), q, k, v)
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5)


@every
def test_some_heads_are_as_among_all(name):
    """A mask does not depend on which other heads and items are predicted with it."""
    q, k, v = inputs()
    backbone = backbones.by_name(name, **SMALL[name])
    whole = predict(backbone, q, k, v, backbone.default_threshold)
    some = predict(backbone, *(x[:1, 1:] for x in (q, k, v)), backbone.default_threshold, heads=[1, 2])
    assert torch.equal(whole.item(0).heads([1, 2]).dense_tokens(), some.dense_tokens())


@every
def test_every_query_has_keys(name):
    q, k, v = inputs()
    mask = predict(backbones.by_name(name, **SMALL[name]), q, k, v, 0.001)
    assert mask.dense_tokens().any(-1).all()


@every
def test_candidates_from_one_prediction(name):
    q, k, v = (x[:1] for x in inputs())
    backbone = backbones.by_name(name, **SMALL[name])
    more = {"grid": GRID} if backbone.reads_grid else {}
    masks, full = backbone.predict_many(q, k, (0.3, 0.8), key=(0, "cond", 0), v=v, **more)
    assert full.density().eq(1).all() and (masks[0].density() <= masks[1].density() + 1e-9).all()


@pytest.mark.parametrize(
    "name, settings",
    [
        ("pisa", {"bias": "no"}),
        ("sparge", {"sink": 1}),
        ("sparge", {"similarity": ["x"]}),
        ("radial", {"sink": None}),
        ("band", {"frame_rows": "4"}),
        ("svg", {"reach": -1}),
        ("lite", {"must": "abc"}),
        ("lite", {"must": [[0, "4"]]}),
        ("lite", {"threshold": "low"}),
        ("exact", {"block": 0}),
    ],
)
def test_wrong_settings_from_a_file_are_one_sentence(name, settings):
    with pytest.raises(heart.HeartError, match=next(iter(settings))):
        backbones.from_dict({"name": name, **settings})
