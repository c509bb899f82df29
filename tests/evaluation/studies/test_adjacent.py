"""Masks of the paper's Eq. 1, IoU, and what one pass over a generation collects."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention import SVG2, HeartConfig, XAttention
from heart_attention.evaluation.studies import adjacent, drift, iou, timesteps


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(0.1, 0.99))
def test_minimal_set_reaches_the_mass_and_no_smaller_one_does(seed, n, mass):
    weights = torch.randn(3, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(3).softmax(-1)
    kept = adjacent.minimal_set(weights, mass)
    for row, chosen in zip(weights, kept):
        assert row[chosen].sum() >= mass - 1e-12
        assert row[chosen].sum() - row[chosen].min() < mass  # without its smallest member it falls short
        assert chosen.all() or row[chosen].min() >= row[~chosen].max()  # and it holds the largest


def test_token_masks_equal_brute_force():
    q, k = torch.randn(2, 1, 2, 30, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([3, 17])
    found = adjacent.token_masks(q, k, rows)
    weights = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
    for h in range(2):
        for i, row in enumerate(rows):
            order = weights[0, h, row].argsort(descending=True)
            needed = int((weights[0, h, row][order].cumsum(0) < 0.95).sum()) + 1
            assert set(found[h, i].nonzero().flatten().tolist()) == set(order[:needed].tolist())


def test_iou():
    a = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    b = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    assert adjacent.iou(a, b).tolist() == [pytest.approx(1 / 3), 0.0]


CONFIGS = {"xattention": HeartConfig(XAttention(8, 64)), "svg2": HeartConfig(SVG2(8, 16))}


@pytest.fixture(scope="module")
def table(tiny_pipe, small_call):
    call = {**small_call, "num_inference_steps": 4}
    return adjacent.collect(tiny_pipe, CONFIGS, call, "a red circle moves right on a blue background")


def test_one_pass_measures_everything(table, tiny_pipe):
    layers, heads = tiny_pipe.transformer.config.num_layers, tiny_pipe.transformer.config.num_attention_heads
    assert table.token_iou.shape == (1, 3, layers, heads)  # three pairs of neighbouring steps
    assert ((table.token_iou > 0) & (table.token_iou <= 1)).all()
    for name in CONFIGS:
        density, masks = table.density[name], table.mask_iou[name]
        assert density.shape == (1, 4, layers, heads) and ((density > 0) & (density <= 1)).all()
        assert masks.shape == table.token_iou.shape and ((masks > 0) & (masks <= 1)).all()
    # means move less than tokens do: ‖mean Δ‖₁ ≤ mean ‖Δ‖₁
    assert (table.mean_drift <= table.full_drift + 1e-4).all() and (table.full_drift > 0).all()


def test_the_tables_of_prompts_are_one_table(table):
    again = adjacent.Table.from_dicts([table.to_dict(), table.to_dict()])
    assert again.token_iou.shape[0] == 2 and again.density["svg2"].shape[0] == 2
    np.testing.assert_allclose(again.token_iou[1], table.token_iou[0], atol=1e-6)
    np.testing.assert_allclose(again.mask_iou["xattention"][0], table.mask_iou["xattention"][0], atol=1e-6)


@pytest.mark.parametrize("study", [iou, drift, timesteps], ids=lambda m: m.__name__.split(".")[-1])
def test_studies_write_numbers_figure_and_paragraph(study, table, tmp_path):
    found = study.run(table, table, tmp_path)
    name = found["study"]
    assert found["trained"] == found["control"]  # the same table on both sides
    for ending in ("json", "md", "svg", "png"):
        assert (tmp_path / f"{name}.{ending}").stat().st_size > 50
    assert found["finding"] in (tmp_path / f"{name}.md").read_text()
    assert "andom weights" in found["finding"]


def test_the_drift_paragraph_says_when_the_control_is_as_strong(table, tmp_path):
    assert "no evidence" in drift.run(table, table, tmp_path)["finding"]


@pytest.mark.parametrize("study", [iou, drift, timesteps], ids=lambda m: m.__name__.split(".")[-1])
def test_without_a_control_nothing_is_said_of_it(study, table, tmp_path):
    found = study.run(table, None, tmp_path)
    assert found["control"] is None and "andom weights" not in found["finding"]


def test_text_and_unused_slots_are_left_out():
    from heart_attention.masks import Text
    from heart_attention.online.call import CallContext

    x = torch.arange(10.0).view(1, 1, 10, 1).expand(2, 3, 10, 4)
    kept = adjacent.video_tokens(CallContext(text=[Text(start=6, prompt=2, unused=2)] * 2), x)
    assert kept[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5] and kept.shape == (1, 3, 6, 4)
    assert adjacent.video_tokens(CallContext(), x).shape == (1, 3, 10, 4)


def test_the_layer_of_a_figure_is_drawn_by_the_seed():
    from heart_attention.evaluation.studies.common import draw_layer

    drawn = [draw_layer(30, seed) for seed in range(20)]
    assert drawn == [draw_layer(30, seed) for seed in range(20)] and len(set(drawn)) > 5 and max(drawn) < 30
