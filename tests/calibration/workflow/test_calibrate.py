"""Whole calibrations: resumed after kills to the same bytes, nothing wrong ever used, figures that add up."""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import killed_runs
import numpy as np
import pytest
import torch
from models_for_tests import CALL, wan_pipe

from heart_attention.backbones import SVG2, XAttention
from heart_attention.calibration import file
from heart_attention.calibration.points import points_of
from heart_attention.calibration.solve import search
from heart_attention.calibration.solve.case import Case, Tables
from heart_attention.calibration.workflow import calibrate, plan, store
from heart_attention.calibration.workflow.phases import Phases
from heart_attention.calibration.workflow.settings import METHODS
from heart_attention.errors import HeartError


@pytest.fixture(scope="module", autouse=True)
def quiet():
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pipe():
    return wan_pipe(layers=2)


def settings(method="joint", backbone=None, **more):
    given = {"method": method, "held_out": ("blue sky",), "contexts": 3, "held_out_contexts": 2, "dense_steps": 2}
    given |= {"rounds": 1, "candidates": (0.6, 0.9, 0.95)}
    return calibrate.Settings(
        backbone or XAttention(stride=4, block=8), ("a red ball", "a cat"), CALL, **(given | more)
    )


@pytest.fixture(scope="module")
def finished(pipe, tmp_path_factory):
    """A finished calibration by each method: (folder, calibration, stages seen)."""
    made = {}
    for method in METHODS:
        work, stages = tmp_path_factory.mktemp(method), []
        made[method] = (
            work,
            calibrate.run(pipe, settings(method), work, progress=lambda *a, s=stages: s.append(a)),
            stages,
        )
    return made


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_at_random_moments_the_file_is_the_same(pipe, tmp_path):
    """Once; tests/chaos does it for every method and many seeds."""
    told = killed_runs.killed(pipe, tmp_path, "probes", seed=5, most=3)
    assert told["equal"] and told["kills"] >= 2
    assert all(before <= after for before, after in told["records"])  # nothing finished is lost
    assert told["records"][-1][1] == told["total"]


@pytest.mark.parametrize("method", METHODS)
def test_a_calibration_is_complete_and_saves(finished, method, tmp_path, pipe):
    _, made, stages = finished[method]
    path = made.save(tmp_path / "x.heart.json")
    again = file.Calibration.load(path, pipe.transformer)
    assert again == made and made.method == method and made.thresholds.shape == (2, 2)
    assert made.candidates.tolist() == [0.6, 0.9, 0.95] and made.E.shape == made.S.shape == (2, 2, 3)
    for call in ("calibration", "held_out"):
        for who in ("shared", "chosen"):
            figures = made.verification[call][who]
            assert figures["error"] == pytest.approx(np.mean(figures["errors"])) and 0 < figures["sparsity"] < 1
    assert {s for s, *_ in stages} >= {"trajectories", "verifying, calibration", "verifying, held out"}
    for _, done, total, left in stages:
        assert 0 <= done <= total and (left is None or left >= 0)


def test_joint_never_ends_above_the_shared_threshold(finished):
    figures = finished["joint"][1].verification["calibration"]
    assert figures["chosen"]["error"] <= figures["shared"]["error"]
    assert figures["chosen"]["sparsity"] >= figures["shared"]["sparsity"] - search.SLACK


def test_probes_tables_are_means_of_the_heads_own_contexts(finished, pipe):
    work, made, _ = finished["probes"]
    contexts = plan.draw_contexts(settings("probes"), 2, 2)
    for layer in range(2):
        for head in range(2):
            own = [at for at, wanted in contexts.probes.items() if head in wanted.get(layer, ())]
            assert len(own) == 4 and len({p for p, _ in own}) == 1
            records = [_value(work, f"probe_p{p:03d}_s{s:03d}_l{layer:03d}")["heads"][str(head)] for p, s in own]
            np.testing.assert_allclose(made.E[layer, head], np.mean([r["error"] for r in records], axis=0), rtol=1e-14)
            np.testing.assert_allclose(
                made.S[layer, head], np.mean([r["sparsity"] for r in records], axis=0), rtol=1e-14
            )
    assert made.extra["probes"]["planned"] == 3 * 4 * 2 * 2 >= made.extra["probes"]["run"]
    assert len(made.extra["null"]["probes"]) == len(contexts.probes) and made.extra["null"]["worst"] < 1e-8
    np.testing.assert_allclose(made.bands @ [1, 0.5, 0.01, 0.01], made.E, rtol=1e-12)


def _value(work, name):
    return json.loads((work / "records" / f"{name}.json").read_text())["value"]


def test_probes_with_a_relative_mean_weigh_errors_and_bands_alike(finished, pipe, tmp_path):
    made = calibrate.run(pipe, settings("probes", mean="relative"), tmp_path)
    assert made.settings["mean"] == "relative" and not np.allclose(made.E, finished["probes"][1].E)
    np.testing.assert_allclose(made.bands @ [1, 0.5, 0.01, 0.01], made.E, rtol=1e-12)


