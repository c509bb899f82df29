"""Masks from places alone: Band and Radial."""

import pytest
import torch

import heart_attention as heart
from heart_attention.backbones.radial import radial_rule
from heart_attention.errors import HeartError
from heart_attention.masks import Text

torch.set_num_threads(1)
GRID = (6, 4, 8)  # frames of 32 tokens
N = 192
BACKBONES = [heart.Band(16), heart.Radial(16)]
both = pytest.mark.parametrize("backbone", BACKBONES, ids=["band", "radial"])


def inputs(n=N, d=8, heads=2):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, n, d, generator=g) for _ in range(3)]


def mask_of(backbone, tau, n=N, **more):
    q, k, _ = inputs(n)
    return backbone.predict(q, k, tau, grid=GRID, **more)


def distance(a, b, frame_rows):
    """Mean squared distance of two lists of tokens, pair by pair."""
    place = lambda t: (t // 32 * frame_rows, t % 32 // 8)  # noqa: E731
    pairs = [(place(s), place(t)) for s in a for t in b]
    return sum((x[0] - y[0]) ** 2 + (x[1] - y[1]) ** 2 for x, y in pairs) / len(pairs)


@pytest.mark.parametrize("frame_rows", [0.5, 4.0])
def test_band_keeps_the_nearest_blocks(frame_rows):
    blocks = heart.Band(12, frame_rows).predict(*inputs()[:2], 0.25, grid=GRID).blocks[0, 0]
    for i in range(16):
        apart = [-1 if i == j else distance(range(12 * i, 12 * i + 12), range(12 * j, 12 * j + 12), frame_rows)
                 for j in range(16)]  # fmt: skip
        kept = {j for j in range(16) if blocks[i, j]}
        assert len(kept) == 4
        assert max(apart[j] for j in kept) <= min(apart[j] for j in set(range(16)) - kept) + 1e-9


def test_band_within_frames_or_through_them():
    within = mask_of(heart.Band(8, frame_rows=1000.0), 4 / 24).blocks[0, 0]
    through = mask_of(heart.Band(8, frame_rows=0.0), 6 / 24).blocks[0, 0]
    frames, rows = torch.arange(24) // 4, torch.arange(24) % 4
    assert torch.equal(within, frames[:, None] == frames)
    assert torch.equal(through, rows[:, None] == rows)


def brute_force(tau, block):
    """Radial attention's rule, token pair by token pair."""
    t = torch.arange(N)
    apart, gap = (t[:, None] // 32 - t // 32).abs(), (t[:, None] % 32 - t % 32).abs()
    seen = radial_rule(apart, gap, 32, 2 * tau) | (t // 32 == 0)[None, :]
    return seen.view(N // block, block, N // block, block).any(3).any(1)


@pytest.mark.parametrize("tau", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("block", [16, 12])
def test_radial_blocks_by_brute_force(tau, block):
    assert torch.equal(mask_of(heart.Radial(block), tau).blocks[0, 0], brute_force(tau, block))


def test_radial_rule_is_the_papers():
    """s = 32: whole frames at distance 0 and 1, then 16, 16, 8, ... tokens; one in two when half a token is left."""

    def window(apart):
        return sum(bool(radial_rule(torch.tensor(apart), torch.tensor(gap), 32, 1.0)) for gap in range(32))

    assert [window(d) for d in (0, 1, 2, 3, 4, 8, 32)] == [32, 32, 16, 16, 8, 4, 1]
    assert [window(d) for d in (64, 65, 66)] == [1, 0, 1]


@both
def test_all_heads_alike_and_free(backbone):
    mask = mask_of(backbone, [0.2, 0.2])
    assert torch.equal(mask.blocks[0, 0], mask.blocks[0, 1])
    assert backbone.prediction_work((1, 2, N, 8)) == 0


@both
def test_one_is_dense_and_less_keeps_less(backbone):
    assert mask_of(backbone, 1.0).blocks.all()
    densities = [float(mask_of(backbone, tau).density()[0, 0]) for tau in (0.05, 0.3, 0.8)]
    assert densities == sorted(densities) and densities[0] < 1
    assert mask_of(backbone, 0.05).blocks.diagonal(dim1=-2, dim2=-1).all()


@both
def test_prompt_is_seen_by_all(backbone):
    mask = mask_of(backbone, 0.1, N + 20, text=Text(N, 12, 8))
    video, prompt, unused = torch.arange(N), torch.arange(N, N + 12), torch.arange(N + 12, N + 20)
    assert mask.rows(video, prompt).all() and mask.rows(prompt, video).all()
    assert not mask.rows(video, unused).any() and mask.rows(unused, unused).all()
    first = mask_of(backbone, 0.1, N + 12, text=Text(0, 12))
    assert first.rows(torch.arange(12), torch.arange(N + 12)).all()


@both
def test_order_moves_the_blocks(backbone):
    order = torch.arange(N).flip(0)
    mask = mask_of(backbone, 0.3, order=order)
    assert torch.equal(mask.order, order) and mask.blocks.any(-1).all()


@both
def test_grid_must_fit(backbone):
    q, k, _ = inputs()
    with pytest.raises(HeartError, match="grid"):
        backbone.predict(q, k, 0.3)
    with pytest.raises(HeartError, match="grid"):
        backbone.predict(q, k, 0.3, grid=(5, 4, 8))


@both
def test_in_the_engine_and_from_a_file(backbone):
    q, k, v = inputs()
    engine = heart.Engine(heart.HeartConfig(backbone, 0.3, dense_steps=0, force_sparse=True), layers=1, heads=2)
    for step in range(3):
        call = {"layer": 0, "step": step, "branch": "cond", "grid": GRID}
        assert heart.attention(q, k, v, call, engine).isfinite().all()
    assert engine.stats()["dense_calls"] == 0
    assert heart.backbones.from_dict(backbone.to_dict()) == backbone
