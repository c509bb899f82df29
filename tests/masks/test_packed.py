"""Masks at one bit an entry."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from thoroughness import examples

from heart_attention.masks import pack_bits, unpack_bits

from .test_base import random_blocks, random_clusters, same

torch.set_num_threads(1)
some = settings(max_examples=examples(40), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@some
@given(npst.arrays(bool, st.tuples(st.integers(1, 3), st.integers(1, 30))))
def test_bits_there_and_back(flags):
    flags = torch.from_numpy(flags)
    packed = pack_bits(flags)
    assert packed.shape[-1] == -(-flags.shape[-1] // 8) and packed.dtype == torch.uint8
    assert torch.equal(unpack_bits(packed, flags.shape[-1]), flags)


@pytest.mark.parametrize("mask", [random_blocks(1, 300, 4, ordered="one"), random_clusters(1, 50, 50, 99)])
def test_packed_masks_are_smaller_and_come_back_whole(mask):
    packed = mask.packed()
    assert packed.nbytes < mask.nbytes and same(packed.unpack(), mask)
    if mask.kind == "block":
        assert packed.nbytes * 7 < mask.nbytes and torch.equal(packed.unpack().order, mask.order)
