"""XAttention: a brute-force twin, both implementations, and the laws a predictor must keep."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention import backbones
from heart_attention.backbones import XAttention
from heart_attention.errors import HeartError
from heart_attention.kernels.ops import native as native
from heart_attention.masks import Text
from heart_attention.token_order import tile_order

torch.set_num_threads(1)
some = settings(max_examples=examples(15), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 10_000)
small = XAttention(stride=4, block=16)
PATHS = ["torch", "native"]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def inputs(seed, n, d=8, heads=2, batch=1, dtype=torch.float32):
    """q, k as views of [B, N, H, D], as models hand them over; sharp enough for masks that differ."""
    g = generator(seed)
    return [(2 * torch.randn(batch, n, heads, d, generator=g)).to(dtype).transpose(1, 2) for _ in range(2)]


def brute_force(q, k, stride, block):
    """Block scores of one head [N, D] by the definition, token by token, in fp64, without any padding."""
    n_q, n_k, d = q.shape[0], k.shape[0], q.shape[1]
    q, k = q.double(), k.double()
    groups_q, groups_k = -(-n_q // stride), -(-n_k // stride)
    logits = torch.zeros(groups_q, groups_k, dtype=torch.float64)
    for i in range(groups_q):
        for j in range(groups_k):
            for r in range(stride):
                a, b = i * stride + stride - 1 - r, j * stride + r
                if a < n_q and b < n_k:
                    logits[i, j] += q[a] @ k[b] / (stride * math.sqrt(d))
    mass, per_block = logits.softmax(-1), block // stride
    scores = torch.zeros(-(-n_q // block), -(-n_k // block), dtype=torch.float64)
    for i in range(groups_q):
        for j in range(groups_k):
            scores[i // per_block, j // per_block] += mass[i, j]
    return scores


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    use(request.param, monkeypatch)


def use(which, monkeypatch):
    """Let one implementation run."""
    if which == "torch":
        monkeypatch.setattr(native, "reasons_not", lambda *tensors: ["switched off"])
    elif not native.serves(torch.zeros(1, 1)):
        pytest.skip("no compiler")


@pytest.mark.parametrize("which", PATHS)
def test_brute_force_twin(which, monkeypatch):
    use(which, monkeypatch)

    @some
    @given(
        seeds, st.integers(1, 70), st.integers(1, 70), st.integers(1, 19), st.sampled_from([(4, 16), (3, 9), (1, 5)])
    )
    def law(seed, n_q, n_k, d, sizes):
        q, _ = inputs(seed, n_q, d, heads=1)
        k, _ = inputs(seed + 1, n_k, d, heads=1)
        scores = XAttention(*sizes).scores(q, k)
        want = brute_force(q[0, 0], k[0, 0], *sizes)
        assert scores.shape[2:] == want.shape and scores.dtype == torch.float32
        assert (scores[0, 0] - want).abs().max() <= 2e-6 * sizes[1] / sizes[0]

    law()


@some
@given(seeds, st.integers(1, 200), st.integers(1, 33), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_c_agrees_with_pytorch(seed, n, d, dtype, shuffled):
    if not native.serves(torch.zeros(1, 1)):
        pytest.skip("no compiler")
    q, k = inputs(seed, n, d, dtype=dtype)
    order = torch.randperm(n, generator=generator(seed)) if shuffled else None
    fast = small.scores(q, k, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "reasons_not", lambda *tensors: ["switched off"])
        slow = small.scores(q, k, order)
    assert (fast - slow).abs().max() <= 2e-6 * 4


def test_whole_tiles_of_c_and_chunks_of_pytorch(path):
    """More blocks than one chunk holds, more columns than one stretch: the seams do not show."""
    q, k = inputs(5, 1250, 8, heads=1)
    scores = XAttention(stride=2, block=8).scores(q, k)[0, 0]
    groups = torch.nn.functional.pad(torch.stack([q[0, 0], k[0, 0]]), (0, 0, 0, -1250 % 2)).unflatten(1, (-1, 2))
    logits = torch.einsum("isd,jsd->ij", groups[0].flip(1), groups[1]) / (2 * math.sqrt(8))
    mass = torch.nn.functional.pad(logits.softmax(-1), (0, -625 % 4, 0, -625 % 4))
    want = mass.unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).sum((1, 3))
    assert (scores - want).abs().max() <= 8e-6


@some
@given(seeds, st.integers(17, 150), st.floats(0.05, 0.99))
def test_kept_mass_and_every_row_keeps_a_block(seed, n, tau):
    q, k = inputs(seed, n)
    mask, scores = small.predict(q, k, tau), small.scores(q, k).double()
    mass = (scores * mask.blocks).sum(-1)
    assert (mass >= tau * scores.sum(-1) * (1 - 1e-12)).all()
    assert mask.blocks.any(-1).all() and mask.blocks[..., 0].all()
    rest = mask.blocks[..., 1:] & (scores[..., 1:] > 0)  # block 0 is a free gift: minimality is about the others
    least = torch.where(rest, scores[..., 1:], torch.inf).amin(-1)
    gift = scores[..., 0]
    assert ((mass - least - gift < tau * scores.sum(-1)) | ~rest.any(-1)).all()


@some
@given(seeds, st.integers(1, 150), st.floats(0.05, 1.1), st.floats(0.05, 1.1))
def test_monotone_in_tau(seed, n, one, other):
    q, k = inputs(seed, n)
    low, high = (small.predict(q, k, tau).blocks for tau in sorted((one, other)))
    assert (low <= high).all()


@pytest.mark.parametrize("which", PATHS)
def test_heads_and_items_are_independent(which, monkeypatch):
    """A permutation, a subset and a single item give the same bits as the whole."""
    use(which, monkeypatch)

    @some
    @given(seeds, st.integers(1, 150))
    def law(seed, n):
        q, k = inputs(seed, n, heads=4, batch=2)
        tau = 0.3 + 0.65 * torch.rand(2, 4, generator=generator(seed))
        whole, scores = small.predict(q, k, tau).blocks, small.scores(q, k)
        order = torch.randperm(4, generator=generator(seed))
        assert torch.equal(small.predict(q[:, order], k[:, order], tau[:, order]).blocks, whole[:, order])
        assert torch.equal(small.predict(q[:, 1:3], k[:, 1:3], tau[:, 1:3], heads=[1, 2]).blocks, whole[:, 1:3])
        assert torch.equal(small.predict(q[1:], k[1:], tau[1:]).blocks, whole[1:])
        assert torch.equal(small.scores(q[1:, 2:3], k[1:, 2:3]), scores[1:, 2:3])

    law()


def test_thresholds_by_head_and_by_item(path):
    q, k = inputs(3, 130, heads=3, batch=2)
    each = [small.predict(q, k, tau).blocks for tau in (0.5, 0.8, 0.95)]
    by_head = small.predict(q, k, [0.5, 0.8, 0.95]).blocks
    assert all(torch.equal(by_head[:, h], each[h][:, h]) for h in range(3))
    by_item = small.predict(q, k, torch.tensor([[0.5] * 3, [0.95] * 3])).blocks
    assert torch.equal(by_item[0], each[0][0]) and torch.equal(by_item[1], each[2][1])
    dense = small.predict(q, k, [0.5, 1.0, 7.0])
    assert dense.blocks[:, 1:].all() and torch.equal(dense.blocks[:, 0], each[0][:, 0])


@some
@given(seeds, st.integers(1, 100), st.integers(1, 40))
def test_padding_never_changes_masks_of_real_tokens(seed, n, more):
    """Whatever lies behind the tokens in memory or in unused text slots: the mask of the others stays."""
    q, k = inputs(seed, n + more)
    want = small.predict(q[:, :, :n].clone(), k[:, :, :n].clone(), 0.8)
    assert torch.equal(small.predict(q[:, :, :n], k[:, :, :n], 0.8).blocks, want.blocks)
    prompt = n // 3
    slots = small.predict(q, k, 0.8, text=Text(n - prompt, prompt, more))
    assert torch.equal(slots.blocks, want.blocks) and slots.tail == more and slots.n_q == n
    with_nan = q.clone()
    with_nan[:, :, n:] = float("nan")
    assert torch.equal(small.predict(with_nan, k, 0.8, text=Text(n - prompt, prompt, more)).blocks, want.blocks)


@some
@given(seeds, st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 7)), st.integers(0, 9), st.integers(0, 5))
def test_an_order_is_the_same_as_permuted_tokens(seed, grid, prompt, unused):
    order, n = tile_order(grid, 16), grid[0] * grid[1] * grid[2]
    q, k = inputs(seed, n + prompt + unused)
    mask = small.predict(q, k, 0.8, text=Text(n, prompt, unused), order=order)
    everything = torch.cat([order, torch.arange(n, n + prompt)])
    want = small.predict(q[:, :, everything], k[:, :, everything], 0.8)
    assert torch.equal(mask.blocks, want.blocks) and torch.equal(mask.order, everything) and mask.tail == unused


def test_text_first_is_fine_without_unused_slots(path):
    q, k = inputs(1, 60)
    assert torch.equal(small.predict(q, k, 0.8, text=Text(0, 9)).blocks, small.predict(q, k, 0.8).blocks)


def test_flip_rate_of_bf16(record_property):
    """bf16 inputs approximate fp32: few blocks flip. The rate is reported, and cannot be more than a few percent."""
    q, k = inputs(7, 2000, 32, heads=4)
    full = XAttention(block=64).predict(q, k, 0.9).blocks
    half = XAttention(block=64).predict(q.bfloat16(), k.bfloat16(), 0.9).blocks
    rate = (full != half).double().mean().item()
    record_property("bf16_flip_rate", rate)
    assert rate < 0.03


def test_nan_makes_its_rows_dense(path):
    """Dense attention would spread a query's NaN to its own row only; so it must not hide what others see."""
    q, k = inputs(2, 64, heads=1)
    q = q.clone()
    q[0, 0, 20] = float("nan")
    blocks = small.predict(q, k, 0.3).blocks[0, 0]
    clean = small.predict(q.nan_to_num(), k, 0.3).blocks[0, 0]
    assert blocks[1].all() and torch.equal(blocks[[0, 2, 3]], clean[[0, 2, 3]])
    assert small.predict(q, k.fill_(float("inf")), 0.3).blocks.all()


