"""`heart frontier`: what is refused before anything is loaded, and what it says of a finished folder."""

import json

import pytest

from heart_attention.cli import main

SMALL = ["--size", "64x64", "--frames", "4", "--steps", "7", "--limit", "1", "--metrics", "psnr", "--force-sparse"]


@pytest.mark.parametrize("words, sentence", [
    (["--methods", "heart@0.3", "--model", "owner/name", "--prompts", "p.txt"], "--points default"),
    (["--methods", "xattention@2"], "outside 0 … 1"),
    (["--methods", "xattention@"], "is not shared"),
    (["--plot", "front.png"], "ends in .svg"),
    (["--velocity", "-1"], "--velocity is -1"),
])  # fmt: skip
def test_wrong_arguments_are_told_before_anything_is_loaded(words, sentence, capsys, tmp_path, monkeypatch):
    from heart_attention.evaluation import pipelines

    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a cat\n")
    monkeypatch.setattr(pipelines, "load", lambda *a: pytest.fail("loaded"))
    assert main.main(["frontier", *words]) == 1
    assert sentence in capsys.readouterr().err


def test_a_front_is_told_drawn_and_put_on_a_page(tmp_path, capsys):
    words = [
        "frontier",
        *SMALL,
        "--methods",
        "xattention@0.5,xattention@0.9,xattention+joint",
        "--out",
        str(tmp_path / "r"),
    ]
    assert main.main([*words, "--plot", str(tmp_path / "f.svg")]) == 0
    said = capsys.readouterr().out
    assert "unbeaten in attention time and PSNR: " in said
    page = (tmp_path / "r" / "report.html").read_text()
    assert "One against the other" in page and page.count('class="curve f') == 2  # by attention, and end to end
    assert (tmp_path / "f.svg").read_text().startswith("<svg xmlns")
    assert main.main([*words, "--json"]) == 0
    assert {e["family"] for e in json.loads(capsys.readouterr().out)["methods"]} == {"xattention", "xattention+joint"}
