"""What HEART keeps over a generation: by shapes at real sizes, and that the engine counts all that it keeps."""

import pytest
import torch
from benchmarks.resident import BAR, MODELS, Model, backbones, by_running, on_device, on_paper

import heart_attention as heart
from heart_attention.backbones.registry import BUILT_IN

SMALL = Model("small", 2, 2, (4, 16, 16), 32)
GB = 1e9


def test_every_backbone_is_in_the_table():
    assert {backbone.name for backbone, _, _ in backbones().values()} == set(BUILT_IN)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("name", backbones())
def test_caches_at_real_sizes_keep_their_bar(model, name):
    assert 0 < on_device(on_paper(model, backbones()[name][0])) <= BAR


@pytest.mark.parametrize("name", backbones())
def test_paper_tells_what_running_holds(name):
    backbone, threshold, rest = backbones()[name]
    backbone = backbone.scaled_to(SMALL.tokens)
    paper, run = on_paper(SMALL, backbone), by_running(SMALL, backbone, threshold, rest, SMALL.heads)
    for kind in (set(paper) | set(run)) - {"plans", "density", "orders"}:
        assert run.get(kind, 0) == pytest.approx(paper.get(kind, 0), abs=64 / GB), kind


KEPT = {
    "xattention": heart.XAttention(4, 16), "svg2": heart.SVG2(8, 64), "ear": heart.EAR(8, 64), "pisa": heart.PISA(16),
    "band": heart.Band(16), "sparge": heart.Sparge(16, 16), "svg": heart.SVG(rows=8), "radial": heart.Radial(16),
    "exact": heart.ExactMass(16), "lite": heart.Lite(None, 16, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_engine_counts_all_that_it_keeps(name):
    """Every tensor that can be reached from its states, but for a few numbers a head and orders that heads share."""
    backbone = KEPT[name]
    config = heart.HeartConfig(
        backbone, backbone.default_threshold, heart.Always(), dense_steps=0, force_sparse=True,
        rest=backbone.default_rest, scale_clusters=False,
    )  # fmt: skip
    engine, g = heart.Engine(config, 1, 4), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 1024, 32, generator=g) for _ in range(3))
    for step in range(2):
        heart.attention(q, k, v, {"layer": 0, "step": step, "branch": "c", "grid": (4, 16, 16)}, engine)
    told, held = sum(engine.memory().values()), sum(reached(engine._states, set()).values())
    assert told <= held + 64 and held - told <= 2048 + (16 * 1024 if name == "svg" else 0)


def reached(thing, seen):
    """Bytes of the tensors inside, by where they lie."""
    if id(thing) in seen or isinstance(thing, type):
        return {}
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    inside = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple | set) else ()
    found = {}
    for one in (*inside, *vars(thing).values()) if hasattr(thing, "__dict__") else inside:
        found |= reached(one, seen)
    return found
