"""`heart ablate` and `heart study` at the embedded model's smallest call; the page they fill."""

import json

from calibrations_for_tests import paper_calibration

from heart_attention.cli import main
from heart_attention.evaluation.studies import reproduction

SMALL = ["--size", "64x64", "--frames", "4", "--limit", "1"]
MARKS = "\n".join(("# Page", *reproduction.STUDIES_MARKS, "between", *reproduction.ABLATIONS_MARKS, "end", ""))


def test_an_ablation_is_printed_and_put_into_the_page(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(MARKS)
    words = ["ablate", "policy", *SMALL, "--steps", "8", "--calibration", paper_calibration(tmp_path / "c.heart.json")]
    assert main.main([*words, "--out", str(tmp_path / "a"), "--docs", str(page)]) == 0
    said = capsys.readouterr().out
    assert "best is" in said and "made on 1 × " in said and "Empty for dense: PSNR dB" in said
    text = page.read_text()
    assert "### policy" in text and "between" in text and text.rstrip().endswith("end")


def test_a_study_is_printed_and_leaves_the_other_section_alone(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(MARKS.replace(reproduction.ABLATIONS_MARKS[0], reproduction.ABLATIONS_MARKS[0] + "\nold table"))
    words = [
        "study",
        "drift",
        *SMALL,
        "--steps",
        "4",
        "--no-control",
        "--out",
        str(tmp_path / "s"),
        "--docs",
        str(page),
        "--json",
    ]
    assert main.main(words) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["drift"]["control"] is None
    text = page.read_text()
    assert "old table" in text and "Spearman" in text and (tmp_path / "s" / "drift.svg").is_file()


def test_a_folder_without_data_empties_nothing(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(MARKS.replace("between", "kept"))
    before = page.read_text()
    reproduction.fill(page, tmp_path / "nothing", tmp_path / "nothing")
    assert page.read_text() == before
