"""Selection by share: C against the definition, ties and broken numbers included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heart_attention.kernels.ops import native, selection

needs_c = pytest.mark.skipif(bool(native.reasons_not()), reason="no C kernels here")


@needs_c
@given(
    st.integers(0, 10_000), st.integers(1, 7), st.integers(1, 300), st.floats(0, 1.2), st.integers(0, 20), st.booleans()
)
def test_c_keeps_what_the_definition_keeps(seed, rows, cols, share, at_least, coarse):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, cols, generator=generator)
    if coarse:  # many ties
        scores = (scores * 4).floor() - 1
    sizes = torch.randint(0, 9, (cols,), generator=generator)
    expected = selection.torch_keep_share(scores, sizes, share, at_least)
    assert torch.equal(native.keep_share(scores, sizes, share, at_least), expected)


@needs_c
def test_odd_numbers():
    scores = torch.tensor([[0.0, -0.0, 1.0], [float("nan"), 1.0, 2.0], [float("inf"), -float("inf"), 0.0]])
    sizes = torch.ones(3, dtype=torch.int64)
    assert torch.equal(native.keep_share(scores, sizes, 0.5, 1), selection.torch_keep_share(scores, sizes, 0.5, 1))
