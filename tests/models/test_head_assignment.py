"""Heads shared out to ranks in order and by cost."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_in_parallel import THRESHOLDS, calibration, config, generate, model
from thoroughness import examples

import heart_attention as heart
from heart_attention import HeartError
from heart_attention.calibration.file import Calibration
from heart_attention.cli.main import main
from heart_attention.models import ulysses
from heart_attention.models.attachment import attach, attachment_of
from heart_attention.models.head_assignment import balance, by_cost, head_costs, imbalance, in_order

SHIPPED = Path(heart.__file__).parent / "tiny" / "calibrations" / "xattention.heart.json"


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=24), st.integers(2, 4))
def test_an_assignment_is_complete_even_in_number_and_no_worse_than_in_order(costs, ranks):
    try:
        plain = in_order(len(costs), ranks)
    except HeartError:
        return
    assignment = by_cost(costs, ranks)
    assert sorted(h for part in assignment for h in part) == list(range(len(costs)))
    assert sorted(map(len, assignment)) == sorted(map(len, plain))
    assert imbalance(costs, assignment) <= imbalance(costs, plain) * (1 + 1e-9)


def test_an_assignment_by_cost_evens_out_what_order_does_not():
    costs = [0.9] * 6 + [0.1] * 6
    assert imbalance(costs, in_order(12, 2)) == pytest.approx(1.8)
    assert imbalance(costs, by_cost(costs, 2)) == pytest.approx(1.0)


def test_costs_from_a_calibration():
    sparsity = np.array([[[0.8, 0.5], [0.9, 0.2]]])  # [L, H, K]
    made = Calibration(np.array([[0.9, 0.5]]), {"name": "xattention"}, candidates=[0.5, 0.9], E=sparsity, S=sparsity)
    assert head_costs(made) == [pytest.approx([0.5, 0.1])]


@pytest.mark.parametrize("thresholds", [0.9, THRESHOLDS, Calibration(THRESHOLDS, {"name": "xattention"})])
def test_assigning_by_cost_needs_measured_densities(thresholds):
    transformer = model()
    with pytest.raises(HeartError, match="no such table"):
        heart.enable(transformer, config(thresholds=thresholds), head_assignment="cost")
    assert attachment_of(transformer) is None
    with pytest.raises(HeartError, match="head_assignment is 'dice'"):
        config(head_assignment="dice")


def test_assigning_by_cost_changes_nothing_on_one_process():
    one, other = model(), model()
    heart.enable(one, config(thresholds=calibration()))
    heart.enable(other, config(thresholds=calibration(), head_assignment="cost"))
    assert torch.equal(generate(one), generate(other))


def test_balance_of_a_calibration():
    found = balance(head_costs(calibration()), 2)
    assert found == pytest.approx({"order": 1.4, "order, worst layer": 1.8, "cost": 1.0, "cost, worst layer": 1.0})


def test_heart_show_tells_the_balance_of_the_shipped_calibration(capsys):
    assert main(["show", str(SHIPPED), "--ranks", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["balance"]
    assert told == {"ranks": 2, **balance(head_costs(Calibration.load(SHIPPED)), 2)}
    assert 1 <= told["cost"] <= told["order"]
    assert main(["show", str(SHIPPED), "--ranks", "2", "--colour", "never"]) == 0
    assert f"2 ranks, dearest over mean: order {told['order']:.3f}" in capsys.readouterr().out
    assert main(["show", str(SHIPPED), "--ranks", "0"]) == 1


def test_too_many_ranks_and_wrong_costs():
    with pytest.raises(HeartError, match="2 attention heads cannot be shared by 3 ranks"):
        in_order(2, 3)
    attachment = attach(model(), tiny.Seen())
    with pytest.raises(HeartError, match=r"1 layers but the transformer has 2"):
        attachment.assign_heads([[1.0] * 4])


def test_old_names_work_for_one_more_version():
    with pytest.warns(DeprecationWarning, match="head_assignment.head_costs"):
        assert ulysses.costs_of is head_costs
    with pytest.raises(AttributeError):
        _ = ulysses.nothing
