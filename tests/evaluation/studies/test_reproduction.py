"""The page of figures: rows for every study and backbone, sections that are filled apart."""

import json

import pytest

from heart_attention import HeartError
from heart_attention.evaluation.studies import reproduction

PAGE = "\n".join(("# P", *reproduction.STUDIES_MARKS, "middle", *reproduction.ABLATIONS_MARKS, "end", ""))


def write(folder, name, **numbers):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"study": name, "finding": f"found {name}", **numbers}))


def test_rows_for_every_backbone_and_dashes_without_a_control(tmp_path):
    side = {"xattention": {"swing_mean": 0.125}, "svg2": {"swing_mean": 0.25}}
    write(tmp_path / "s", "timesteps", trained=side, control=None)
    write(tmp_path / "s", "frequency", trained={"LL": {"psnr": 30.0}}, control=None, paper={"LL": 28.19})
    page = tmp_path / "p.md"
    page.write_text(PAGE)
    reproduction.fill(page, tmp_path / "s")
    text = page.read_text()
    assert "mean, xattention | figure | 0.125 | – | `heart study timesteps`" in text and "svg2 | figure | 0.250" in text
    row = "| PSNR dB, SSIM, LPIPS with noise in LL | 28.19, 0.8452, 0.1024 | 30.00, –, – | – |"
    assert row in text and "found timesteps" in text
    assert text.index("found frequency") < text.index("middle") < text.index("end")


def test_ablations_fill_their_own_section(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "delta.md").write_text("| table |")
    (tmp_path / "a" / "delta.finding.txt").write_text("a plateau")
    page = tmp_path / "p.md"
    page.write_text(PAGE)
    reproduction.fill(page, ablations=tmp_path / "a")
    text = page.read_text()
    assert text.index("middle") < text.index("| table |") < text.index("a plateau") < text.index("end")


def test_a_comparison_fills_the_main_table(tmp_path):
    rows = [{"method": m, "prompt": "p", "seed": 0, "attention_s": 1.0, "total_s": 2.0, "density": None, "refresh_rate": None}
            for m in ("dense", "xattention")]  # fmt: skip
    made = {
        "schema": "heart-results/1",
        "provenance": {"heart": "9", "call": {"width": 64}},
        "conventions": {},
        "rows": rows,
    }
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(made))
    (folder / "table.md").write_text("| the table |")
    page = tmp_path / "p.md"
    page.write_text("\n".join((PAGE, *reproduction.COMPARED_MARKS)))
    reproduction.fill(page, compared=folder)
    assert "| the table |" in page.read_text() and "1 prompts and seeds, 64×" in page.read_text()
    before = page.read_text()
    reproduction.fill(page, compared=tmp_path / "nothing")
    assert page.read_text() == before


def test_another_model_has_a_table_of_its_own(tmp_path):
    row = {"method": "dense", "prompt": "p", "seed": 0, "attention_s": 1.0, "total_s": 2.0, "density": None}
    rows = [{**row, "refresh_rate": None}]
    made = {"schema": "heart-results/1", "provenance": {"model": "tiny-hunyuan"}, "conventions": {}, "rows": rows}
    folder, page = tmp_path / "c", tmp_path / "p.md"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(made))
    (folder / "table.md").write_text("| the other table |")
    own = reproduction.marks_of("compare", "tiny-hunyuan")
    page.write_text("\n".join((*reproduction.COMPARED_MARKS, *own)))
    reproduction.fill(page, compared=folder)
    before, _, after = page.read_text().partition(own[0])
    assert "| the other table |" in after and "table" not in before
    page.write_text("\n".join(reproduction.COMPARED_MARKS))
    with pytest.raises(HeartError, match="compare --model tiny-hunyuan"):
        reproduction.check_page(page, "compare", "tiny-hunyuan")
