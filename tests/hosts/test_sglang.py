"""Budgets for SGLang's router: what a calibration measured, rounded as the router rounds."""

import math

import pytest
from models_in_parallel import calibration

from heart_attention import HeartError
from heart_attention.hosts.sglang import GRANULARITY, budgets
from heart_attention.models.head_assignment import head_costs


def test_heads_are_grouped_by_their_number_of_blocks():
    tokens, made = 6400, calibration()  # 100 blocks; densities 0.1 and 0.9
    found = budgets(made, tokens)
    assert [[group["heads"] for group in layer] for layer in found] == [[[0, 1], [2, 3]], [[1, 2], [0, 3]]]
    assert [[group["blocks"] for group in layer] for layer in found] == [[16, 96], [16, 96]]
    for layer, densities in zip(found, head_costs(made)):
        assert sorted(head for group in layer for head in group["heads"]) == list(range(len(densities)))
        for group in layer:
            share = group["blocks"] / 100
            assert group["blocks"] % GRANULARITY == 0 and group["sparsity"] == pytest.approx(1 - share)
            assert all(density <= share + 1e-9 < density + GRANULARITY / 100 for density in
                       (densities[head] for head in group["heads"]))  # fmt: skip


def test_short_sequences_keep_at_least_a_block_and_at_most_all():
    (group, *_), _ = budgets(calibration(), 128)
    assert 1 <= group["blocks"] <= math.ceil(128 / 64)
    with pytest.raises(HeartError, match="less than one block"):
        budgets(calibration(), 32)
