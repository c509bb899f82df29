"""Ablation tables: matched policies, and a whole small run."""

import dataclasses
from pathlib import Path

import pytest
from calibrations_for_tests import paper_calibration

from heart_attention import HeartError
from heart_attention.evaluation import methods, run
from heart_attention.evaluation.studies import ablations


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0])
def test_matched_policies_are_the_nearest_there_are(rate):
    """By the policies' own decisions, step by step: no other interval and no other warm-up comes nearer."""
    interval, warmup = ablations.matched_policies(rate, steps=45, dense_steps=5)

    def of_interval(n):
        return sum((step - 5) % n == 0 for step in range(5, 45)) / 40

    def of_warmup(n):
        return sum(step < n for step in range(5, 45)) / 40

    assert abs(of_interval(interval.n) - rate) == min(abs(of_interval(n) - rate) for n in range(1, 41))
    assert abs(of_warmup(warmup.n) - rate) == min(abs(of_warmup(n) - rate) for n in range(6, 46))


@pytest.fixture(scope="module")
def bench(tiny_pipe, small_call, tmp_path_factory):
    out = tmp_path_factory.mktemp("ablate")
    setting = run.Setting("tiny", {**small_call, "num_inference_steps": 7})  # the paper's five dense steps and two more
    return ablations.Bench(tiny_pipe, "tiny", "xattention", ["a red circle moves right on a blue background"], [0],
                           setting, Path(out), methods.sort_calibrations([paper_calibration(out / "c.heart.json")]))  # fmt: skip


def test_generations_that_are_wholly_dense_are_refused(bench, small_call):
    short = dataclasses.replace(bench, setting=run.Setting("tiny", {**small_call, "num_inference_steps": 5}))
    with pytest.raises(HeartError, match="all 5 steps are dense ones of .*: give more steps"):
        ablations.components(short)


@pytest.mark.slow  # components are run by `make test`: the same way through the bench
def test_policy_table(bench):
    table = ablations.policy(bench)
    names = [e["method"] for e in table["summary"]]
    assert names[0] == "dense" and names[-1] == "TMR" and any(n.startswith("Interval") for n in names)
    assert "best is" in table["finding"] and (bench.out / "policy.md").is_file()


def test_delta_table_tries_no_reuse_too(bench):
    tried = [name for name, _ in ablations.deltas(bench)]
    assert tried[0].startswith("δ=0") and len(tried) == 4
    assert [n for n, _ in ablations.deltas(bench, [1.0, 2.0])] == ["δ=1", "δ=2"]


def test_objective_needs_two_files(bench):
    with pytest.raises(HeartError, match="two or more calibrations"):
        ablations.objective(bench, {"mse": "a.heart.json"})


def test_components_table_names_every_part(bench):
    table = ablations.components(bench)
    assert [e["method"] for e in table["summary"]] == [
        "dense",
        *(f"xattention{s}" for s in ("", "+tmr", "+ebc", "+heart")),
    ]
    assert all(e["dense_share"] == 0 for e in table["summary"][1:])  # all are forced alike
    assert table["summary"][3]["refresh_rate"] == 1.0 and "Mask reuse alone" in table["finding"]
    assert (bench.out / "components.finding.txt").read_text() == table["finding"]


def test_all_says_what_it_leaves_out():
    assert ablations.choose("all", "tiny", False) == (["components", "policy", "delta", "objective"], {})
    made, left_out = ablations.choose("all", "owner/model", False)
    assert "objective" not in made and "heart ablate objective" in left_out["objective"]
    assert ablations.choose("all", "owner/model", True)[1] == {} and ablations.choose("delta", "x", False)[0] == [
        "delta"
    ]


def test_objective_weighs_stored_bands_anew(bench, monkeypatch, tmp_path):
    import numpy as np

    from heart_attention import Calibration

    made = Calibration.load(paper_calibration(tmp_path / "c.heart.json"))
    bands = np.random.default_rng(0).random((*made.E.shape, 4))
    calls = []

    def measured(bench, error, path):
        calls.append(error)
        dataclasses.replace(made, bands=bands).save(path)

    monkeypatch.setattr(ablations, "_calibrate", measured)
    files = ablations.make_objectives(bench)
    assert list(files) == ["3D-FFT", "velocity MSE", "attention output"] and calls == ["spectral", "attention"]
    assert ablations.make_objectives(bench) == files and len(calls) == 2  # finished ones are kept
    longer = run.Setting("tiny", {**bench.setting.call, "num_inference_steps": 9})
    for other in (dataclasses.replace(bench, backbone="svg2"), dataclasses.replace(bench, setting=longer)):
        assert not set(ablations.make_objectives(other).values()) & set(files.values())  # of another kind: made anew
    table = ablations.objective(bench, files)
    assert [e["method"] for e in table["summary"]] == ["dense", *files] and "over the second" in table["finding"]
