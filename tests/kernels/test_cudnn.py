"""The adapter to cuDNN's block-sparse attention, against a stand-in that checks what it is given and computes in fp32."""

import inspect

import pytest
import torch

from heart_attention.errors import HeartError
from heart_attention.kernels import capability, cudnn, cudnn_fp8, eager
from heart_attention.kernels.plan import make_plan
from heart_attention.masks import BlockMask, ClusterMask


def forward(
    q, k, v, q2k_block_index, block_sparse_num=None, block_sizes=None, q2k_block_nums=None, *, sparse_block_size=None,
    allow_empty_block_nums=False, softmax_scale=None, pack_gqa=None, layout="bhsd", kv_splits=1, use_clc=None,
):  # fmt: skip
    """The contract of block_sparse_attention_forward 1.32: shapes, types and what its kernels demand of memory."""
    batch, heads, n_q, _ = q.shape
    n_k, size = k.shape[2], sparse_block_size
    rows, cols = -(-n_q // size), -(-n_k // size)
    assert size == 128 or n_q % 64 == 0, "sm_90 takes whole blocks of 64 queries"
    assert size in (64, 128) and layout == "bhsd" and block_sparse_num is None and softmax_scale > 0
    assert q2k_block_index.dtype == q2k_block_nums.dtype == torch.int32 and q2k_block_index.shape[-1] >= 1
    assert q2k_block_index.shape[:3] == q2k_block_nums.shape == (batch, heads, rows)
    assert q2k_block_nums.is_contiguous() and q2k_block_index.is_contiguous()
    assert all(x.stride(-1) == 1 and all(s % 8 == 0 for s in x.stride()[:3]) for x in (q, k, v))
    assert allow_empty_block_nums or int(q2k_block_nums.min()) > 0
    if n_k % size:
        assert block_sizes.dtype == torch.int32 and block_sizes.shape == (cols,) and int(block_sizes.sum()) == n_k
    kept = torch.zeros(batch, heads, rows, cols, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(torch.arange(batch), torch.arange(heads), torch.arange(rows)).tolist():
        kept[b, h, i, q2k_block_index[b, h, i, : q2k_block_nums[b, h, i]].long()] = True
    tokens = kept.repeat_interleave(size, 2)[:, :, :n_q].repeat_interleave(size, 3)[..., :n_k]
    logits = (q.float() @ k.float().mT * softmax_scale).masked_fill(~tokens, -torch.inf)
    weights = logits.softmax(-1).nan_to_num()
    return {"o_tensor": (weights @ v.float()).to(q.dtype), "lse_tensor": logits.logsumexp(-1)}


def forward_fp8(
    q, k, v, q2k_block_index, block_sparse_num=None, block_sizes=None, q2k_block_nums=None, *, softmax_scale=None,
    sparse_block_size=64, kv_splits=1,
):  # fmt: skip
    """The contract of block_sparse_attention_fp8_forward 1.32."""
    assert all(x.is_contiguous() and x.shape[-1] == 128 and x.dtype == torch.bfloat16 for x in (q, k, v))
    assert softmax_scale > 0 and kv_splits == 1
    found = forward(
        q, k, v, q2k_block_index, None, block_sizes, q2k_block_nums, sparse_block_size=sparse_block_size,
        softmax_scale=softmax_scale,
    )  # fmt: skip
    return {"o_tensor": found["o_tensor"]}


class StandIn:
    """The package's namespace."""

    block_sparse_attention_forward = staticmethod(forward)
    block_sparse_attention_fp8_forward = staticmethod(forward_fp8)


class Means:
    """What the adapter asks of the Triton kernel: the approximated part alone, with log-sums."""

    def _plan(self, mask, rest, part):
        assert rest == "only" and part
        return make_plan(mask, "eager", part=True, rest=rest)

    def _run(self, plan, q, k, v, out, scale, lse):
        eager._run(plan, q, k, v, out, scale, None, lse)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(cudnn, "module", lambda: StandIn)
    monkeypatch.setattr(cudnn_fp8, "module", lambda: StandIn)
    monkeypatch.setattr(cudnn, "_triton", Means)


@pytest.fixture
def gen():
    return torch.Generator().manual_seed(0)


def qkv(gen, n, dtype=torch.float16, d=64):
    return [torch.randn(2, n, 2, d, generator=gen).to(dtype).transpose(1, 2) for _ in range(3)]


def random_blocks(gen, n, block=64, **more):
    m = -(-n // block)
    blocks = torch.rand(2, 2, m, m, generator=gen) < 0.4
    blocks[..., 0] = True
    return BlockMask(blocks, block, n, n, **more)


def compare(mask, x, rest="drop", kernel=cudnn.KERNEL, limit=2e-3, **more):
    got = kernel.run(kernel.plan(mask, rest), *x, **more)
    want = eager.KERNEL.run(eager.KERNEL.plan(mask, rest), *x, **more)
    assert got.dtype == x[0].dtype and got.shape == x[0].shape
    assert (got.float() - want.float()).abs().max() <= limit


@pytest.mark.parametrize("rest", ["drop", "mean"])
@pytest.mark.parametrize("block", [64, 128])
def test_blocks_with_a_short_last_one(gen, block, rest):
    compare(random_blocks(gen, 300, block), qkv(gen, 300), rest)


@pytest.mark.parametrize("rest", ["drop", "mean"])
def test_token_orders_an_unused_tail_and_a_scale(gen, rest):
    mask = random_blocks(gen, 256, order=torch.randperm(256, generator=gen), tail=9)
    compare(mask, qkv(gen, 265), rest, scale=0.3)
    several = torch.stack([torch.randperm(256, generator=gen) for _ in range(2)])
    own = torch.tensor([[0, 1], [1, 0]], dtype=torch.int8)
    compare(random_blocks(gen, 256, order=several, order_of=own), qkv(gen, 256), rest)


def test_a_row_may_approximate_everything(gen):
    blocks = torch.rand(2, 2, 4, 4, generator=gen) < 0.3
    blocks[:, :, 1] = False
    compare(BlockMask(blocks, 64, 256, 256), qkv(gen, 256), "mean")


def test_parts_add_up(gen):
    mask, x = random_blocks(gen, 200), qkv(gen, 200)
    mine = torch.rand(mask.blocks.shape, generator=gen) < 0.5
    (a, a_lse), (b, b_lse) = (cudnn.KERNEL.run_part(mask.with_flags(mask.blocks & half), *x) for half in (mine, ~mine))
    want = eager.KERNEL.run(eager.KERNEL.plan(mask), *x)
    assert (cudnn.joined(a, a_lse, b, b_lse)[0] - want).abs().max() <= 2e-3


def test_fp8_is_asked_for_by_name_only(gen):
    x = qkv(gen, 300, torch.bfloat16, 128)
    compare(random_blocks(gen, 300, 128), x, kernel=cudnn_fp8.KERNEL, limit=2e-2)
    assert cudnn_fp8.KERNEL.reasons_not_auto()
    with pytest.raises(HeartError, match="log-sums"):
        cudnn_fp8.KERNEL.run_part(random_blocks(gen, 300, 128), *x)
    call = capability.Call("sm_100", (128, 128), 128)
    assert not cudnn_fp8.KERNEL.reasons_on(call)
    for other in (
        capability.Call("sm_100", (64, 64), 128),
        capability.Call("sm_90", (128, 128), 128),
        capability.Call("sm_100", (128, 128), 64),
        capability.Call("sm_100", (128, 128), 128, rest="mean"),
    ):
        assert cudnn_fp8.KERNEL.reasons_on(other)


def test_rows_that_are_not_aligned_are_copied():
    x = torch.zeros(1, 1, 10, 72, dtype=torch.float16)[..., :64]
    assert cudnn.aligned(x) is x
    for odd in (torch.zeros(1, 1, 10, 65, dtype=torch.float16)[..., :64], torch.zeros(641, dtype=torch.float16)[1:]):
        assert cudnn.aligned(odd.reshape(1, 1, 10, 64) if odd.dim() == 1 else odd).stride(2) == 64


def test_says_what_it_does_not_take(gen):
    labels = torch.zeros(2, 2, 100, dtype=torch.int16)
    clusters = ClusterMask(torch.ones(2, 2, 1, 1, dtype=torch.bool), labels, labels)
    with pytest.raises(HeartError, match="not clusters"):
        cudnn.KERNEL.plan(clusters)
    assert any("not clusters" in r for r in cudnn.KERNEL.reasons_not(clusters))
    with pytest.raises(HeartError, match="above 0"):
        cudnn.KERNEL.run(cudnn.KERNEL.plan(random_blocks(gen, 128)), *qkv(gen, 128), scale=-1.0)
    reasons = cudnn.KERNEL.reasons_not(random_blocks(gen, 128), qkv(gen, 128)[0])
    assert any("tensors are on cpu" in r for r in reasons)


@pytest.mark.parametrize(
    "gpu, block, head_size, tokens, word",
    [
        ("sm_80", (128, 128), 128, 4096, "9.0 or later"),
        ("gfx942", (128, 128), 128, 4096, "9.0 or later"),
        ("sm_90", (32, 32), 128, 4096, "32 × 32"),
        ("sm_90", (128, 64), 128, 4096, "128 × 64"),
        ("sm_90", (128, 128), 80, 4096, "not 80"),
        ("sm_100", (64, 64), 64, 4096, "head size 128"),
        ("sm_120", (128, 128), 64, 4096, "not 64"),
        ("sm_90", None, 128, 4096, "not clusters"),
    ],
)
def test_the_rules_of_each_generation(gpu, block, head_size, tokens, word):
    assert any(word in r for r in cudnn.KERNEL.reasons_on(capability.Call(gpu, block, head_size, tokens=tokens)))
    fits = capability.Call("sm_90", (128, 128), 128, tokens=75_600)
    assert not cudnn.KERNEL.reasons_on(fits)


@pytest.mark.skipif(not cudnn.installed(), reason="needs nvidia-cudnn-frontend")
def test_the_real_package_has_this_signature(monkeypatch):
    monkeypatch.undo()
    real = cudnn.module()
    for ours, theirs in (
        (forward, real.block_sparse_attention_forward),
        (forward_fp8, real.block_sparse_attention_fp8_forward),
    ):
        mine, its = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
        assert list(mine)[3:] == list(its)[3:] and [p.kind for p in mine.values()] == [p.kind for p in its.values()]
