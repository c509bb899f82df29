"""A token order for every head: names, permutations, masks and kernels with them, the engine, the choice, the command."""

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention import kernels, token_order
from heart_attention.backbones import SVG2, XAttention
from heart_attention.config import HeartConfig
from heart_attention.errors import HeartError
from heart_attention.masks import BlockMask, Text
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine
from heart_attention.online.reuse import TMR, Always
from heart_attention.token_order import tile_order_of
from heart_attention.tuning import order as order_tuning

torch.set_num_threads(1)
some = settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
sdpa = F.scaled_dot_product_attention
GRID, N, H, D = (4, 4, 6), 96, 5, 16
X = XAttention(stride=4, block=16)
ROW = ("raster", "4x4x1", "1x4x4", "4x4x1", "2x2x4")


def tensors(seed=0, batch=1, n=N):
    return tuple(torch.randn(3, batch, H, n, D, generator=torch.Generator().manual_seed(seed)) * 1.5)


def config(order=(ROW,), **kw):
    kw = {"dense_steps": 0, "kernel": "eager", "force_sparse": True, "thresholds": 0.5, "reuse": Always(), **kw}
    return HeartConfig(kw.pop("backbone", X), order=order, **kw)


def at(step=0, **kw):
    return CallContext(layer=0, layers=1, step=step, branch="cond", **{"grid": GRID, **kw})


# ---------------------------------------------------------------- names and permutations


def test_names_come_back_from_json(tmp_path):
    made = config(order=[list(ROW), list(ROW)])
    made.save(tmp_path / "c.json")
    assert HeartConfig.load(tmp_path / "c.json") == made
    assert made.order == (ROW, ROW) and hash(made.order)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("hilbert", "order is 'hilbert'"),
        (3, "order is 3"),
        ([], "order is \\[\\]"),
        ([["raster"], ["raster", "raster"]], "ragged"),
        (["raster", "raster"], "order is 'raster'|ragged"),
        ([["4x4"]], "'4x4'"),
        ([["4x0x4"]], "'4x0x4'"),
        ([["4x4x-1"]], "'4x4x-1'"),
    ],
)
def test_wrong_names_are_refused(order, says):
    with pytest.raises(HeartError, match=says):
        HeartConfig(X, order=order)


def test_an_order_for_another_model_or_block_is_refused():
    with pytest.raises(HeartError, match="2 layers of 5 heads"):
        Engine(config(), 2, H)
    with pytest.raises(HeartError, match="tiles of 64 tokens but the backbone's blocks have 16"):
        Engine(config(order=(("4x4x4",) * H,)), 1, H)
    two = Engine(config(order=((ROW,), (ROW[::-1],))), 1, H, transformers=2)
    assert two.points.groups(1, 0, 0)[0].orders.order == ((ROW,), (ROW[::-1],))


@some
@given(st.tuples(*[st.integers(1, 9)] * 3), st.sampled_from([8, 16, 64]), st.integers(0, 5), st.integers(0, 5))
def test_every_candidate_is_a_permutation_of_the_tokens_in_use(grid, block, prompt, unused):
    video = grid[0] * grid[1] * grid[2]
    text = Text(video, prompt, unused)
    n = video + prompt + unused
    names = token_order.candidates(grid, block)
    assert names[0] == "raster" and len(set(names)) == len(names)
    for name in names:
        order = token_order.permutation(name, grid, n, text, block)
        assert order.sort().values.tolist() == list(range(n - unused))
        assert order[video:].tolist() == list(range(video, n - unused))
    assert token_order.permutation("raster", (*grid[:2], grid[2] + 1), n, text, block) is None


def test_candidates_of_the_sizes_that_people_use():
    assert token_order.candidates((16, 16, 16), 64) == (
        "raster",
        "4x4x4",
        "1x8x8",
        "4x16x1",
        "16x4x1",
        "4x2x8",
        "4x1x16",
    )
    for grid in ((21, 30, 52), (21, 45, 80), (33, 30, 45)):  # Wan at 480p and 720p, HunyuanVideo
        names = token_order.candidates(grid, 128)
        assert len(names) >= 5
        for name in names[1:]:
            t, h, w = token_order.shape_of(name)
            assert t * h * w == 128 and t <= grid[0] and h <= grid[1] and w <= grid[2]