def test_finished_work_is_not_done_again(finished, pipe, monkeypatch):
    work, made, _ = finished["joint"]

    def refuse(*_):
        raise AssertionError("work was done again")

    monkeypatch.setattr(calibrate.CalibrationWorker, "run", refuse)
    assert calibrate.run(pipe, settings("joint"), work) == made


def _copy(work, tmp_path):
    import shutil

    return Path(shutil.copytree(work, tmp_path / "copy"))


@pytest.mark.parametrize("harm", ["deleted", "half", "altered", "other plan", "context"])
def test_damage_is_found_and_mended(finished, pipe, tmp_path, harm, caplog):
    work, made, _ = finished["isolated"]
    work = _copy(work, tmp_path)
    path = sorted((work / "records").glob("gradient*.json"))[0]
    if harm == "deleted":
        path.unlink()
    elif harm == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif harm == "altered":
        path.write_text(path.read_text().replace('"error": ', '"error": 1', 1))
    elif harm == "other plan":
        path.write_text(json.dumps({**json.loads(path.read_text()), "plan": "0" * 64}))
    else:
        context = sorted((work / "trajectories").glob("*.safetensors"))[0]
        context.write_bytes(context.read_bytes()[:-4] + b"\0\0\0\1")
        path.unlink()
    assert calibrate.run(pipe, settings("isolated"), work) == made
    assert ("damaged or of another plan" in caplog.text) == (harm in ("half", "altered", "other plan"))


def test_a_changed_plan_is_refused_and_names_what_changed(finished, pipe, tmp_path):
    work = finished["isolated"][0]
    with pytest.raises(HeartError, match=r"another calibration \(different: contexts, seed\)"):
        calibrate.run(pipe, settings("isolated", seed=1, contexts=4), work)
    with pytest.raises(HeartError, match="different: model"):
        calibrate.run(wan_pipe(layers=3), settings("isolated"), work)
    with pytest.raises(HeartError, match="different: model"):
        calibrate.run(wan_pipe(layers=2, seed=9), settings("isolated"), work)
    with pytest.raises(HeartError, match="different: dtype"):
        calibrate.run(wan_pipe(layers=2).to(torch.bfloat16), settings("isolated"), work)
    with pytest.raises(HeartError, match="records already: resume"):
        calibrate.run(pipe, settings("isolated"), work, resume=False)
    copy = _copy(work, tmp_path)
    (copy / "plan.json").write_text("{}")
    with pytest.raises(HeartError, match="damaged or of another version"):
        calibrate.run(pipe, settings("isolated"), copy)
    (copy / "plan.json").unlink()
    with pytest.raises(HeartError, match="records but no plan"):
        calibrate.run(pipe, settings("isolated"), copy)


