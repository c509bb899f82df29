"""The README's table comes from a results folder; its pictures are there and small."""

from pathlib import Path

import pytest

from heart_attention import HeartError
from tools import front_page

README = front_page.ROOT / "README.md"


def row(method, psnr, prompt="a", attention=2.0):
    return {"method": method, "prompt": prompt, "seed": 0, "attention_s": attention, "total_s": 3.0, "psnr": psnr,
            "density": 0.5, "refresh_rate": 0.2}  # fmt: skip


MADE = {
    "conventions": {"psnr": "…"},
    "provenance": {"threads": 2, "machine": "some CPU", "call": {"num_inference_steps": 25}, "seeds": [0]},
    "rows": [row("dense", None, p, 4.0) for p in "ab"] + [row("x+joint", 20.0, "a"), row("x+joint", 22.0, "b")],
}


def test_the_table_has_ratios_an_interval_and_its_command():
    text = front_page.table(MADE)
    assert "| x+joint | 21.0 dB ± 12.7 | 0.50 | 2.00× (2.00–2.00) | 1.00× (1.00–1.00) |" in text
    assert "| dense | – | – | 1.00× | 1.00× |" in text
    assert "`heart compare --limit 2 --steps 25 --methods dense,x+joint`:\n2 videos a method, 2 threads" in text


def test_a_busy_machine_is_told():
    made = {**MADE, "rows": [{**r, "spread": 0.9} for r in MADE["rows"]]}
    assert "Times cannot be trusted" in front_page.table(made)


def test_only_what_stands_between_the_marks_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{front_page.MARKS[0]}\nold\n{front_page.MARKS[1]}\nafter\n")
    front_page.put(page, "new")
    assert page.read_text() == f"before\n{front_page.MARKS[0]}\n\nnew\n\n{front_page.MARKS[1]}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(HeartError, match="has no lines"):
        front_page.put(page, "new")


def test_the_front_page_shows_pictures_before_its_first_table():
    text = README.read_text()
    first = text.index("\n|")
    for name in front_page.PICTURES:
        assert 0 < text.index(f"(docs/images/{name})") < first
    assert front_page.too_large(Path(front_page.ROOT / "docs" / "images")) == []
    assert front_page.MARKS[0] in text and front_page.MARKS[1] in text
