"""The adapter to flashinfer's attention with block means, against a stand-in that checks what it is given."""

import pytest
import torch

from heart_attention.backbones import SVG2
from heart_attention.errors import HeartError
from heart_attention.kernels import capability, eager, flashinfer_rest
from heart_attention.masks import BlockMask, ClusterMask

KERNEL = flashinfer_rest.KERNEL
PLANS = []


class StandIn:
    """The contract of BlockSparseTSWrapper 0.7.2 with a bitmask, computed with the definition in fp32."""

    def plan(
        self, batch_size, seq_len_q, seq_len_kv, num_qo_heads, num_kv_heads, head_dim, q_block_size, kv_block_size, *,
        device, use_block_sparse=True, max_blocks_per_row=None, use_kv_valid_bits=False, sparse_format="bsr",
        use_proxy_routes=False, mask_type="dense", share_pattern_across_kv_heads=False, q_data_type=torch.float16,
        k_data_type=None, v_data_type=None, kv_data_type=None, o_data_type=None, sage_config=None,
    ):  # fmt: skip
        assert head_dim == 128 and q_block_size % 8 == 0 and (kv_block_size in (8, 16, 32) or kv_block_size % 64 == 0)
        assert sparse_format == "bitmask" and num_qo_heads == num_kv_heads
        self.blocks = -(-seq_len_q // q_block_size), -(-seq_len_kv // kv_block_size)
        assert max_blocks_per_row == self.blocks[1]
        self.shape, self.size = (batch_size, num_qo_heads, seq_len_q, seq_len_kv), (q_block_size, kv_block_size)
        self.proxy, self.dtype = use_proxy_routes, q_data_type
        PLANS.append(self)

    def run(
        self, q, k, v, block_indptr=None, block_indices=None, *, exact_block_bits=None, k_summary=None, v_summary=None,
        kv_valid_bits=None, sm_scale=None, out=None, validate=True, sage=None,
    ):  # fmt: skip
        batch, heads, n_q, n_k = self.shape
        for x, n in ((q, n_q), (k, n_k), (v, n_k)):
            assert x.shape == (batch, n, heads, 128) and x.is_contiguous() and x.dtype == self.dtype
        words = exact_block_bits
        assert words.dtype == torch.uint32 and words.is_contiguous() and block_indptr is block_indices is None
        assert words.shape == (batch, heads, self.blocks[0], -(-self.blocks[1] // 32))
        bits = (words.to(torch.int64).unsqueeze(-1) >> torch.arange(32)) & 1
        kept = bits.flatten(-2)[..., : self.blocks[1]].bool()
        row, column = torch.arange(n_q) // self.size[0], torch.arange(n_k) // self.size[1]
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        logits = (q @ k.mT * sm_scale).masked_fill(~kept[:, :, row][..., column], -torch.inf)
        assert self.proxy == (k_summary is not None) == (v_summary is not None)
        if self.proxy:
            for x in (k_summary, v_summary):
                assert x.shape == (batch, self.blocks[1], heads, 128) and x.is_contiguous() and x.dtype == self.dtype
            k_mean, v_mean = (x.transpose(1, 2).float() for x in (k_summary, v_summary))
            means = q @ k_mean.mT * sm_scale + column.bincount().log()
            logits = torch.cat([logits, means.masked_fill(kept[:, :, row], -torch.inf)], -1)
            v = torch.cat([v, v_mean], 2)
        return (logits.softmax(-1) @ v).to(self.dtype).transpose(1, 2).contiguous()


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(flashinfer_rest, "wrapper_class", lambda: StandIn)
    flashinfer_rest._wrapper.cache_clear()
    PLANS.clear()
    yield
    flashinfer_rest._wrapper.cache_clear()


def qkv(n, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, n, 2, 128, generator=g).to(dtype).transpose(1, 2) for _ in range(3)]


def blocks(n, block, block_k, **more):
    flags = torch.rand(1, 2, -(-n // block), -(-n // block_k), generator=torch.Generator().manual_seed(1)) < 0.3
    flags[..., 1] = True
    return BlockMask(flags, block, n, n, block_k=block_k, **more)


def difference(mask, x, rest):
    want = eager.KERNEL.run(eager.KERNEL.plan(mask, rest), *x)
    return float((KERNEL.run(KERNEL.plan(mask, rest), *x).float() - want.float()).abs().max())


@pytest.mark.parametrize("rest", ["drop", "mean"])
def test_blocks_orders_and_tails(rest):
    assert difference(blocks(300, 64, 64), qkv(300, torch.float32), rest) <= 2e-6
    order = torch.randperm(700, generator=torch.Generator().manual_seed(2))
    assert difference(blocks(700, 16, 16, order=order, tail=9), qkv(709, torch.float32), rest) <= 2e-6
    assert difference(blocks(300, 64, 64), qkv(300), rest) <= 2e-2


def test_clusters_in_equal_groups():
    q, k, v = qkv(200, torch.float32)
    mask = SVG2(5, 9, min_ratio=0, init_iters=2, rank="error", equal_groups=64).predict(q, k, 0.3, v=v)
    assert difference(mask, (q, k, v), "mean") <= 2e-6


def test_masks_of_one_size_share_a_plan():
    mask, x = blocks(300, 64, 64), qkv(300)
    other = mask.with_flags(~mask.flags | torch.eye(5, dtype=torch.bool))
    for one in (mask, other):
        KERNEL.run(KERNEL.plan(one, "mean"), *x)
    assert len(PLANS) == 1 and PLANS[0].proxy


def test_what_it_takes():
    assert not KERNEL.reasons_on(capability.Call("sm_100", (64, 16), 128, rest="mean"))
    for call in (
        capability.Call("sm_90", (128, 128), 128),
        capability.Call("sm_100", (128, 48), 128),
        capability.Call("sm_100", (4, 64), 128),
        capability.Call("sm_100", None, 128),
        capability.Call("sm_100", (128, 128), 64),
        capability.Call("sm_100", (128, 128), 128, torch.float32),
    ):
        assert len(KERNEL.reasons_on(call)) == 1
    labels = torch.zeros(1, 1, 8, dtype=torch.int16)
    clusters = ClusterMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), labels, labels)
    assert KERNEL.reasons_not_auto() and any("clusters" in r for r in KERNEL.reasons_not(clusters))
    with pytest.raises(HeartError, match="not clusters"):
        KERNEL.plan(clusters)