def test_a_full_disk_is_one_sentence_and_loses_nothing(finished, pipe, tmp_path, monkeypatch):
    work, made, _ = finished["isolated"]
    work = _copy(work, tmp_path)
    for path in sorted((work / "records").glob("gradient*.json"))[1:]:
        path.unlink()
    before = {p.name for p in (work / "records").iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_json", full)
        with pytest.raises(
            HeartError, match=r"cannot be written \(No space left on device\): what is finished is kept"
        ):
            calibrate.run(pipe, settings("isolated"), work)
    assert {p.name for p in (work / "records").iterdir()} == before
    assert calibrate.run(pipe, settings("isolated"), work) == made


def test_the_model_is_given_back_whatever_happens(pipe, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(calibrate.Runner, "records", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        calibrate.run(pipe, settings("isolated"), tmp_path)
    assert not any("forward" in m.__dict__ for m in pipe.transformer.modules())
    assert all(type(b.attn1.processor).__mro__[1] is object for b in pipe.transformer.blocks)


def test_svg2_and_the_conditional_velocity(pipe, tmp_path):
    made = calibrate.run(
        pipe, settings("probes", SVG2(6, 10, init_iters=5), velocity="cond", strata="sparse"), tmp_path
    )
    assert made.backbone["name"] == "svg2" and made.settings["velocity"] == "cond"
    assert (np.diff(made.S, axis=-1) <= 0).all() and (made.E[..., 0] > 0).all()


def solved(budget, made):
    one = Case(settings("isolated", budget=budget), 2, 2, Phases(((2, 7),), (), (1.0,)))
    return one.solve(made.E[None], Tables(made.S[None], made.cost[None]))


def test_other_budgets(pipe, finished):
    _, made, _ = finished["isolated"]
    looser = solved("sparsity=0.1", made)
    assert looser.sparsity >= 0.1 and looser.objective <= made.solver["objective"]
    by_mean = solved("threshold=0.8", made)
    assert by_mean.thresholds.mean() <= 0.8 + 1e-9


def test_two_transformers_are_refused(pipe, tmp_path):
    class Both:
        transformer, transformer_2, scheduler = pipe.transformer, pipe.transformer, pipe.scheduler

    with pytest.raises(HeartError, match="two transformers"):
        calibrate.run(Both(), settings(), tmp_path)


def test_the_verb_writes_the_file_and_takes_presets(pipe, tmp_path):
    more = {"call": CALL, "method": "isolated", "contexts": 2, "held_out_contexts": 0, "dense_steps": 2}
    given = {"prompts": ["a red ball"], "held_out": [], "candidates": (0.6, 0.9), **more}
    made = calibrate.calibrate(pipe, XAttention(stride=4, block=8), out=tmp_path / "a.heart.json", **given)
    assert file.Calibration.load(tmp_path / "a.heart.json", pipe.transformer) == made
    assert (tmp_path / "a.work" / "plan.json").exists() and list(made.verification) == ["calibration"]
    again = calibrate.calibrate(pipe, XAttention(stride=4, block=8), **given)  # a temporary work folder
    assert again == made
    with pytest.raises(HeartError, match=r"ends in \.heart\.json"):
        calibrate.calibrate(pipe, out="x.json")
    with pytest.raises(HeartError, match="no such setting"):
        calibrate.calibrate(pipe, call=CALL, colour="red")


POINTS = (
    *points_of(XAttention(stride=4, block=8), (0.5, 0.9)),
    *points_of(SVG2(6, 10, init_iters=5, min_ratio=0.0), (0.3, 0.7), rest="mean"),
    *points_of(XAttention(stride=4, block=8), (0.5,), order="tiles"),
)


@pytest.mark.parametrize("method", METHODS)
def test_points_of_several_kinds_in_phases(pipe, tmp_path, method):
    given = {"points": POINTS, "phases": 2, "contexts": 4, "strata": "sparse", "budget": "sparsity=0.4"}
    made = calibrate.run(pipe, settings(method, **given, candidates=None), tmp_path)
    assert made.phase_count == 2 and made.choice.shape == (2, 2, 2) and made.E.shape == made.cost.shape == (2, 2, 2, 5)
    assert made.backbone_names == "xattention+svg2" and not made.simple
    assert len(made.phases["sigmas"]) == 1 and np.mean(made.phases["weights"]) == pytest.approx(1)
    assert (made.cost >= 1 - made.S - 1e-12).all() and (made.cost[..., 2] > 1 - made.S[..., 2]).any()
    again = file.Calibration.load(made.save(tmp_path / "a.heart.json"), pipe.transformer)
    assert again == made
    assert calibrate.run(pipe, settings(method, **given, candidates=None), tmp_path) == made


@pytest.mark.parametrize("method", ["isolated", "joint"])
def test_a_budget_of_time_is_kept(pipe, tmp_path, method):
    table = _table_of_ones(tmp_path)
    given = {"points": POINTS, "candidates": None, "cost_table": table, "dense_steps": 1}
    made = calibrate.run(pipe, settings(method, budget="time=0.7", **given), tmp_path / "w")
    spent = -made.solver["budget"]["max_time"] if "max_time" in made.solver["budget"] else None
    assert spent is not None and made.extra["time"]["digest"] and made.solver["proven"]
    looser = calibrate.run(pipe, settings(method, budget="time=0.9", **given), tmp_path / "w2")
    assert looser.density_cost >= made.density_cost
    again = made.resolve("time=0.9", cost_table=table)  # without a model
    assert again.solver["time"] <= again.solver["budget"]["max_time"] + 1e-8 and again.solver["proven"]
    assert again.density_cost >= made.density_cost and again.extra["time"] == made.extra["time"]
    with pytest.raises(HeartError, match="not made for a budget of time"):
        replace(made, extra={}).resolve("time=0.9")


def _table_of_ones(folder):
    """Attention by its pairs alone: prediction, drift and planning cost nothing."""
    from heart_attention.online.cost_model import PARTS, Costs, CostTable, Line

    parts = {name: Line(0.0, 1.0 if name in ("dense", "kernel") else 0.0) for name in PARTS}
    costs = {16: Costs(**parts)}
    table = CostTable("cpu-c", "made up", 0.0, {"block": costs, "cluster": costs})
    (folder / "costs.json").write_text(json.dumps(table.to_dict()))
    return str(folder / "costs.json")


def test_the_rest_is_calibrated(pipe, tmp_path):
    backbone = SVG2(6, 10, init_iters=5, min_ratio=0.0)
    made = calibrate.run(pipe, settings("isolated", backbone, rest="mean"), tmp_path)
    assert made.rest == "mean" and made.simple and (made.cost > 1 - made.S).any()
    dropped = calibrate.run(pipe, settings("isolated", backbone), tmp_path / "drop")
    assert dropped.rest == "drop" and np.allclose(dropped.S, made.S)
    assert made.E[..., 0].sum() < dropped.E[..., 0].sum()
