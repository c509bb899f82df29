"""Block masks: which tokens a block holds, densities by token pairs, what is refused."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention.errors import HeartError
from heart_attention.masks import BlockMask

from .test_base import random_blocks

torch.set_num_threads(1)
some = settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@some
@given(st.integers(0, 99), st.integers(1, 70), st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_block_density_by_token_pairs(seed, n, block, tail, shuffled):
    mask = random_blocks(seed, n, block, tail=tail, ordered="one" if shuffled else "no")
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


def test_full_masks():
    mask = BlockMask.full(2, 3, 100, 32, tail=4)
    assert mask.shape == (2, 3) and (mask.density() == 1).all() and mask.tail == 4


ones = torch.ones(1, 1, 2, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: BlockMask(ones, 16, 40, 40), r"give bool \[B, H, 3, 3\]"),
        (lambda: BlockMask(ones.float(), 16, 32, 32), "give bool"),
        (lambda: BlockMask(ones, 0, 32, 32), "sizes are at least 1"),
        (lambda: BlockMask(ones, 16, 32, 32, block_k=0), "block 16 × 0"),
        (lambda: BlockMask(ones, 16, 32, 31, tail=1), "as many keys as queries"),
        (lambda: BlockMask(ones, 16, 32, 32, torch.arange(31)), r"give \[32\]"),
        (lambda: BlockMask.full(1, 1, 100_000, 128).dense_tokens(), "too large"),
        (lambda: random_blocks(0, 50, 16).put([0], random_blocks(0, 50, 8)), "same blocks or clusters"),
    ],
)
def test_bad_input_is_one_clear_sentence(make, message):
    with pytest.raises(HeartError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
