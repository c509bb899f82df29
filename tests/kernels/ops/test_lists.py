"""Lists of true entries: the C against the definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heart_attention.kernels.ops import lists, native

needs_c = pytest.mark.skipif(bool(native.reasons_not()), reason="no C kernel here")


@needs_c
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(0, 70), st.floats(0, 1))
def test_c_lists_what_torch_lists(seed, rows, columns, share):
    flags = torch.rand(2, rows, columns, generator=torch.Generator().manual_seed(seed)) < share
    for mine, defined in zip(lists._c_row_lists(flags), lists.torch_row_lists(flags)):
        assert mine.dtype == defined.dtype and torch.equal(mine, defined)


@needs_c
def test_all_ones_and_none():
    for flags in (torch.ones(3, 9, dtype=torch.bool), torch.zeros(3, 9, dtype=torch.bool)):
        assert all(map(torch.equal, lists._c_row_lists(flags), lists.torch_row_lists(flags)))
