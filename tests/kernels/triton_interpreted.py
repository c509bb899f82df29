"""The Triton kernels in Triton's interpreter, fp32, against the definitions.

Not collected by name: `test_triton.py` runs this file in a process with TRITON_INTERPRET=1, which must be set before
Triton is imported. By hand: `TRITON_INTERPRET=1 pytest tests/kernels/triton_interpreted.py`.
"""

import math
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention import kernels
from heart_attention.backbones import SVG2, XAttention, kmeans
from heart_attention.calibration.measure.candidates import Spec, Trials
from heart_attention.errors import HeartError
from heart_attention.kernels import eager, triton_attention
from heart_attention.kernels.ops import scores, triton_predict
from heart_attention.masks import BlockMask, ClusterMask
from heart_attention.online.call import CallContext

assert os.environ.get("TRITON_INTERPRET") == "1", "run with TRITON_INTERPRET=1"
torch.set_num_threads(1)
few = settings(max_examples=examples(12), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def qkv(g, n, d, heads=2, batch=1, scale=1.0):
    """Views of [B, N, H, D], as diffusers hands them over."""
    return [scale * torch.randn(batch, n, heads, d, generator=g).transpose(1, 2) for _ in range(3)]


def random_blocks(g, n, block, density=0.4, heads=2, batch=1, block_k=None, **more):
    m, m_k = -(-n // block), -(-n // (block_k or block))
    blocks = torch.rand(batch, heads, m, m_k, generator=g) < density
    blocks[..., int(torch.randint(m_k, (1,), generator=g))] = True
    return BlockMask(blocks, block, n, n, block_k=block_k, **more)


def random_clusters(g, n, q_clusters, k_clusters, density=0.4, heads=2, batch=1):
    """Some clusters may be empty; the key cluster that every row keeps holds a token."""
    q_labels = torch.randint(q_clusters, (batch, heads, n), generator=g).to(torch.int16)
    k_labels = torch.randint(k_clusters, (batch, heads, n), generator=g).to(torch.int16)
    kept = torch.rand(batch, heads, q_clusters, k_clusters, generator=g) < density
    kept.scatter_(3, k_labels[..., :1, None].long().expand(-1, -1, q_clusters, -1), True)
    return ClusterMask(kept, q_labels, k_labels)


def both(mask, q, k, v, rest="drop", **more):
    want = eager.KERNEL.run(eager.KERNEL.plan(mask, rest), q, k, v, **more)
    return triton_attention.KERNEL.run(triton_attention.KERNEL.plan(mask, rest), q, k, v, **more), want


def check(mask, q, k, v, **more):
    got, want = both(mask, q, k, v, **more)
    assert (got - want).abs().max() <= 2e-6


@few
@given(
    n=st.integers(1, 90), block=st.sampled_from([16, 24, 64, 128]), d=st.sampled_from([8, 20, 32, 64]),
    density=st.floats(0, 1), tail=st.integers(0, 9), ordered=st.booleans(), seed=st.integers(0, 99),
    block_k=st.sampled_from([None, 16, 40, 64]),
)  # fmt: skip
def test_blocks(n, block, d, density, tail, ordered, seed, block_k):
    g = generator(seed)
    order = torch.randperm(n, generator=g) if ordered else None
    more = {"order": order, "tail": tail, "block_k": block_k}
    check(random_blocks(g, n, block, density, heads=1, **more), *qkv(g, n + tail, d, heads=1))


@few
@given(
    n=st.integers(1, 140), clustered=st.booleans(), block=st.sampled_from([16, 24, 64]), block_k=st.sampled_from([16, 40, 64]),
    density=st.floats(0, 1), tail=st.integers(0, 9), ordered=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_rest_as_means(n, clustered, block, block_k, density, tail, ordered, seed):
    g = generator(seed)
    if clustered:
        return check(random_clusters(g, n, 5, 30, density), *qkv(g, n, 33), rest="mean")
    blocks = torch.rand(1, 2, -(-n // block), -(-n // block_k), generator=g) < density
    order = torch.randperm(n, generator=g) if ordered else None
    mask = BlockMask(blocks, block, n, n, order, tail, block_k=block_k)
    check(mask, *qkv(g, n + tail, 20), rest="mean")


@pytest.mark.parametrize("rest", ["drop", "mean"])
def test_clusters_cut_into_equal_groups(rest):
    q, k, v = qkv(generator(3), 150, 32)
    backbone = SVG2(6, 12, min_ratio=0.0, init_iters=2, rank="error", equal_groups=64)
    mask = backbone.predict(q, k, 0.5, v=v)
    assert mask.kind == "block" and mask.density().max() < 1
    check(mask, q, k, v, rest=rest)


@few
@given(
    n=st.integers(1, 140), clustered=st.booleans(), density=st.sampled_from([0.0, 0.3, 1.0]), tail=st.integers(0, 9),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_the_mass_of_the_rest(n, clustered, density, tail, seed):
    g = generator(seed)
    mask = random_clusters(g, n, 5, 30, density) if clustered else random_blocks(g, n, 16, density, tail=tail)
    q, k, v = qkv(g, n if clustered else n + tail, 20)
    for rest in ("drop", "mean"):
        want, got = torch.full((1, 2), -1.0), torch.full((1, 2), -1.0)
        plain = kernels.run(triton_attention.KERNEL.plan(mask, rest), q, k, v)
        kernels.run(eager.KERNEL.plan(mask, rest), q, k, v, mass=want)
        assert torch.equal(kernels.run(triton_attention.KERNEL.plan(mask, rest), q, k, v, mass=got), plain)
        assert (got - want).abs().max() <= 1e-6


@few
@given(n=st.integers(1, 90), clustered=st.booleans(), seed=st.integers(0, 99))
def test_what_is_kept_and_the_rest_alone_add_up(n, clustered, seed):
    g = generator(seed)
    mask = random_clusters(g, n, 4, 9) if clustered else random_blocks(g, n, 16)
    q, k, v = qkv(g, n, 20)
    (a, a_lse), (b, b_lse) = (triton_attention.KERNEL.run_part(mask, q, k, v, rest) for rest in ("drop", "only"))
    weight = (a_lse - torch.logaddexp(a_lse, b_lse)).exp().unsqueeze(-1)
    want = eager.KERNEL.run(eager.KERNEL.plan(mask, "mean"), q, k, v)
    assert (weight * a + (1 - weight) * b - want).abs().max() <= 2e-6


@few
@given(
    n=st.integers(1, 300), block=st.sampled_from([64, 128]), d=st.sampled_from([20, 32, 64]), tail=st.integers(0, 9),
    rest=st.sampled_from(["drop", "mean"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_keys_through_tensor_descriptors(n, block, d, tail, rest, seed):
    """As on sm_90, where whole blocks are fetched by descriptor and the cut one reads zeros beyond the last key."""
    g = generator(seed)
    mask, x = random_blocks(g, n, block, tail=tail), qkv(g, n + tail, d)
    x[1][:, :, n:], x[2][:, :, n:] = 1e9, 1e9  # a tail must not leak into the cut block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "target_of", lambda device: "sm_90")
        patch.setattr(
            triton_attention,
            "_config_wide",
            lambda d_pad, itemsize, rows: triton_attention.Config(rows, 64, 8, 2, True),
        )
        got, want = both(mask, *x, rest=rest)
    assert (got - want)[:, :, :n].abs().max() <= 2e-6


@few
@given(n=st.integers(1, 70), tail=st.integers(0, 5), seed=st.integers(0, 99))
def test_blocks_in_an_order_for_every_head(n, tail, seed):
    g = generator(seed)
    several = torch.stack([torch.randperm(n, generator=g) for _ in range(2)])
    own = torch.randint(2, (1, 2), generator=g).to(torch.int8)
    check(random_blocks(g, n, 16, order=several, order_of=own, tail=tail), *qkv(g, n + tail, 32))


@few
@given(
    n=st.integers(1, 80), clustered=st.booleans(), tail=st.integers(0, 3), ordered=st.booleans(), share=st.floats(0, 1),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_parts_add_up(n, clustered, tail, ordered, share, seed):
    """Two disjoint parts of a mask, merged by their log-sums; a query may have no key in one of them."""
    g = generator(seed)
    if clustered:
        mask, name, tail = random_clusters(g, n, 4, 9), "map", 0
    else:
        order = torch.randperm(n, generator=g) if ordered else None
        mask, name = random_blocks(g, n, 16, order=order, tail=tail), "blocks"
    q, k, v = qkv(g, n + tail, 20)
    kept = getattr(mask, name)
    mine = torch.rand(kept.shape, generator=g) < share
    parts = [replace(mask, **{name: kept & half}) for half in (mine, ~mine)]
    (a, a_lse), (b, b_lse) = (triton_attention.KERNEL.run_part(part, q, k, v) for part in parts)
    weight = (a_lse - torch.logaddexp(a_lse, b_lse)).exp().unsqueeze(-1)
    want = eager.KERNEL.run(eager.KERNEL.plan(mask), q, k, v)
    assert (weight * a + (1 - weight) * b - want).abs().max() <= 2e-6


@pytest.mark.parametrize("svg2", [False, True])
def test_calibration_climbs_its_candidates(svg2):
    backbone = SVG2(q_clusters=3, k_clusters=9, init_iters=2) if svg2 else XAttention(stride=4, block=16)
    trials = Trials(
        Spec.of(backbone, (0.3, 0.7, 0.9, 1.0), kernel="triton"), CallContext(layer=0), "0", *qkv(generator(0), 50, 16)
    )
    for n, out in trials.climb():
        torch.testing.assert_close(out, trials.run([0, 1], n), atol=2e-6, rtol=1e-5)


@few
@given(
    n=st.integers(1, 80), cq=st.integers(1, 5), ck=st.integers(1, 30), d=st.sampled_from([8, 33, 64]),
    density=st.floats(0, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_clusters(n, cq, ck, d, density, seed):
    g = generator(seed)
    check(random_clusters(g, n, cq, ck, density, heads=1), *qkv(g, n, d, heads=1))


def test_half_precision():
    """The 16-bit path; bf16 has the same code, but the interpreter multiplies it wrongly."""
    g = generator(12)
    q, k, v = (x.half() for x in qkv(g, 60, 32))
    for mask in (random_blocks(g, 60, 16), random_clusters(g, 60, 3, 9)):
        got, want = both(mask, q, k, v)
        assert got.dtype == torch.float16 and (got.float() - want.float()).abs().max() <= 2e-3


def test_two_batch_items_and_a_scale():
    g = generator(0)
    check(random_blocks(g, 70, 32, batch=2), *qkv(g, 70, 16, batch=2), scale=0.7)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_scale_that_is_not_positive(scale):
    g = generator(13)
    check(random_blocks(g, 70, 32), *qkv(g, 70, 16), scale=scale, rest="mean")


def test_more_queries_than_keys():
    g = generator(1)
    q, k, v = qkv(g, 60, 16, heads=1)
    mask = BlockMask(torch.ones(1, 1, 2, 1, dtype=torch.bool), 32, 60, 20)
    check(mask, q, k[:, :, :20], v[:, :, :20])


@pytest.mark.parametrize("scale", [1e-4, 1.0, 40.0])
def test_huge_and_tiny_logits(scale):
    g = generator(2)
    q, k, v = qkv(g, 48, 32)
    got, want = both(random_blocks(g, 48, 16), q * scale, k * scale, v)
    logits = (q @ k.mT).abs().max() * scale**2 / math.sqrt(32)
    assert (got - want).abs().max() <= 2e-6 + 2e-7 * logits  # a logit of 1e4 is itself known to 1e-3 only


def test_a_first_tile_of_minus_infinity_is_no_nan():
    q, k, v = qkv(generator(3), 40, 16)
    q[..., 0] = 1.0
    k[:, :, :16, 0] = -math.inf  # every logit of the first block
    got, want = both(BlockMask.full(1, 2, 40, 16), q, k, v)
    assert want.isfinite().all() and (got - want).abs().max() <= 2e-6


def test_nan_spreads_only_to_rows_that_attend_to_it():
    g = generator(4)
    q, k, v = qkv(g, 64, 16)
    mask = random_blocks(g, 64, 16, 0.3)
    k[0, 0, 20] = math.nan
    v[0, 1, 50] = math.inf
    got, want = both(mask, q, k, v)
    assert torch.equal(got.isfinite(), want.isfinite()) and not want.isfinite().all()


def test_writes_into_out():
    g = generator(5)
    q, k, v = qkv(g, 50, 16)
    out = torch.empty(1, 50, 2, 16).transpose(1, 2)
    plan = triton_attention.KERNEL.plan(random_blocks(g, 50, 16))
    got = kernels.run(plan, q, k, v, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(got, kernels.run(plan, q, k, v))


def test_runs_pack_touching_clusters():
    labels = torch.arange(4, dtype=torch.int16).repeat_interleave(torch.tensor([3, 5, 20, 2]))[None, None]
    kept = torch.tensor([[1, 1, 0, 1]], dtype=torch.bool)[None, None]
    mask = ClusterMask(kept, torch.zeros_like(labels), labels)
    runs, first, end = triton_attention.key_runs(triton_attention.KERNEL.plan(mask))
    assert [(int(r) >> 5, int(r) & 31) for r in runs] == [(0, 8), (28, 2)]
    assert first.tolist() == [0] and end.tolist() == [2]


@few
@given(n=st.integers(1, 300), clusters=st.integers(1, 21), density=st.floats(0, 1), seed=st.integers(0, 99))
def test_runs_of_a_device_are_those_that_are_counted(n, clusters, density, seed):
    g = generator(seed)
    plan = triton_attention.KERNEL.plan(random_clusters(g, n, 3, clusters, density, batch=2))
    want = triton_attention.key_runs_counted(plan)
    room = n // triton_attention.RUN + (clusters + 1) // 2
    got = triton_attention.key_runs_on_device(plan, room)
    spans = [[runs[a:b].tolist() for a, b in zip(first, end)] for runs, first, end in (got, want)]
    assert spans[0] == spans[1]
    assert int((got.run_end - got.run_first).max()) <= room
    plan.extra.update(got._asdict())
    plan.extra.pop(f"work{plan.extra['rows']}")
    q, k, v = qkv(g, n, 8, batch=2)
    counted = triton_attention.KERNEL.plan(random_clusters(generator(seed), n, 3, clusters, density, batch=2))
    assert torch.equal(triton_attention.KERNEL.run(plan, q, k, v), triton_attention.KERNEL.run(counted, q, k, v))


def test_longest_work_comes_first():
    blocks = torch.eye(4, dtype=torch.bool)[None, None].clone()
    blocks[0, 0, 2] = True
    work = triton_attention.KERNEL.plan(BlockMask(blocks, 16, 60, 60)).extra["work16"]
    assert work[0].tolist() == [0, 32, 48, 2, 6, 0, 0]
    assert sorted(work[:, 1].tolist()) == [0, 16, 32, 48] and int(work[:, 2].max()) == 60


@few
@given(
    n=st.integers(1, 120), d=st.sampled_from([8, 20]), sizes=st.sampled_from([(16, 128), (16, 64), (8, 8), (4, 16)]),
    pad=st.sampled_from(["block", 1]), ordered=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_scores(n, d, sizes, pad, ordered, seed):
    g = generator(seed)
    q, k, _ = qkv(g, n, d, scale=2.0)
    order = torch.randperm(n, generator=g) if ordered else None
    backbone = XAttention(*sizes, pad=pad if pad == "block" else 3 * sizes[1])
    want = backbone.scores(q, k, order)
    more = {"order": order, "q_blocks": want.shape[2], "k_blocks": want.shape[3], "masked": pad == "block"}
    assert (triton_predict.xattention_scores(q, k, *sizes, **more) - want).abs().max() <= 4e-6  # rows sum to 16


def test_scores_take_heads_in_turn(monkeypatch):
    q, k, _ = qkv(generator(6), 50, 16, heads=3)
    whole = triton_predict.xattention_scores(q, k, 16, 32)
    monkeypatch.setattr(triton_predict, "SCORE_BYTES", 1)
    assert torch.equal(triton_predict.xattention_scores(q, k, 16, 32), whole)


def test_scores_of_a_layer_take_one_launch(monkeypatch):
    q, k, _ = qkv(generator(14), 50, 16, heads=3)
    launches, launch = [], triton_predict._scores
    monkeypatch.setattr(triton_predict, "_scores", lambda *x: launches.append(x[0].shape[1]) or launch(*x))
    out = list(torch.zeros(3, 2, 2))
    scores._triton_block_scores(list(q[0]), list(k[0]), None, 16, 2, -(-50 // 16), out)
    assert launches == [3]
    assert (torch.stack(out) - XAttention(16, 32).scores(q, k)[0]).abs().max() <= 4e-6


@few
@given(n=st.integers(1, 150), c=st.integers(1, 80), d=st.sampled_from([8, 33, 64]), seed=st.integers(0, 99))
def test_assignment(n, c, d, seed):
    g = generator(seed)
    x, centroids, _ = qkv(g, max(n, c), d)
    x, centroids = x[:, :, :n], centroids[:, :, :c]
    got = triton_predict.kmeans_assign(x, centroids)
    for h in range(2):
        assert torch.equal(got[0, h].long(), kmeans.torch_assign(x[0, h], centroids[0, h]))


def test_assignment_of_half_precision_tokens():
    """16-bit tokens meet centroids split in two: the nearest in fp32, but for ties beyond the bits that are kept."""
    g = generator(11)
    x, centroids, _ = qkv(g, 60, 40)
    x = x.half()
    got = triton_predict.kmeans_assign(x, centroids)
    distance = torch.cdist(x.double(), centroids.double())  # [1, 2, 60, 60]
    excess = distance.gather(3, got[..., None].long()).squeeze(3) - distance.amin(3)
    assert excess.max() <= 1e-6
    parts = triton_predict.centroid_parts(centroids, torch.bfloat16)
    assert (parts.float().sum(0) - centroids).abs().max() <= 2**-16 * centroids.abs().max()


def test_ties_go_to_the_lowest_index():
    x = torch.zeros(1, 1, 5, 16)
    assert triton_predict.kmeans_assign(x, torch.ones(1, 1, 130, 16)).tolist() == [[[0] * 5]]


@pytest.mark.parametrize("iters", [1, 6])
def test_kmeans(iters):
    g = generator(7)
    x = qkv(g, 50, 16)[0]
    x[0, 1] = x[0, 1].round()  # repeated values let this head stop early
    init = x[:, :, :6].clone()
    init[:, :, 4] = 100.0  # stays empty
    found = triton_predict.kmeans(x, init, iters)
    for h in range(2):
        want = kmeans.lloyd(x[0, h], init[0, h], iters)
        assert torch.equal(found.labels[0, h].long(), want.labels.long())
        assert (found.centroids[0, h] - want.centroids).abs().max() <= 1e-6
        assert torch.equal(found.sizes[0, h], want.sizes) and int(found.iterations[0, h]) == want.iterations


@pytest.mark.parametrize("backbone", [XAttention(8, 16), SVG2(3, 6, init_iters=2)], ids=["xattention", "svg2"])
def test_the_whole_way_of_a_layer_on_a_gpu(backbone, monkeypatch):
    """The operations' own choice of these kernels, prediction to output, as for tensors on a GPU."""
    q, k, v = qkv(generator(8), 50, 16)
    want = backbone.predict(q, k, 0.6)
    asked = []
    monkeypatch.setattr(triton_predict, "op_reasons", lambda x=None: asked.append(x) or [])
    got = backbone.predict(q, k, 0.6)
    assert asked and torch.equal(got.dense_tokens(), want.dense_tokens())
    check(got, q, k, v)


@pytest.mark.parametrize("n", [1, 40, 100])
def test_pooled_means(n, monkeypatch):
    monkeypatch.setattr(triton_predict, "POOL_SPAN", 40)  # several programs a head
    q, _, _ = qkv(generator(9), n, 20)
    assert (triton_predict.pooled_means(q) - q.mean(2)).abs().max() <= 1e-6


def test_refusals_name_the_value():
    g = generator(10)
    plan = triton_attention.KERNEL.plan(random_blocks(g, 20, 16))
    with pytest.raises(HeartError, match="not 300"):
        triton_attention.KERNEL.run(plan, *qkv(g, 20, 300))
    with pytest.raises(HeartError, match=r"not torch\.float64"):
        triton_attention.KERNEL.run(plan, *(x.double() for x in qkv(g, 20, 16)))
    assert triton_predict.score_reasons(16, 48) and not triton_predict.score_reasons(16, 128)
