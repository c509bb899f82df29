"""Masks: selection and its laws, densities against token masks, text, packing, putting heads together, tile orders."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from heart_attention.backbones import XAttention
from heart_attention.errors import HeartError
from heart_attention.masks import BlockMask, ClusterMask, Text, pack_bits, top_p, unpack_bits
from heart_attention.token_order import tile_order, tiles

torch.set_num_threads(1)
some = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
shares = st.floats(0.01, 0.999)
# Small whole numbers: many ties, and sums that are exact, so that the brute-force twin decides the same way.
score_rows = npst.arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=st.integers(0, 6))


def brute_force(row, need, strict):
    """Top-p by its words: highest first, lowest index among equals, until the sum before is enough."""
    kept, before = set(), 0.0
    for j in sorted(range(len(row)), key=lambda j: (-row[j], j)):
        if kept and not (before < need if strict else before <= need):
            break
        kept.add(j)
        before += row[j]
    return [j in kept for j in range(len(row))]


@some
@given(score_rows, shares, st.booleans())
def test_top_p_is_its_brute_force_twin(rows, tau, strict):
    got = top_p(torch.from_numpy(rows).float(), tau, strict)
    want = [brute_force(row, tau * row.sum(), strict) for row in rows.astype(float)]
    assert got.tolist() == want


@some
@given(score_rows, shares)
def test_kept_mass_reaches_tau_and_is_minimal(rows, tau):
    rows = torch.from_numpy(rows).double()
    kept = top_p(rows, tau, strict=True)
    mass, need = (rows * kept).sum(-1), tau * rows.sum(-1)
    assert (kept.sum(-1) >= 1).all()  # every row keeps a block
    assert (mass >= need).all()
    least = torch.where(kept, rows, torch.inf).amin(-1)
    assert ((mass - least < need) | (kept.sum(-1) == 1)).all()  # without the smallest kept one it is not enough
    assert (least >= torch.where(kept, -torch.inf, rows).amax(-1)).all()  # and nothing left out is larger


@some
@given(score_rows, shares, shares, st.booleans())
def test_monotone_in_tau(rows, one, other, strict):
    low, high = (top_p(torch.from_numpy(rows).float(), tau, strict) for tau in sorted((one, other)))
    assert (low <= high).all()


def test_the_two_rules_differ_on_the_boundary():
    row = torch.tensor([[0.5, 0.25, 0.25]])
    assert top_p(row, 0.5, strict=True).tolist() == [[True, False, False]]
    assert top_p(row, 0.5, strict=False, total=1.0).tolist() == [[True, True, False]]
    assert top_p(row, 0.5, strict=True, at_least=2).tolist() == [[True, True, False]]


def test_rows_of_nothing_and_of_nan():
    rows = torch.tensor([[0.0, 0.0, 0.0], [1.0, float("nan"), 0.0]])
    for strict in (True, False):
        kept = top_p(rows, 0.5, strict)
        assert kept[0, 0] and kept[1].all()


def test_thresholds_per_row():
    rows = torch.ones(2, 3, 10)
    kept = top_p(rows, torch.tensor([[0.05, 0.15, 0.25], [0.35, 0.45, 0.55]]), strict=True)
    assert kept.sum(-1).tolist() == [[1, 2, 3], [4, 5, 6]]


@some
@given(npst.arrays(bool, st.tuples(st.integers(1, 3), st.integers(1, 30))))
def test_bits_there_and_back(flags):
    flags = torch.from_numpy(flags)
    packed = pack_bits(flags)
    assert packed.shape[-1] == -(-flags.shape[-1] // 8) and packed.dtype == torch.uint8
    assert torch.equal(unpack_bits(packed, flags.shape[-1]), flags)


def random_blocks(seed, n, block, batch=2, heads=3, **more):
    g = torch.Generator().manual_seed(seed)
    m = -(-n // block)
    return BlockMask(torch.rand(batch, heads, m, m, generator=g) < 0.5, block, n, n, **more)


def random_clusters(seed, n, q_clusters, k_clusters, batch=2, heads=3):
    g = torch.Generator().manual_seed(seed)
    labels = [torch.randint(c, (batch, heads, n), generator=g).to(torch.int16) for c in (q_clusters, k_clusters)]
    return ClusterMask(torch.rand(batch, heads, q_clusters, k_clusters, generator=g) < 0.5, *labels)


@some
@given(st.integers(0, 99), st.integers(1, 70), st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_block_density_by_token_pairs(seed, n, block, tail, shuffled):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)) if shuffled else None
    mask = random_blocks(seed, n, block, order=order, tail=tail)
    tokens = mask.dense_tokens()
    assert tokens.shape == (2, 3, n + tail, n + tail)
    want = tokens[..., :n, :n].double().mean((-2, -1))
    assert torch.allclose(mask.density(), want, atol=1e-12, rtol=0)
    assert not tokens[..., :n, n:].any() and not tokens[..., n:, :n].any() and tokens[..., n:, n:].all()


def test_order_says_which_tokens_a_block_holds():
    order = torch.tensor([3, 1, 0, 2])
    blocks = torch.tensor([[True, False], [True, True]])[None, None]
    tokens = BlockMask(blocks, 2, 4, 4, order).dense_tokens()[0, 0]
    for i in range(4):
        for j in range(4):
            place_i, place_j = order.tolist().index(i) // 2, order.tolist().index(j) // 2
            assert tokens[i, j] == blocks[0, 0, place_i, place_j]


@some
@given(st.integers(0, 99), st.integers(1, 60), st.integers(1, 9), st.integers(1, 12))
def test_cluster_density_by_token_pairs(seed, n, q_clusters, k_clusters):
    mask = random_clusters(seed, n, q_clusters, k_clusters)
    want = mask.dense_tokens().double().mean((-2, -1))
    assert torch.allclose(mask.density(), want, atol=1e-12, rtol=0)
    q_sizes, k_sizes = mask.sizes()
    assert (q_sizes.sum(-1) == n).all() and (k_sizes.sum(-1) == n).all()


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in one._per_head)


@pytest.mark.parametrize("mask", [random_blocks(0, 50, 16), random_clusters(0, 50, 5, 9)], ids=["block", "cluster"])
def test_heads_items_and_putting_back(mask):
    other = type(mask)(**{**vars(mask), **{name: getattr(mask, name).flip(0, 1) for name in mask._per_head}})
    assert mask.heads([2, 0]).shape == (2, 2)
    assert same(mask.heads([2, 0]).heads([1]), mask.heads([0]))
    assert same(mask.heads(torch.tensor([True, False, True])), mask.heads([0, 2]))
    assert same(mask.item(1).heads([2]), mask.heads([2]).item(1))
    index = torch.tensor([[True, False, True], [False, True, False]])
    merged = mask.put(index, other)
    for b in range(2):
        for h in range(3):
            assert same(merged.item(b).heads([h]), (other if index[b, h] else mask).item(b).heads([h]))
    chosen = mask.map_heads(lambda x: torch.cat([x[0, 0:1], x[0, 2:3], x[1, 1:2]])[None])  # [1, 3] in row-major order
    assert same(other.put(index, chosen), other.put(index, mask))
    assert same(mask.put([2, 1], other.heads([2, 1])), mask.put([1, 2], other))
    assert same(mask.put(torch.zeros(2, 3, dtype=torch.bool), other), mask)
    with pytest.raises(HeartError, match="all heads or exactly the replaced ones"):
        mask.put(index, other.heads([0]))


@pytest.mark.parametrize("mask", [random_blocks(1, 300, 4, order=torch.arange(300)), random_clusters(1, 50, 50, 99)])
def test_packed_masks_are_smaller_and_come_back_whole(mask):
    packed = mask.packed()
    assert packed.nbytes < mask.nbytes and same(packed.unpack(), mask)
    if isinstance(mask, BlockMask):
        assert packed.nbytes * 7 < mask.nbytes and torch.equal(packed.unpack().order, mask.order)


def test_full_masks():
    mask = BlockMask.full(2, 3, 100, 32, tail=4)
    assert mask.shape == (2, 3) and (mask.density() == 1).all() and mask.tail == 4


@some
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))
def test_text_says_which_tokens_are_video(start, prompt, unused, after):
    text = Text(start, prompt, unused)
    n = text.end + after
    video = text.video_index(n)
    assert video.tolist() == [t for t in range(n) if not start <= t < start + prompt + unused]
    assert text.video_count(n) == len(video)


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


ones = torch.ones(1, 1, 2, 2, dtype=torch.bool)
labels = torch.zeros(1, 1, 5, dtype=torch.int16)


@pytest.mark.parametrize("make, message", [
    (lambda: Text(-1, 3), "negative"),
    (lambda: Text(0, 8, 2).check(10), "does not leave any video in 10 tokens"),
    (lambda: Text(0, 8, 2).check(9), "does not leave any video in 9 tokens"),
    (lambda: BlockMask(ones, 16, 40, 40), r"give bool \[B, H, 3, 3\]"),
    (lambda: BlockMask(ones.float(), 16, 32, 32), "give bool"),
    (lambda: BlockMask(ones, 0, 32, 32), "sizes are at least 1"),
    (lambda: BlockMask(ones, 16, 32, 31, tail=1), "as many keys as queries"),
    (lambda: BlockMask(ones, 16, 32, 32, torch.arange(31)), r"give \[32\]"),
    (lambda: ClusterMask(ones.float(), labels, labels), "give bool"),
    (lambda: ClusterMask(ones, labels[0], labels), "give"),
    (lambda: ClusterMask(ones, labels.expand(1, 2, 5), labels), "must agree"),
    (lambda: BlockMask.full(1, 1, 100_000, 128).dense_tokens(), "too large"),
    (lambda: ClusterMask(ones, *[labels[..., :1].expand(1, 1, 100_000)] * 2).dense_tokens(), "too large"),
    (lambda: random_blocks(0, 50, 16).put([0], random_blocks(0, 50, 8)), "same blocks or clusters"),
    (lambda: tile_order((0, 3, 4), 64), r"give \(frames, height, width\)"),
    (lambda: tile_order((2, 3, 4), 0), "block ≥ 1"),
])  # fmt: skip
def test_bad_input_is_one_clear_sentence(make, message):
    with pytest.raises(HeartError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
