"""The adapter to flashinfer's kernel over block indices, against a stand-in that checks what it is given."""

import pytest
import torch

from heart_attention.kernels import capability, flashinfer_blocks
from tests.kernels import test_cudnn as cudnn_tests
from tests.kernels.test_cudnn import compare, gen, qkv, random_blocks, stand_in  # noqa: F401

KERNEL = flashinfer_blocks.KERNEL


def forward(
    q, k, v, q2k_block_index, block_sparse_num, block_sizes=None, q2k_block_nums=None, allow_empty_block_nums=True,
    softmax_scale=None, pack_gqa=None, return_lse=False, out=None, lse=None,
):  # fmt: skip
    """The contract of bsa_attn_sm100_blk128_fwd 0.7.2: tokens before heads, otherwise as cuDNN's."""
    assert return_lse and q2k_block_nums is not None
    found = cudnn_tests.forward(
        *(x.transpose(1, 2) for x in (q, k, v)), q2k_block_index, None, block_sizes, q2k_block_nums,
        sparse_block_size=128, allow_empty_block_nums=allow_empty_block_nums, softmax_scale=softmax_scale,
    )  # fmt: skip
    return found["o_tensor"].transpose(1, 2), found["lse_tensor"]


@pytest.fixture(autouse=True)
def own_stand_in(monkeypatch):
    monkeypatch.setattr(flashinfer_blocks, "forward", lambda: forward)


@pytest.mark.parametrize("rest", ["drop", "mean"])
def test_blocks_orders_and_tails(gen, rest):  # noqa: F811
    compare(random_blocks(gen, 300, 128), qkv(gen, 300), rest, KERNEL)
    mask = random_blocks(gen, 256, 128, order=torch.randperm(256, generator=gen), tail=9)
    compare(mask, qkv(gen, 265), rest, KERNEL)


def test_it_serves_blocks_of_128_on_sm_100_alone(gen):  # noqa: F811
    assert not KERNEL.reasons_on(capability.Call("sm_100", (128, 128), 128))
    for call in (
        capability.Call("sm_90", (128, 128), 128),
        capability.Call("sm_100", (64, 64), 128),
        capability.Call("sm_100", None, 128),
        capability.Call("sm_100", (128, 128), 96),
        capability.Call("sm_100", (128, 128), 128, torch.float32),
    ):
        assert len(KERNEL.reasons_on(call)) == 1
    reasons = KERNEL.reasons_not(random_blocks(gen, 128), qkv(gen, 128)[0])
    assert any("blocks of 128" in r for r in reasons) and any("tensors are on cpu" in r for r in reasons)
