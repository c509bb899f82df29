"""Tiles: whole boxes where the grid divides, a permutation always, near tokens together."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.backbones import XAttention
from heart_attention.errors import HeartError
from heart_attention.token_order import tile_order, tiles

torch.set_num_threads(1)
some = settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("grid, block, tile", [((8, 8, 8), 64, (4, 4, 4)), ((8, 8, 16), 128, (4, 4, 8)),
                                               ((1, 16, 16), 64, (1, 8, 8)), ((6, 8, 10), 60, (3, 4, 5))])  # fmt: skip
def test_tiles_of_a_grid_that_divides_are_whole_boxes(grid, block, tile):
    order = tile_order(grid, block)
    assert sorted(order.tolist()) == list(range(grid[0] * grid[1] * grid[2]))
    for tokens in order.view(-1, block):
        place = torch.stack(torch.unravel_index(tokens, grid), -1)
        sides = (place.amax(0) - place.amin(0) + 1).tolist()
        assert sorted(sides) == sorted(tile)


@some
@given(st.tuples(st.integers(1, 7), st.integers(1, 11), st.integers(1, 13)), st.sampled_from([1, 7, 16, 64, 128]))
def test_tiles_of_any_grid_are_a_permutation(grid, block):
    order = tile_order(grid, block)
    assert order.dtype == torch.int64 and sorted(order.tolist()) == list(range(grid[0] * grid[1] * grid[2]))


@pytest.mark.parametrize("grid", [(21, 30, 52), (13, 18, 20), (5, 15, 26)])
@pytest.mark.parametrize("block", [64, 128])
def test_tiles_lie_closer_together_than_the_raster(grid, block):
    raster = torch.arange(grid[0] * grid[1] * grid[2])
    assert tiles._spread(tile_order(grid, block), grid, block) < 0.25 * tiles._spread(raster, grid, block)


@pytest.mark.parametrize("grid, block, stride, box, apart", [
    ((8, 12, 12), 64, 8, (2, 2, 2), 1), ((8, 8, 16), 128, 16, (2, 2, 4), 2), ((8, 8, 8), 64, 4, (1, 2, 2), 1),
    ((4, 8, 16), 64, 16, (2, 2, 4), 2),
])  # fmt: skip
def test_groups_inside_a_tile_are_boxes_and_the_pairs_that_are_sampled_neighbours(grid, block, stride, box, apart):
    place = torch.cartesian_prod(*map(torch.arange, grid))[tile_order(grid, block)].view(-1, stride, 3)
    sides = place.amax(1) - place.amin(1) + 1  # [groups, 3]
    assert (sides.sort(-1).values == torch.tensor(sorted(box))).all()
    assert ((place - place.flip(1)).abs().sum(-1) == apart).all()  # antidiagonal: first with last, and so on


@pytest.mark.parametrize("reach", [0.7, 1.5])
def test_xattention_estimates_local_heads_better_than_in_a_raster_of_each_tile(reach):
    """Heads whose tokens attend to what is near: the estimate of a block's mass against its true mass."""
    grid, block = (8, 12, 12), 64
    place = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float32) for n in grid))
    frequencies = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)) / reach
    angles = place @ frequencies
    x = 3 * torch.cat([angles.cos(), angles.sin()], -1)  # [N, 64]: products fall with distance
    exact = torch.softmax(x @ x.T / 8, -1)
    tiled = tile_order(grid, block)
    inner = place % 4
    tile = torch.empty(len(tiled), dtype=torch.long).index_put_((tiled,), torch.arange(len(tiled)) // block)
    raster = torch.argsort(tile * 64 + (inner @ torch.tensor([16.0, 4.0, 1.0])).long())
    wrong = []
    for order in (tiled, raster):
        mass = exact[order][:, order].view(18, block, 18, block).sum((1, 3)) / block
        scores = XAttention(stride=8, block=block).scores(x[None, None], x[None, None], order)[0, 0]
        wrong.append(float((scores / scores.sum(-1, keepdim=True) - mass).abs().sum(-1).mean()))
    assert wrong[0] < 0.7 * wrong[1]


def test_whole_tiles_are_whole_blocks():
    """The grid does not divide: blocks straddle tiles only at the edges, which come last."""
    order, whole = tile_order((9, 13, 14), 64), 2 * 3 * 3
    for tokens in order[: whole * 64].view(whole, 64):
        place = torch.stack(torch.unravel_index(tokens, (9, 13, 14)), -1)
        assert (place.amax(0) - place.amin(0) + 1).tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "grid, block, message", [((0, 3, 4), 64, r"give \(frames, height, width\)"), ((2, 3, 4), 0, "block ≥ 1")]
)
def test_bad_input_is_one_clear_sentence(grid, block, message):
    with pytest.raises(HeartError, match=message) as caught:
        tile_order(grid, block)
    assert "\n" not in str(caught.value)
