"""Stats in a notebook."""

import xml.etree.ElementTree as ET

import torch

import heart_attention as heart
from heart_attention.online.stats_html import head_densities


def served(steps=3, **changes):
    config = heart.HeartConfig(heart.XAttention(stride=4, block=8), 0.5, dense_steps=1, force_sparse=True, **changes)
    engine = heart.Engine(config, layers=2, heads=3)
    torch.manual_seed(0)
    for step in range(steps):
        for layer in range(2):
            q, k, v = torch.randn(3, 1, 3, 64, 8)
            heart.attention(q, k, v, (layer, step, "cond"), engine)
    return heart.stats(engine)


def test_a_notebook_shows_table_and_heads():
    stats = served()
    page = ET.fromstring(stats._repr_html_().replace("<br>", "<br/>"))
    assert len(page.findall(".//rect")) == 2 * 3 and len(page.findall(".//tbody/tr")) == 2
    text = "".join(page.itertext())
    assert "density of every head" in text and "1 generation(s), 6 attention calls" in text


def test_the_picture_is_of_the_mean_over_steps():
    stats = served()
    table = head_densities(stats.to_dict(), 0)
    (record,) = stats["records"]
    steps = [step[2] for step in record["density"][1]]
    assert steps[0] == 1.0 and table[1][2] == sum(steps) / 3


def test_repr_is_the_table_not_an_address():
    stats = served()
    assert repr(stats) == str(stats) and "object at" not in repr(stats)


def test_nothing_seen_and_hostile_notes_are_shown_safely():
    engine = heart.Engine(heart.HeartConfig(), layers=2, heads=3)
    engine.recorder.notes.append("<script>alert(1)</script>")
    page = heart.stats(engine)._repr_html_()
    assert "<script>" not in page and "0 generation(s)" in page
