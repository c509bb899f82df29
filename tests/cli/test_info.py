"""`heart info`: right data, readable text, honest when there is no compiler."""

import argparse
import json

import pytest
import torch

from heart_attention import __version__, kernels
from heart_attention.cli import info, main


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    info.register(parser.add_subparsers(required=True))
    return parser


def test_json_names_versions_machine_and_every_kernel(parser, capsys):
    args = parser.parse_args(["info", "--json"])
    assert args.func(args) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["heart-attention"] == __version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads() and facts["cores"] >= 1
    assert list(facts["kernels"]) == kernels.names()
    for state in facts["kernels"].values():
        assert state["serves"] == (state["reasons"] == [])
    assert facts["kernels"]["gather"]["serves"] and facts["kernels"]["eager"]["serves"]


def test_text_says_the_same(parser, capsys):
    args = parser.parse_args(["info"])
    assert args.func(args) == 0
    text = capsys.readouterr().out.split("kernels, in the order")[1]
    for name, reasons in kernels.available().items():
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{name} "))
        assert ("serves" in line) == (not reasons)
        assert all(reason in line for reason in reasons)


def test_without_compiler_it_says_why(parser, capsys, monkeypatch):
    monkeypatch.setenv("HEART_NO_COMPILER", "1")
    args = parser.parse_args(["info"])
    assert args.func(args) == 0
    text = capsys.readouterr().out
    assert "not built: HEART_NO_COMPILER is set" in text
    cpu = next(line for line in text.splitlines() if line.strip().startswith("cpu "))
    assert "HEART_NO_COMPILER" in cpu


def test_without_a_cache_folder_it_says_why(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEART_CACHE", str(tmp_path / "file"))
    assert main.main(["info"]) == 0
    told = capsys.readouterr().out
    assert "cache folder        none: the cache folder" in told and "not built: building the C kernels failed" in told


def test_presets_say_what_is_not_the_papers(capsys):
    assert main.main(["info", "--presets"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["wan2.1-1.3b-480p-xattention"] == "832x480, 81 frames: the paper's values"
    assert "δ, which the paper does not state" in lines["hunyuanvideo-13b-xattention"]
    assert "not the paper's" not in lines["hunyuanvideo-13b-svg2"]
    assert main.main(["info", "--presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiny-svg2"]["config"]["_data"]["scale_clusters"]
