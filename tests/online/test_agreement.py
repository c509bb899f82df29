"""What ranks settle together, with two ranks played one after the other."""

import pytest
import torch

from heart_attention.online.agreement import agreed, layer_shape, over_ranks
from heart_attention.online.call import CallContext

CPU = torch.device("cpu")


def call(*others):
    """A call on a rank whose neighbours bring these numbers."""
    return CallContext(heads_total=5, all_reduce=lambda own: own + torch.tensor(others, dtype=own.dtype))


def test_sums_over_ranks_and_on_one_process():
    assert over_ranks(CallContext(), CPU, [1.5, 2]) == [1.5, 2]
    assert over_ranks(call(0.25, 3), CPU, [1.5, 2]) == [1.75, 5]


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [("", 0, ""), ("too few tokens", 0, "too few tokens"), ("", 1, "not worth it: on another rank")],
)
def test_one_refusal_makes_the_layer_dense_everywhere(own, other, expected):
    assert agreed(call(other), CPU, own) == expected
    assert agreed(CallContext(), CPU, own) == own


def test_the_layer_has_the_heads_of_all_ranks():
    assert layer_shape(call(), torch.Size((1, 2, 7, 8))) == (1, 5, 7, 8)
    assert layer_shape(CallContext(), (1, 2, 7, 8)) == (1, 2, 7, 8)
