"""Ablation tables: matched policies, and a whole small run."""

from pathlib import Path

import pytest

from heart_attention import HeartError
from heart_attention.evaluation import run
from heart_attention.evaluation.studies import ablations


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 1.0])
def test_matched_policies_refresh_as_often(rate):
    interval, warmup = ablations.matched_policies(rate, steps=45, dense_steps=5)
    share_interval = len(range(5, 45, interval.n)) / 40
    share_warmup = (warmup.n - 5) / 40
    assert share_warmup == pytest.approx(rate, abs=0.02) and share_interval == pytest.approx(rate, abs=0.2)


@pytest.fixture(scope="module")
def bench(tiny_pipe, small_call, tmp_path_factory):
    out = tmp_path_factory.mktemp("ablate")
    setting = run.Setting("tiny", small_call)
    return ablations.Bench(tiny_pipe, "tiny", "xattention", ["a red circle moves right on a blue background"], [0],
                           setting, Path(out), {})  # fmt: skip


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
