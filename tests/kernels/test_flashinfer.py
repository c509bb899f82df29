"""The adapter to flashinfer, against a stand-in that checks what its wrappers are given and computes with fp32."""

import math
import types
from typing import ClassVar

import pytest
import torch

from heart_attention.errors import HeartError
from heart_attention.kernels import eager, flashinfer
from heart_attention.masks import BlockMask, ClusterMask


def attend(q, k, v, mask, scale):
    """Softmax over the mask, fp32, and its log-sums to base 2; q [Nq, D], mask [Nq, Nk]. Without keys: rubbish."""
    logits = (q.float() @ k.float().T * scale).masked_fill(~mask, -torch.inf)
    lse = (logits.logsumexp(-1) / math.log(2)).masked_fill(~mask.any(-1), -5e4)
    return (logits.softmax(-1) @ v.float()).nan_to_num(7.0), lse


class Variable:
    """The contract of VariableBlockSparseAttentionWrapper 0.7.2: plan's arguments and shapes, run's layout."""

    made: ClassVar[list] = []

    def __init__(self, float_workspace_buffer, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8 and backend == "auto"
        self.schedule = 8 << 20
        self.plans = 0
        Variable.made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self.schedule = int_workspace_buffer.numel()

    def plan(
        self, block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None,
        rope_theta=None, non_blocking=True, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        heads, rows, cols = block_mask_map.shape
        assert block_mask_map.dtype == torch.bool
        assert block_row_sz.shape == (heads, rows) and block_col_sz.shape == (heads, cols)
        assert block_row_sz.dtype == block_col_sz.dtype == torch.int32
        assert num_qo_heads == num_kv_heads == heads and not causal
        assert len(block_row_sz.sum(1).unique()) == 1 and len(block_col_sz.sum(1).unique()) == 1
        self.mask = [
            m.repeat_interleave(r, 0).repeat_interleave(c, 1)
            for m, r, c in zip(block_mask_map, block_row_sz, block_col_sz)
        ]
        self.head_dim, self.scale, self.dtypes = head_dim, sm_scale, (q_data_type, kv_data_type)
        self.plans += 1

    def run(self, q, k, v, out=None, lse=None, return_lse=False):
        assert q.shape[0] == len(self.mask) and q.shape[2] == self.head_dim and q.ndim == 3
        assert (q.dtype, k.dtype) == self.dtypes
        outs, sums = zip(*(attend(*x, self.scale) for x in zip(q, k, v, self.mask)))
        out = torch.stack(outs).to(q.dtype)
        return (out, torch.stack(sums)) if return_lse else out


class Shared:
    """The contract of BlockSparseAttentionWrapper 0.7.2: one BSR mask for all heads, tokens first."""

    made: ClassVar[list] = []

    def __init__(self, float_workspace_buffer, backend="auto"):
        Shared.made.append(self)

    def plan(
        self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, *, sm_scale=None,
        q_data_type="float16", kv_data_type=None, o_data_type="float16",
    ):  # fmt: skip
        assert indptr.dtype == indices.dtype == torch.int32
        assert M % R == 0 and N % C == 0 and indptr.shape == (M // R + 1,)
        assert int(indptr[-1]) == len(indices) and q_data_type == kv_data_type == o_data_type
        blocks = torch.zeros(M // R, N // C, dtype=torch.bool)
        for i in range(M // R):
            blocks[i, indices[indptr[i] : indptr[i + 1]].long()] = True
        self.mask = blocks.repeat_interleave(R, 0).repeat_interleave(C, 1)
        self.heads, self.scale = num_qo_heads, sm_scale

    def run(self, q, k, v, return_lse=False):
        assert q.shape[1] == self.heads and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        heads = range(self.heads)
        outs, sums = zip(*(attend(q[:, h], k[:, h], v[:, h], self.mask, self.scale) for h in heads))
        out = torch.stack(outs, 1).to(q.dtype)
        return (out, torch.stack(sums, 1)) if return_lse else out


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    package = types.SimpleNamespace(VariableBlockSparseAttentionWrapper=Variable, BlockSparseAttentionWrapper=Shared)
    monkeypatch.setattr(flashinfer, "module", lambda: package)
    monkeypatch.setattr(flashinfer, "WORKSPACE", 1024)
    flashinfer._workspace.cache_clear()
    Variable.made, Shared.made = [], []


@pytest.fixture
def gen():
    return torch.Generator().manual_seed(0)


def qkv(gen, n, heads=2, batch=2, dtype=torch.float16, d=64):
    return [torch.randn(batch, n, heads, d, generator=gen).to(dtype).transpose(1, 2) for _ in range(3)]


def random_blocks(gen, n, block, heads=2, batch=2, block_k=None, **more):
    m, m_k = -(-n // block), -(-n // (block_k or block))
    blocks = torch.rand(batch, heads, m, m_k, generator=gen) < 0.4
    blocks[..., 0] = True
    return BlockMask(blocks, block, n, n, block_k=block_k, **more)


def compare(mask, q, k, v, scale=None):
    means(mask, q, k, v, scale)
    Variable.made, Shared.made = [], []
    return agree(mask, q, k, v, scale, "drop")


def means(mask, q, k, v, scale):
    """The same mask with the rest, and one that leaves out much more, whole rows too."""
    agree(mask, q, k, v, scale, "mean")
    agree(mask.with_flags(mask.flags & (torch.rand(mask.flags.shape[2:]) < 0.3)), q, k, v, scale, "mean")


def agree(mask, q, k, v, scale, rest):
    plan = flashinfer.KERNEL.plan(mask, rest)
    found, wanted = torch.empty(mask.shape), torch.empty(mask.shape)
    got = flashinfer.KERNEL.run(plan, q, k, v, scale=scale, mass=found)
    want = eager.KERNEL.run(eager.KERNEL.plan(mask, rest), q, k, v, scale=scale, mass=wanted)
    assert (found - wanted).abs().max() <= 1e-5
    assert got.dtype == q.dtype and got.shape == q.shape
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}[q.dtype]  # one rounding of values around 1
    assert (got.float() - want.float()).abs().max() <= tolerance
    return plan


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_with_a_short_last_one(gen, dtype):
    compare(random_blocks(gen, 75, 16), *qkv(gen, 75, dtype=dtype))
    assert len(Variable.made) == 1 and not Shared.made


def test_token_order_and_unused_tail(gen):
    mask = random_blocks(gen, 70, 16, order=torch.randperm(70, generator=gen), tail=9)
    compare(mask, *qkv(gen, 79), scale=0.3)


def test_an_order_for_every_head(gen):
    several = torch.stack([torch.randperm(70, generator=gen) for _ in range(3)])
    own = torch.tensor([[0, 2], [1, 0]], dtype=torch.int8)
    compare(random_blocks(gen, 70, 16, order=several, order_of=own, tail=9), *qkv(gen, 79))
    same = BlockMask(torch.ones(2, 2, 5, 5, dtype=torch.bool), 16, 70, 70, several, 0, own)
    compare(same, *qkv(gen, 70))


def test_clusters_with_empty_ones(gen):
    labels = [torch.randint(0, c, (2, 2, 90), generator=gen).to(torch.int16) for c in (5, 9)]
    kept = torch.rand(2, 2, 7, 10, generator=gen) < 0.5  # clusters 5, 6 and 9 stay empty
    kept[..., 0] = True
    labels[1][..., 0] = 0
    compare(ClusterMask(kept, *labels), *qkv(gen, 90))


def test_blocks_that_are_not_square(gen):
    compare(random_blocks(gen, 75, 16, block_k=5), *qkv(gen, 75))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("block_k", [None, 8])
def test_one_mask_for_all_heads_takes_the_small_plan(gen, ordered, block_k):
    order = torch.randperm(64, generator=gen) if ordered else None
    mask = random_blocks(gen, 64, 16, order=order, block_k=block_k)
    mask.blocks[:] = mask.blocks[:1, :1].clone()
    compare(mask, *qkv(gen, 64))
    assert len(Shared.made) == 1 and not Variable.made


def test_plans_once_per_type_and_scale(gen):
    plan = compare(random_blocks(gen, 75, 16), *(x := qkv(gen, 75)))
    for _ in range(2):
        flashinfer.KERNEL.run(plan, *x)
    assert len(Variable.made) == 1 and Variable.made[0].plans == 1
    flashinfer.KERNEL.run(plan, *x, scale=0.5)
    assert len(Variable.made) == 2


def test_many_rows_get_a_larger_schedule(gen, monkeypatch):
    monkeypatch.setattr(flashinfer, "INT_WORKSPACE", 1000)
    compare(random_blocks(gen, 75, 16), *qkv(gen, 75))
    assert Variable.made[0].schedule == 4 * 5 * flashinfer.BYTES_A_ROW


def test_refuses_what_it_cannot_take(gen):
    mask = random_blocks(gen, 20, 16)
    plan = flashinfer.KERNEL.plan(mask)
    with pytest.raises(HeartError, match="not torch.float32"):
        flashinfer.KERNEL.run(plan, *qkv(gen, 20, dtype=torch.float32))
    with pytest.raises(HeartError, match="not 48"):
        flashinfer.KERNEL.run(plan, *qkv(gen, 20, d=48))


def test_says_why_it_cannot_serve_here(gen, monkeypatch):
    monkeypatch.setattr(flashinfer, "installed", lambda: False)
    q = qkv(gen, 20)[0]
    reasons = flashinfer.KERNEL.reasons_not(random_blocks(gen, 20, 16), q)
    assert any("not installed" in r for r in reasons)
    assert any("on cpu" in r for r in reasons) or q.is_cuda
    monkeypatch.setattr(flashinfer, "PLAN_LIMIT", 100)
    assert any("plan of this mask" in r for r in flashinfer.KERNEL.reasons_not(random_blocks(gen, 75, 16)))


def test_an_old_version_is_refused(monkeypatch):
    monkeypatch.setattr(flashinfer, "installed", lambda: True)
    monkeypatch.setattr(flashinfer.importlib.metadata, "version", lambda name: "0.2.14.post1")
    assert any("0.2.14 is older than 0.6" in r for r in flashinfer.KERNEL.reasons_not())
    monkeypatch.setattr(flashinfer.importlib.metadata, "version", lambda name: "0.7.2.post1")
    assert not any("older" in r for r in flashinfer.KERNEL.reasons_not())


def test_leaves_room_on_a_small_gpu(gen, monkeypatch):
    mask = random_blocks(gen, 75, 16)
    assert not flashinfer._reasons_mask(mask)
    monkeypatch.setattr(flashinfer, "_free_memory", lambda device: 64 << 10)
    assert any("MB a layer" in r for r in flashinfer._reasons_mask(mask))


@pytest.mark.skipif(not torch.cuda.is_available() or not flashinfer.installed(), reason="needs a GPU and flashinfer")
def test_the_real_package(gen, monkeypatch):
    monkeypatch.undo()
    flashinfer._workspace.cache_clear()
    for mask in (random_blocks(gen, 700, 128), random_blocks(gen, 640, 128, order=torch.randperm(640, generator=gen))):
        q, k, v = (x.cuda() for x in qkv(gen, mask.n_q, d=128))
        compare(mask.to("cuda"), q, k, v)
