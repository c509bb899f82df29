"""SVG2: k-means against its words, private randomness, warm starts, text clusters, and the laws of a predictor."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

import heart_attention as heart
from heart_attention import backbones
from heart_attention.backbones import SVG2, kmeans
from heart_attention.errors import HeartError
from heart_attention.kernels.ops import native as native
from heart_attention.masks import Text

torch.set_num_threads(1)
some = settings(max_examples=examples(12), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 10_000)
small = SVG2(q_clusters=5, k_clusters=12, init_iters=6)
PATHS = ["torch", "native"]


def inputs(seed, n, d=8, heads=2, batch=1):
    """q, k as views of [B, N, H, D]."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, n, heads, d, generator=g).transpose(1, 2) for _ in range(2)]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    use(request.param, monkeypatch)


def use(which, monkeypatch):
    """Let one implementation run."""
    if which == "torch":
        monkeypatch.setattr(native, "reasons_not", lambda *tensors: ["switched off"])
    elif not native.serves(torch.zeros(1, 1)):
        pytest.skip("no compiler")


def whole_numbers(seed, *shape):
    """Small whole numbers: distances are exact, and many are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def brute_force(x, centroids, iters):
    """Lloyd by its words, in fp64, one token at a time."""
    centroids = centroids.double().clone()
    for _ in range(iters):
        distances = [[float((t - c).square().sum()) for c in centroids] for t in x.double()]
        labels = [row.index(min(row)) for row in distances]  # the first among equals
        new = centroids.clone()
        for c in range(len(centroids)):
            mine = [x[i].double() for i, label in enumerate(labels) if label == c]
            if mine:
                new[c] = torch.stack(mine).mean(0)
        shift = float((new - centroids).norm(dim=-1).max())
        centroids = new
        if shift < 1e-4:
            break
    return labels, centroids


@pytest.mark.parametrize("which", PATHS)
def test_brute_force_twin(which, monkeypatch):
    use(which, monkeypatch)

    @some
    @given(seeds, st.integers(1, 60), st.integers(1, 20), st.integers(1, 9))
    def law(seed, n, count, d):
        x, init = whole_numbers(seed, 1, 1, n, d), whole_numbers(seed + 1, 1, 1, min(count, n), d)
        labels, centroids, sizes = small.cluster(x, init, 1)  # one iteration: exact, so ties are ties
        want, means = brute_force(x[0, 0], init[0, 0], 1)
        assert labels[0, 0].tolist() == want and labels.dtype == torch.int16
        assert (centroids[0, 0] - means).abs().max() < 1e-6
        assert sizes[0, 0].tolist() == [want.count(c) for c in range(min(count, n))]

    law()


def test_labels_of_c_are_those_of_pytorch():
    if not native.serves(torch.zeros(1, 1)):
        pytest.skip("no compiler")
    for seed, (n, count, d) in enumerate([(1, 1, 1), (100, 7, 3), (1000, 130, 64), (2000, 300, 128), (777, 100, 40)]):
        x = inputs(seed, n, d, heads=1)[0][0, 0]
        centroids = x[torch.randint(n, (count,), generator=torch.Generator().manual_seed(seed))]  # some are equal
        ((labels, *_),) = native.kmeans([x], [centroids], [1])
        assert torch.equal(labels, kmeans.torch_assign(x, centroids))


def test_stops_when_nothing_moves(path):
    x = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    found = kmeans.lloyd(x, torch.tensor([[0.0], [5.0], [99.0]]), 50)
    assert found.iterations == 2 and found.labels.tolist() == [0, 0, 1, 1] and found.sizes.tolist() == [2, 2, 0]
    assert torch.allclose(found.centroids, torch.tensor([[0.05], [5.05], [99.0]]))  # an empty cluster stays


def test_map_by_its_words():
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 1, 4, 8, generator=g), torch.randn(1, 1, 20, 8, generator=g)
    sizes = torch.randint(0, 5, (1, 1, 20), generator=g)
    for tau, ratio in ((0.5, 0.0), (0.5, 0.3), (0.9, 0.1)):
        kept = SVG2(min_ratio=ratio).map(q, k, sizes, tau)[0, 0]
        weights = (q[0, 0].double() @ k[0, 0].double().T / 8**0.5).exp() * sizes[0, 0]
        mass = weights / weights.sum(-1, keepdim=True)
        for row, got in zip(mass.tolist(), kept.tolist()):
            before, want = 0.0, set()
            for position, j in enumerate(sorted(range(20), key=lambda j: (-row[j], j))):
                if before <= tau or position < int(ratio * 20):
                    want.add(j)
                before += row[j]
            assert {j for j in range(20) if got[j]} == want
    assert SVG2().map(q, k, sizes, 1.0).all()


@pytest.mark.parametrize("which", PATHS)
def test_heads_and_items_are_independent(which, monkeypatch):
    """A permutation, a subset and a single item give the same bits as the whole."""
    use(which, monkeypatch)

    @some
    @given(seeds, st.integers(12, 80), st.sampled_from(["cond", "uncond"]))
    def law(seed, n, branch):
        q, k = inputs(seed, n, heads=4, batch=2)
        tau = torch.linspace(0.3, 0.95, 8).view(2, 4)
        key = (3, branch, 0)
        whole = small.predict(q, k, tau, key=key)
        order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
        moved = small.predict(q[:, order], k[:, order], tau[:, order], heads=order, key=key)
        part = small.predict(q[:, 1:3], k[:, 1:3], tau[:, 1:3], heads=[1, 2], key=key)
        item = small.predict(q[1:], k[1:], tau[1:], key=(3, branch, 1))
        for name in ("map", "q_labels", "k_labels"):
            all_of = getattr(whole, name)
            assert torch.equal(getattr(moved, name), all_of[:, order])
            assert torch.equal(getattr(part, name), all_of[:, 1:3])
            assert torch.equal(getattr(item, name), all_of[1:])

    law()


@some
@given(seeds, st.floats(0.05, 1.1), st.floats(0.05, 1.1))
def test_monotone_in_tau_and_every_row_keeps_a_cluster(seed, one, other):
    q, k = inputs(seed, 60)
    low, high = (small.predict(q, k, tau).map for tau in sorted((one, other)))
    assert (low <= high).all() and low.any(-1).all()


def test_kept_mass_reaches_tau():
    q, k = inputs(5, 100, heads=1)
    state = small.new_state()
    mask = small.predict(q, k, 0.8, state)
    q_centroids, k_centroids = state.centroids[0, 0]
    mass = torch.softmax(q_centroids @ k_centroids.T / 8**0.5 + mask.sizes()[1][0, 0].float().log(), -1)
    assert ((mass * mask.map[0, 0]).sum(-1) >= 0.8 - 1e-6).all()


def test_randomness_is_private_and_keyed():
    q, k = inputs(1, 60, heads=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = small.predict(q, k, 0.8, key=(0, "cond", 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.k_labels, small.predict(q, k, 0.8, key=(0, "cond", 5)).k_labels)  # the item plays no part
    others = [small.predict(q, k, 0.8, key=(1, "cond", 0)), small.predict(q, k, 0.8, key=(0, "uncond", 0)),
              small.predict(q, k, 0.8, heads=[1], key=(0, "cond", 0)),
              SVG2(5, 12, init_iters=6, seed=1).predict(q, k, 0.8, key=(0, "cond", 0))]  # fmt: skip
    assert not any(torch.equal(one.k_labels, other.k_labels) for other in others)


def test_warm_start_goes_on_from_stored_centroids(path):
    (q, k), (q2, k2) = inputs(1, 90, heads=3), inputs(2, 90, heads=3)
    state = small.new_state()
    small.predict(q, k, 0.8, state, key=(0, "", 0))
    assert set(state.centroids) == {(0, 0), (0, 1), (0, 2)}
    assert state.nbytes() == {"centroids": 3 * (5 + 12) * 8 * 4}
    old = state.centroids[0, 1]
    mask = small.predict(q2[:, 1:2], k2[:, 1:2], 0.8, state, heads=[1], key=(0, "", 0))
    want, centroids, _ = small.cluster(k2[:, 1:2], old[1][None, None], small.step_iters)
    assert torch.equal(mask.k_labels, want) and torch.equal(state.centroids[0, 1][1], centroids[0, 0])
    assert torch.equal(state.centroids[0, 1][0], small.cluster(q2[:, 1:2], old[0][None, None], 2)[1][0, 0])
    small.predict(q, k, 0.8, state, key=(0, "", 7))
    assert (7, 0) in state.centroids
    state.clear()
    assert torch.equal(small.predict(q, k, 0.8, state).k_labels, small.predict(q, k, 0.8).k_labels)


@pytest.mark.parametrize("warm_up", [True, False])
def test_the_last_dense_step_seeds_the_first_sparse_one(warm_up):
    """Three steps, two of them dense, all masks predicted anew: where the centroids of the third come from."""
    backbone = replace(small, warm_up=warm_up)
    steps = [[*inputs(seed, 90), inputs(seed + 50, 90)[0]] for seed in range(3)]
    made = heart.HeartConfig(backbone, 0.8, heart.Always(), dense_steps=2, force_sparse=True, scale_clusters=False)
    engine = heart.Engine(made, layers=1, heads=2)
    outs = [heart.attention(*qkv, (0, step, ""), engine) for step, qkv in enumerate(steps)]
    state = backbone.new_state()
    if warm_up:
        small.predict(*steps[1][:2], 0.8, state, key=(0, "", 0))  # step 1, from random tokens
    mask = small.predict(*steps[2][:2], 0.8, state, key=(0, "", 0))
    (group,) = next(iter(engine._states.values())).groups
    assert torch.equal(group.packed.unpack().k_labels, mask.k_labels)
    assert torch.equal(group.memory.centroids[0, 1][1], state.centroids[0, 1][1])
    assert engine.stats()["dense_calls"] == 2
    for step in range(2):
        dense = torch.nn.functional.scaled_dot_product_attention(*steps[step])
        assert torch.equal(outs[step], dense)


def test_clusters_of_the_last_dense_step_are_reused_where_drift_allows():
    backbone = replace(small, warm_up=True)
    made = heart.HeartConfig(backbone, 0.8, heart.Interval(9), dense_steps=1, force_sparse=True, scale_clusters=False)
    engine = heart.Engine(made, layers=1, heads=2)
    q, k = inputs(3, 90)
    for step in range(3):
        heart.attention(q * (1 + step), k, k, (0, step, ""), engine)
    assert engine.stats()["refresh_rate"] == 0
    (group,) = next(iter(engine._states.values())).groups
    assert torch.equal(group.packed.unpack().k_labels, small.predict(q, k, 0.8, key=(0, "", 0)).k_labels)


def test_centroids_of_another_size_are_no_start():
    q, k = inputs(1, 90)
    state = small.new_state()
    small.predict(q, k, 0.8, state)
    other = SVG2(4, 9, init_iters=6)
    assert torch.equal(other.predict(q, k, 0.8, state).k_labels, other.predict(q, k, 0.8).k_labels)


@some
@given(seeds, st.integers(0, 20), st.integers(0, 9), st.integers(0, 9))
def test_text_is_two_more_clusters(seed, start, prompt, unused):
    n = 50 + prompt + unused
    q, k = inputs(seed, n)
    text = Text(start, prompt, unused)
    mask = small.predict(q, k, 0.8, text=text)
    video = text.video_index(n)
    alone = small.predict(q[:, :, video], k[:, :, video], 0.8)
    tokens = mask.dense_tokens()
    assert torch.equal(tokens[:, :, video][..., video], alone.dense_tokens())
    valid = torch.arange(start, start + prompt)
    slots = torch.arange(start + prompt, text.end)
    seen = torch.cat([video, valid])
    assert tokens[:, :, valid][..., seen].all() and tokens[:, :, seen][..., valid].all()
    assert not tokens[:, :, seen][..., slots].any() and not tokens[:, :, slots][..., seen].any()
    assert tokens[:, :, slots][..., slots].all()


def test_nan_raises_nothing(path):
    q, k = inputs(1, 60, heads=1)
    q = q.clone()
    q[0, 0, 7] = float("nan")
    mask = small.predict(q, k, 0.8)
    assert mask.q_labels.min() >= 0 and mask.q_labels.max() < 5 and mask.map.any(-1).all()


def test_bf16_is_clustered_in_fp32(path):
    q, k = inputs(1, 200)
    mask = small.predict(q.bfloat16(), k.bfloat16(), 0.8)
    assert torch.equal(mask.k_labels, small.predict(q.bfloat16().float(), k.bfloat16().float(), 0.8).k_labels)


def test_cluster_counts_scale_with_the_tokens():
    assert SVG2().scaled_to(32760) == SVG2() == SVG2().scaled_to(75600)
    at = SVG2().scaled_to(4800)
    assert (at.q_clusters, at.k_clusters) == (44, 147)
    assert SVG2().scaled_to(1).k_clusters == 1


def test_settings_there_and_back():
    assert backbones.from_dict(small.to_dict()) == small and backbones.by_name("svg2", seed=3) == SVG2(seed=3)
    assert isinstance(SVG2(), backbones.Backbone)


q40, k40 = inputs(0, 40)


@pytest.mark.parametrize("make, message", [
    (lambda: SVG2(q_clusters=0), "q_clusters=0"),
    (lambda: SVG2(k_clusters=2.5), "k_clusters=2.5"),
    (lambda: SVG2(init_iters=0), "init_iters=0"),
    (lambda: SVG2(min_ratio=1.5), "min_ratio=1.5"),
    (lambda: SVG2(k_clusters=40_000), "16-bit"),
    (lambda: SVG2().predict(q40, k40, 0.9), "300 clusters for 40 tokens"),
    (lambda: small.predict(q40, k40, 0.9, text=Text(10, 30)), "12 clusters for 10 tokens"),
    (lambda: small.predict(q40, k40[..., :4], 0.9), "do not match"),
    (lambda: small.predict(q40, k40, float("nan")), "threshold nan"),
    (lambda: small.predict(q40, k40, [[0.9]]), "do not fit"),
    (lambda: small.predict(q40, k40, 0.9, heads=[1]), "1 head numbers for 2 heads"),
    (lambda: small.predict(q40, k40[:, :, :39], 0.9, text=Text(30, 9)), "as many keys as queries"),
    (lambda: small.cluster(q40, k40[..., :4], 2), "do not match"),
    (lambda: small.cluster(q40, k40, 0), "iters=0"),
    (lambda: small.cluster(q40[:, :, :5], k40, 2), "40 clusters for 5 tokens"),
    (lambda: small.map(q40, k40, torch.ones(1, 2, 39), 0.9), "do not match"),
])  # fmt: skip
def test_bad_input_is_one_clear_sentence(make, message):
    with pytest.raises(HeartError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
