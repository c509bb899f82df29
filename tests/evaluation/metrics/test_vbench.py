"""VBench: commands that its own parser accepts, its weighting, its prompt suite."""

import argparse
import hashlib
import json
import subprocess
import sys
import zipfile

import pytest

from heart_attention import HeartError
from heart_attention.evaluation.metrics import vbench

# The options of `vbench evaluate` in version 0.1.5, as its parser declares them (each takes one word).
OPTIONS = ("--ngpus", "--output_path", "--full_json_dir", "--videos_path", "--dimension", "--load_ckpt_from_local",
           "--read_frame", "--mode", "--prompt", "--prompt_file", "--category",
           "--imaging_quality_preprocessing_mode")  # fmt: skip
MODES = ("custom_input", "vbench_standard", "vbench_category")


def recorded_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vbench")
    evaluate = parser.add_subparsers().add_parser("evaluate")
    for option in OPTIONS:
        needed = option in ("--videos_path", "--dimension")
        evaluate.add_argument(option, required=needed, choices=MODES if option == "--mode" else None)
    return parser


def real_parser(folder) -> argparse.ArgumentParser:
    """The parser of the real package: its one file is taken out of the wheel, whose other files need a GPU's environment."""
    try:
        wheel = vbench.download(vbench.WHEEL, folder, vbench.INSTEAD)
    except HeartError as error:
        pytest.skip(str(error))
    module: dict = {"__name__": "evaluate", "__file__": str(folder / "evaluate.py")}
    with zipfile.ZipFile(wheel) as archive:
        exec(compile(archive.read("vbench/cli/evaluate.py"), "evaluate.py", "exec"), module)
    parser = argparse.ArgumentParser(prog="vbench")
    module["register_subparsers"](parser.add_subparsers())
    return parser


def check_commands(parser, standard, folder):
    asked = [parser.parse_args(words[1:]) for words in vbench.commands(folder / "dense", standard)]
    assert [a.dimension for a in asked] == list(vbench.DIMENSIONS)
    assert {a.mode for a in asked} == {"vbench_standard" if standard else "custom_input"}
    assert len({a.output_path for a in asked}) == 6  # no result overwrites another
    assert all((a.prompt_file is None) == standard for a in asked)


@pytest.mark.parametrize("standard", [False, True])
def test_commands_are_accepted_by_vbenchs_parser(standard, tmp_path):
    check_commands(recorded_parser(), standard, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("standard", [False, True])
def test_commands_are_accepted_by_the_parser_of_the_real_package(standard, tmp_path):
    parser = real_parser(tmp_path)
    check_commands(parser, standard, tmp_path)
    declared = {o for a in parser._subparsers._group_actions[0].choices["evaluate"]._actions for o in a.option_strings}
    assert set(OPTIONS) == declared - {"-h", "--help"}  # the recorded list is that of the package


def test_the_line_to_type_runs_once_a_dimension(tmp_path):
    line = vbench.shell_line(tmp_path / "a b", False)
    script = 'vbench() { printf "%s|" "$@"; echo; }; ' + line
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout.splitlines()
    assert [s.split("|--dimension|")[1].split("|")[0] for s in said] == list(vbench.DIMENSIONS)
    for words, dimension in zip(said, vbench.DIMENSIONS):
        assert f"|{tmp_path / 'a b' / 'videos'}|" in words and words.endswith(f"vbench/{dimension}|")


def results(**changes):
    values = dict(zip(vbench.DIMENSIONS, (0.9612, 0.9871, 0.6111, 0.6034, 0.6543, 0.2491)))
    return {k: v for k, v in {**{n: [v, []] for n, v in values.items()}, **changes}.items() if v != "drop"}


def test_total_is_the_official_weighting(tmp_path):
    (tmp_path / "r_eval_results.json").write_text(json.dumps(results()))
    quality = ((0.9612 - 0.1462) / 0.8538 + (0.9871 - 0.706) / 0.2915 + 0.5 * 0.6111 + 0.6034 + 0.6543) / 4.5
    assert vbench.read(tmp_path)["total"] == pytest.approx((4 * quality + 0.2491 / 0.364) / 5)
    assert vbench.read(tmp_path / "nowhere") is None


def test_the_last_result_of_a_dimension_counts(tmp_path):
    (tmp_path / "results_1_eval_results.json").write_text(json.dumps(results()))
    (tmp_path / "results_2_eval_results.json").write_text(json.dumps({"dynamic_degree": [0.7, []]}))
    assert vbench.read(tmp_path)["dynamic_degree"] == 0.7


@pytest.mark.parametrize("change, sentence", [
    ({"motion_smoothness": None}, "no finite score"),
    ({"motion_smoothness": [10**400]}, "no finite score"),
    ({"motion_smoothness": float("1e300")}, "no finite score"),
    ({"dynamic_degree": "drop"}, "lacks the VBench dimension 'dynamic_degree'"),
])  # fmt: skip
def test_a_bad_file_is_refused(tmp_path, change, sentence):
    (tmp_path / "r_eval_results.json").write_text(json.dumps(results(**change)))
    with pytest.raises(HeartError, match=sentence):
        vbench.read(tmp_path)


def test_no_file_name_of_a_judge_steers_a_terminal(tmp_path):
    (tmp_path / "\x1b[2J_eval_results.json").write_text("[]")
    with pytest.raises(HeartError, match="not a VBench result") as caught:
        vbench.read(tmp_path)
    assert str(caught.value).isprintable()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEART_CACHE", str(tmp_path / "cache"))
    vbench._suite.cache_clear()
    yield
    vbench._suite.cache_clear()


def test_the_suite_comes_from_a_checked_wheel(tmp_path, monkeypatch, own_cache):
    suite = json.dumps([{"prompt_en": "a cat", "dimension": ["color"]}, {"prompt_en": "a dog", "dimension": ["scene"]}])
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(vbench.SUITE[0], suite)
    with pytest.raises(HeartError, match="damaged or replaced"):
        vbench.fetch(wheel)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(vbench, "WHEEL", vbench.WHEEL._replace(digest=digest))
    monkeypatch.setattr(vbench, "SUITE", (vbench.SUITE[0], hashlib.sha256(suite.encode()).hexdigest()))
    vbench.fetch(wheel)
    assert vbench.prompts() == ["a cat", "a dog"] and vbench.prompts("scene") == ["a dog"]
    assert vbench.in_suite(["a cat"]) and not vbench.in_suite(["a bird"])
    with pytest.raises(HeartError, match="no dimension 'speed'"):
        vbench.prompts("speed")


def test_a_failing_pip_is_one_sentence(monkeypatch, own_cache):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(HeartError, match="pip could not fetch vbench"):
        vbench.fetch()