def test_huge_logits(path):
    q, k = inputs(4, 64, heads=1)
    scores = small.scores(q * 1e4, k * 1e4)
    assert torch.isfinite(scores).all() and (scores.sum(-1) - 4).abs().max() < 1e-4


def test_gradients_stay_out_of_it(path):
    q, k = (x.requires_grad_() for x in inputs(4, 64))
    assert not small.scores(q, k).requires_grad
    small.predict(q, k, 0.5)


def test_other_precisions_go_through_pytorch():
    q, k = inputs(4, 64)
    want = small.scores(q, k)
    assert (small.scores(q.double(), k.double()) - want).abs().max() < 1e-5
    assert (small.scores(q.half(), k.half()) - want).abs().max() < 0.1


def test_settings_there_and_back():
    for backbone in (XAttention(), XAttention(8, 64, "chunk"), XAttention(16, 128, 512)):
        assert backbones.from_dict(backbone.to_dict()) == backbone
    assert XAttention().to_dict() == {"name": "xattention", "stride": 16, "block": 128, "pad": "block"}
    assert backbones.by_name("xattention") == XAttention() and XAttention().scaled_to(100) == XAttention()
    assert isinstance(XAttention(), backbones.Backbone)
    state = XAttention().new_state()
    state.clear()
    assert state.nbytes() == {}