# ---------------------------------------------------------------- masks and kernels


def own_mask(batch=2, seed=0, tail=0, n=N):
    g = torch.Generator().manual_seed(seed)
    m = -(-n // 16)
    blocks = torch.rand(batch, H, m, m, generator=g) < 0.4
    blocks[..., 0] = True
    table = torch.stack([torch.randperm(n, generator=g) for _ in range(3)])
    own = torch.randint(3, (batch, H), generator=g).to(torch.int8)
    return BlockMask(blocks, 16, n, n, table, tail, own)


def alone(mask, b, h):
    return BlockMask(
        mask.blocks[b : b + 1, h : h + 1], 16, mask.n_q, mask.n_k, mask.order[mask.order_of[b, h]], mask.tail
    )


def test_a_mask_with_orders_is_that_of_each_head():
    mask = own_mask(tail=5)
    whole = mask.dense_tokens()
    for b in range(2):
        for h in range(H):
            assert torch.equal(whole[b, h], alone(mask, b, h).dense_tokens()[0, 0])
    assert torch.equal(mask.packed().unpack().dense_tokens(), whole)
    assert torch.equal(mask.heads([3, 1]).dense_tokens(), whole[:, [3, 1]])
    assert torch.equal(mask.item(1).dense_tokens(), whole[1:])
    other = own_mask(seed=1, tail=5)
    other = BlockMask(other.blocks, 16, N, N, mask.order, 5, other.order_of)
    put = mask.put([0, 2], other.heads([0, 2])).dense_tokens()
    assert torch.equal(put[:, [0, 2]], other.dense_tokens()[:, [0, 2]]) and torch.equal(put[:, 1], whole[:, 1])


@pytest.mark.parametrize("n", [96, 90])
@pytest.mark.parametrize("kernel", ["cpu", "gather"])
def test_kernels_agree_on_orders_of_heads(kernel, n):
    if kernels.get(kernel).reasons_not():
        pytest.skip("the kernel does not serve here")
    mask = own_mask(tail=6, n=n)
    q, k, v = (x / 1.5 for x in tensors(batch=2, n=n + 6))
    want = sdpa(q, k, v, attn_mask=mask.dense_tokens())
    for name in ("eager", kernel):
        got = kernels.run(kernels.plan(name, mask), q, k, v)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


def test_orders_that_do_not_fit_are_refused():
    mask = own_mask()
    with pytest.raises(HeartError, match="order_of"):
        BlockMask(mask.blocks, 16, N, N, mask.order)
    with pytest.raises(HeartError, match="does not choose among 3 orders"):
        BlockMask(mask.blocks, 16, N, N, mask.order, 0, mask.order_of + 3)
    with pytest.raises(HeartError, match="does not choose among 0 orders"):
        BlockMask(mask.blocks, 16, N, N, None, 0, mask.order_of)
    twice = mask.order.clone()
    twice[1, 0] = twice[1, 1]
    with pytest.raises(HeartError, match="not a permutation"):
        kernels.plan("eager", BlockMask(mask.blocks, 16, N, N, twice, 0, mask.order_of))


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("text", [None, Text(72, 14, 10)], ids=["video", "joint"])
def test_each_head_predicts_and_attends_in_its_order(text):
    grid = (3, 4, 6) if text else GRID
    q, k, v = (x / 1.5 for x in tensors())  # of unit scale, for which fp32 keeps 2e-6
    engine = Engine(config(thresholds=[0.5, 0.6, 0.7, 1.0, 0.8]), 1, H)
    out = engine.attend(at(grid=grid, text=[text] if text else None), q, k, v, sdpa)
    used = N - 10 if text else N
    for h, (name, tau) in enumerate(zip(ROW, (0.5, 0.6, 0.7, 1.0, 0.8))):
        order = token_order.permutation(name, grid, N, text, 16)
        part = [x[:, h : h + 1, order] for x in (q, k, v)]
        kept = X.predict(part[0], part[1], tau).dense_tokens()
        assert bool(kept.all()) == (tau == 1)  # else all orders would give the same
        want = torch.empty_like(out[:, h : h + 1], dtype=torch.float64)
        want[:, :, order] = sdpa(*(x.double() for x in part), kept)
        assert (out[:, h : h + 1, :used] - want[:, :, :used]).abs().max() <= 2e-6


def test_all_raster_is_raster_bit_for_bit_and_reuse_keeps_orders():
    steps = [tensors(seed) for seed in range(4)]
    same = [Engine(config(order=o), 1, H) for o in ("raster", (("raster",) * H,))]
    for i, qkv in enumerate(steps):
        assert torch.equal(*(engine.attend(at(i), *qkv, sdpa) for engine in same))
    mixed = [
        Engine(config(reuse=r, kernel="auto"), 1, H) for r in (Always(), TMR(delta=0.0, gate=(0, 1)), TMR(delta=30.0))
    ]
    for i, qkv in enumerate(steps):
        fresh, drifting, kept = (engine.attend(at(i), *qkv, sdpa) for engine in mixed)
        assert torch.equal(fresh, drifting)
        assert i == 0 or not torch.equal(fresh, kept)  # the first step's masks serve on, in the orders of their heads
    assert mixed[2].stats()["refresh_rate"] < 0.5


def test_a_batch_of_two_and_heads_on_two_ranks_give_the_same():
    one, two = tensors(1), tensors(2)
    both = tuple(torch.cat(pair) for pair in zip(one, two))
    out = Engine(config(), 1, H).attend(at(), *both, sdpa)
    assert torch.equal(out, torch.cat([Engine(config(), 1, H).attend(at(), *x, sdpa) for x in (one, two)]))
    for heads in ([0, 1, 3], [2, 4]):
        part = Engine(config(), 1, H).attend(at(heads=heads, heads_total=H), *(x[:, heads] for x in one), sdpa)
        assert torch.equal(part, out[:1, heads])


def test_a_grid_of_other_tokens_and_clusters_have_no_use_for_orders():
    q, k, v = tensors()
    want = Engine(config(order="raster"), 1, H).attend(at(), q, k, v, sdpa)
    for grid in (None, (4, 4, 5)):
        assert torch.equal(Engine(config(), 1, H).attend(at(grid=grid), q, k, v, sdpa), want)
    clusters = SVG2(q_clusters=6, k_clusters=10)
    outs = [Engine(config(backbone=clusters, order=o), 1, H).attend(at(), q, k, v, sdpa) for o in ("raster", (ROW,))]
    assert torch.equal(*outs)


# ---------------------------------------------------------------- the choice


def looking(along, grid=(8, 8, 8), seed=0):
    """Tokens of one head that attend to those with which they share the coordinates `along`; in raster order."""
    g = torch.Generator().manual_seed(seed)
    place = torch.cartesian_prod(*(torch.arange(n) for n in grid))
    code = torch.zeros(len(place), 32)
    for axis in along:
        code += torch.randn(grid[axis], 32, generator=g)[place[:, axis]]
    return 3 * code + 0.1 * torch.randn(len(place), 32, generator=g)


def test_a_head_gets_blocks_shaped_as_it_looks():
    """One head looks along columns of a frame's place through time, one inside a frame's row, one anywhere."""
    grid = (8, 8, 8)
    heads = [looking((1, 2)), looking((0, 1)), torch.randn(512, 32, generator=torch.Generator().manual_seed(1))]
    q = torch.stack(heads)[None]
    v = torch.randn(1, 3, 512, 32, generator=torch.Generator().manual_seed(2))
    x = XAttention(stride=4, block=16)
    probe = order_tuning.OrderProbe(x, [[(0.8,) * 3]], steps=(0,))
    out = probe.attend(CallContext(layer=0, layers=1, step=0, branch="c", grid=grid), q, q, v, sdpa)
    assert torch.equal(out, sdpa(q, q, v))
    tuned = order_tuning.tune(probe)
    through_time, along_rows, _ = tuned.order[0]
    assert token_order.shape_of(through_time)[0] > 1
    assert along_rows == "raster" or token_order.shape_of(along_rows)[2] > 1
    assert tuned.blocks < 1 and tuned.error < 1 and 0 < tuned.moved <= 1 and tuned.calls == 1
    for keep in (1.0, 0.8):  # the thresholds give each head the share of blocks that was asked for
        tuned = order_tuning.tune(probe, keep)
        for h, (name, tau) in enumerate(zip(tuned.order[0], tuned.thresholds[0])):
            one, order = q[:, h : h + 1], token_order.permutation(name, grid, 512, None, 16)
            kept, raster = (float(x.predict(one, one, t, order=o).density()) for t, o in ((tau, order), (0.8, None)))
            assert kept <= keep * raster + 0.06
            assert tau == order_tuning.MOST or kept >= keep * raster - 0.06
    fewer = [
        float(x.predict(q[:, :1], q[:, :1], 0.8, order=o).density())
        for o in (tile_order_of(grid, token_order.shape_of(through_time)), None)
    ]
    assert fewer[0] < fewer[1]


def test_the_choice_is_the_best_of_the_points_it_saw():
    """By hand: two orders, one head; the second needs as many blocks and leaves a tenth of the error."""
    mean = torch.tensor([[[0.5], [0.5]], [[0.1], [0.01]], [[0.6], [0.6]], [[0.05], [0.005]]]).double()
    assert order_tuning._pick(mean) == [1]
    assert order_tuning._pick(mean.flip(1)) == [0]
    fewer = torch.tensor([[[0.5], [0.4]], [[0.1], [0.1]], [[0.6], [0.5]], [[0.05], [0.05]]]).double()
    equal = order_tuning.at_equal_density(fewer)
    assert float(equal[1] - equal[0]) == pytest.approx(-torch.log(torch.tensor(2.0)).item())  # a tenth more halves it
    everything = torch.tensor([[[1.0], [1.0]], [[1e-13], [1e-14]], [[1.0], [1.0]], [[1e-13], [1e-14]]]).double()
    assert order_tuning._pick(everything) == [0]


def test_nothing_seen_and_clusters_are_refused():
    with pytest.raises(HeartError, match="no attention call was looked at"):
        order_tuning.tune(order_tuning.OrderProbe(X, [[(0.9,)]], steps=(0,)))
    with pytest.raises(HeartError, match="cannot keep 0"):
        order_tuning.tune(order_tuning.OrderProbe(X, [[(0.9,)]], steps=(0,)), keep=0)
    with pytest.raises(HeartError, match="svg2 has no blocks"):
        order_tuning.OrderProbe(SVG2(), [[(0.9,)]], steps=(0,))


def test_the_command_writes_a_config_that_serves(tmp_path, capsys):
    import heart_attention as heart
    from heart_attention.cli.main import main
    from heart_attention.evaluation import pipelines

    path = str(tmp_path / "order.json")
    assert (
        main(
            ["tune-order", "--quick", "--steps", "7", "--looks", "1", "--prompt", "a red ball", "--json", "--out", path]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    loaded = HeartConfig.load(path)
    assert told["order"] == [list(row) for row in loaded.order]
    assert told["thresholds"] == [list(row) for row in loaded.thresholds]
    assert len(loaded.order) == 9 and len(loaded.order[0]) == 4 and told["moved"] > 0
    pipe = pipelines.load("tiny")
    call = pipelines.call_arguments("tiny", pipe, steps=7, quick=True)
    with heart.enabled(pipe, loaded.replace(force_sparse=True)):
        pipe(prompt="a red ball", generator=torch.Generator().manual_seed(0), output_type="latent", **call)
        assert 0 < heart.stats(pipe)["density"] < 1


def test_the_command_refuses_what_leaves_nothing_to_look_at(capsys):
    from heart_attention.cli.main import main

    assert main(["tune-order", "--quick", "--steps", "1"]) != 0
    assert "leave none to look at" in capsys.readouterr().err
    assert main(["tune-order", "--quick", "--looks", "0"]) != 0
    assert "--looks is 0" in capsys.readouterr().err