q64, k64 = inputs(0, 64)


@pytest.mark.parametrize("make, message", [
    (lambda: XAttention(stride=16, block=100), "multiple of the stride"),
    (lambda: XAttention(stride=0), "stride=0"),
    (lambda: XAttention(block=-128), "block=-128"),
    (lambda: XAttention(pad="zeros"), "pad='zeros'"),
    (lambda: XAttention(pad=100), "multiple of the block"),
    (lambda: XAttention(stride=4, block=60, pad="chunk").scores(q64, k64), "chunk of 2048"),
    (lambda: small.predict(q64, k64[:, :1], 0.9), r"q of shape \(1, 2, 64, 8\) and k of shape \(1, 1, 64, 8\)"),
    (lambda: small.predict(q64[0], k64[0], 0.9), r"\[B, H, N, D\]"),
    (lambda: small.predict(q64[:, :, :0], k64, 0.9), "hold nothing"),
    (lambda: small.predict(q64.int(), k64, 0.9), "floating-point"),
    (lambda: small.predict(q64, k64, 0.0), "threshold 0.0 is not a positive"),
    (lambda: small.predict(q64, k64, -0.5), "threshold -0.5"),
    (lambda: small.predict(q64, k64, float("nan")), "threshold nan"),
    (lambda: small.predict(q64, k64, float("inf")), "threshold inf"),
    (lambda: small.predict(q64, k64, [0.9, 0.8, 0.7]), r"give one number, \[2\] or \[1, 2\]"),
    (lambda: small.predict(q64, k64, 0.9, text=Text(0, 4, 4)), "only at the end"),
    (lambda: small.predict(q64, k64, 0.9, text=Text(60, 4, 4)), "does not leave any video"),
    (lambda: small.predict(q64, k64, 0.9, text=[Text(60, 4), Text(60, 3, 1)]), "predict each item on its own"),
    (lambda: small.predict(q64, k64, 0.9, order=torch.arange(10)), "an order of 10 tokens does not fit the 64"),
    (lambda: small.predict(q64, k64, 0.9, order=torch.arange(64) + 1), r"outside 0\.\.63"),
    (lambda: small.predict(q64, k64[:, :, :60], 0.9, order=torch.arange(64)), "as many keys as queries"),
    (lambda: backbones.by_name("fastest"), "choose one of xattention, svg2"),
    (lambda: backbones.from_dict({"name": "xattention", "speed": 3}), "no setting 'speed'"),
    (lambda: backbones.from_dict(["xattention"]), "a dict with a name"),
    (lambda: XAttention.from_dict({"name": "svg2"}), "settings of 'svg2'"),
])  # fmt: skip
def test_bad_input_is_one_clear_sentence(make, message):
    with pytest.raises(HeartError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
