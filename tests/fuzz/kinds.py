"""The kinds of files that HEART reads: valid examples, and how each is read and then used."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heart_attention import Calibration, HeartConfig, HeartError, backbones, files
from heart_attention.backbones import SVG2, XAttention
from heart_attention.calibration import choices, show
from heart_attention.calibration import points as candidate_points
from heart_attention.calibration.workflow.store import Store, digest
from heart_attention.errors import LONGEST
from heart_attention.evaluation import projection, results, run, tables
from heart_attention.evaluation.report.build import _sections
from heart_attention.online import cost_model
from heart_attention.online.points import ModelPoints, Point, PointTable
from heart_attention.online.reuse import TMR, Always, Interval, Warmup


class Kind(NamedTuple):
    """Valid objects, and `use(object, folder)`: may raise HeartError and nothing else."""

    valid: list[Any]
    use: Callable[[Any, Path], Any]


# ---------------------------------------- configs


def _configs() -> list[Any]:
    taus = [[0.5, 0.9], [0.7, 1.0]]
    points = (
        Point(XAttention(4, 16), 0.8),
        Point(SVG2(8, 16), 0.9, "mean"),
        Point(XAttention(4, 64), 0.7, order="4x4x4"),
    )
    table = PointTable(points, [[[[0, 1], [2, 0]], [[1, 1], [2, 2]]]], (0.6,))
    made = [
        HeartConfig(XAttention(4, 16), taus, TMR(delta=(3.0, float("inf")), gate=(0.2, 0.9)), order="tiles"),
        HeartConfig(SVG2(8, 16), 0.9, Interval(3), model="wan2.1-1.3b", scale_clusters=True, rest="mean"),
        HeartConfig("xattention", [0.5, 0.6], Warmup(4), kernel="gather", force_sparse=True, cost_table="x.json"),
        HeartConfig(XAttention(4, 64), 0.9, Always(), order=[["4x4x4", "raster"], ["raster", "1x8x8"]]),
        HeartConfig("svg2", 0.9, TMR(relative=0.1), points=table, head_assignment="cost", dense_layers=1),
    ]
    old = made[0].to_dict()
    old = {**old, "_version": 1, "_data": {k: v for k, v in old["_data"].items() if k in ("backbone", "thresholds")}}
    made += [HeartConfig(name, 0.9) for name in backbones.names()]
    made += [HeartConfig(backbones.by_name("lite", must=[[0, 5], [8, 9]]), 0.9)]
    return [json.loads(json.dumps(config.to_dict())) for config in made] + [old]


def _use_config(value: Any, folder: Path) -> None:
    config = HeartConfig.from_dict(value)
    assert HeartConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
    hash(config)
    config.reuse.check(2)
    model = ModelPoints(config, 1, 2, 2)
    for layer in range(2):
        model.groups(0, model.phase(0.5), layer)
        model.dense_layer(0, model.phase(0.9), layer)


# ---------------------------------------- calibrations


def _calibrations() -> list[Any]:
    """Two simple ones, one of version 1, and one with several backbones and phases."""
    shape, rng = (2, 2, 3), np.random.default_rng(0)
    tables_ = {"E": rng.random(shape), "S": rng.random(shape), "bands": rng.random((*shape, 4))}
    simple = Calibration(
        [[0.5, 0.9], [0.9, 0.6]], XAttention(4, 16).to_dict(), "joint", candidates=[0.5, 0.6, 0.9], **tables_,
        error={"name": "spectral", "weights": [1, 2, 2, 4]}, height=64, width=64, frames=5, steps=7, seed=3,
        scheduler="X", prompts={"count": 2, "hash": "0"}, settings={"grid": [2, 4, 4], "order": "raster", "dense_steps": 2},
    )  # fmt: skip
    plain = Calibration([[0.5, 0.9]], SVG2(8, 16).to_dict(), model=_fingerprint(1, 2))
    both = [Point(XAttention(4, 16), 0.8).to_dict(), Point(SVG2(8, 16), 0.9, "mean").to_dict()]
    wide = Calibration(
        points=both, choice=np.array([[[0, 1], [1, 1]], [[1, 0], [0, 0]]]), method="probes", E=rng.random((2, 2, 2, 2)),
        S=rng.random((2, 2, 2, 2)), cost=rng.random((2, 2, 2, 2)),
        phases={"sigmas": [0.5], "weights": [1.0, 1.0], "steps": [3, 4]},
    )  # fmt: skip
    times = {
        "kind": "cpu-c", "digest": "0", "tokens": 1152, "heads": 2, "head_dim": 32, "refresh": 0.25, "steps": 7, "dense_steps": 2,
    }  # fmt: skip
    timed = dataclasses.replace(wide, extra={"time": {**times, "scale_clusters": True}})
    old = {
        "schema": "heart-calibration/1", "method": "joint", "thresholds": [[0.5, 0.9]], "candidates": [0.5, 0.9],
        "backbone": SVG2(8, 16).to_dict(), "E": [[[0.1, 0.2], [0.3, 0.4]]], "S": [[[0.5, 0.4], [0.5, 0.4]]],
        "model": {k: v for k, v in _fingerprint(1, 2).items() if k != "values_digest"},
    }  # fmt: skip
    return [json.loads(json.dumps(c.to_dict())) for c in (simple, plain, wide, timed)] + [old]


def _fingerprint(layers: int, heads: int) -> dict[str, Any]:
    sizes = {"layers": layers, "heads": heads, "head_dim": 16}
    return {"class": "X", "config_hash": "0" * 64, **sizes, "weights_digest": "1" * 64, "values_digest": None}


def _use_calibration(value: Any, folder: Path) -> None:
    made = Calibration.from_dict(value)
    assert Calibration.from_dict(json.loads(made.to_bytes())) == made
    made.warnings_for(steps=9, grid=(2, 4, 4), order="tiles", backbone=SVG2().to_dict(), rest="mean")
    made.head_costs()
    made.of_transformers(1)
    path = made.save(folder / "c.heart.json")
    _can_be_shown(show.text(Calibration.load(path)))
    _can_be_shown(repr(made) + choices.markdown(made))
    json.dumps(show.summary(made), allow_nan=False)
    for budget in ("mean=0.8", "shared=0.9", "time=0.6"):
        try:
            made.resolve(budget)
        except HeartError as error:  # valid files too have budgets that they cannot serve
            assert len(str(error)) <= LONGEST and str(error).isprintable(), ascii(error)[:100]


# ---------------------------------------- cost tables, points, results, work folders


def _use_costs(value: Any, folder: Path) -> None:
    table = cost_model.CostTable.from_dict(value)
    shares = [cost_model.Share((1, 2, 4096, 32), backbone, "mean", 0.3) for backbone in (XAttention(), SVG2())]
    assert isinstance(table.pays(*table.seconds(shares, 0.3)), bool)
    table.first_pays(shares, 0.3, 20)
    assert cost_model.CostTable.from_dict(json.loads(json.dumps(table.to_dict(), allow_nan=False))) == table
    _can_be_shown(f"{table.kind}{table.origin}")


def _use_points(value: Any, folder: Path) -> None:
    candidate_points.read_points(_written(value, folder))


def _rows() -> list[Any]:
    row = {"method": "dense", "prompt": "p", "seed": 0, "attention_s": 1.0, "total_s": 2.0, "density": None,
           "refresh_rate": None, "video": "videos/a.mp4", "parts_s": {"attention": 1.0}, "steps_s": [0.1],
           "psnr": None}  # fmt: skip
    more = {"method": "xattention", "density": 0.4, "refresh_rate": 0.3, "psnr": 31.0, "kernel": "cpu", "wall_s": 3.0,
            "dense_share": 0.1, "cost": 0.4, "stats": "stats/x.json", "dense_reasons": {"warm-up step": 3}}  # fmt: skip
    head = {"schema": results.SCHEMA, "provenance": {"heart": "1"}, "conventions": {"psnr": "usual"}}
    return [{**head, "rows": [row, {**row, **more}, {**row, **more, "seed": 1}]}]


def _use_results(value: Any, folder: Path) -> None:
    _written(value, folder, results.FILE)
    found = results.load(folder)
    summary = tables.summarise(found)
    _can_be_shown(tables.markdown(summary, found))
    _can_be_shown(tables.text_table(summary, found["conventions"]))


def _stats() -> dict[str, Any]:
    """What the report reads of a statistics file: one record of two layers, three steps and two heads."""
    numbers = [[[None, None], [0.5, 0.4], [0.5, 0.3]], [[None, None], [None, None], [0.2, 0.1]]]
    dense = [[True, False, False], [True, True, False]]
    record = {
        "transformer": 0,
        "branch": "cond",
        "density": numbers,
        "refreshed": numbers,
        "drift": numbers,
        "dense": dense,
    }
    return {"config": _configs()[0], "records": [record], "kernels": {"cpu": 3}}


def _use_stats(value: Any, folder: Path) -> None:
    """A statistics file beside good results."""
    (folder / "stats").mkdir(exist_ok=True)
    _written(value, folder / "stats")
    _sections(_rows()[0], folder)


def _use_projection(value: Any, folder: Path) -> None:
    path = _written(value, folder)
    found = projection.from_results(path, [projection.MODELS["wan2.1-1.3b"]], [projection.DEVICES["a800"]])
    _can_be_shown(projection.table(found))


def _use_compared(value: Any, folder: Path) -> None:
    """A record of a comparison that is damaged counts as absent."""
    (folder / "records").mkdir(exist_ok=True)
    assert isinstance(run._load_record(_written(value, folder / "records")), dict | None)


def _use_record(value: Any, folder: Path) -> None:
    """A record of a work folder that is damaged counts as absent."""
    store = Store(folder / "work", {"a": 1})
    path = store.path("r")
    path.parent.mkdir(exist_ok=True)
    _written({**value, "plan": store.hash} if isinstance(value, dict) else value, path.parent, path.name)
    assert store.get("r") in (None, {"x": [1.0, 2]})


def _use_plan(value: Any, folder: Path) -> None:
    _written(value, folder / "planned", "plan.json")
    Store(folder / "planned", {"a": 1, "b": [1, 2]})


def _can_be_shown(text: str) -> None:
    """Nothing in it steers a terminal, and every terminal can encode it."""
    assert text.replace("\n", "").isprintable(), ascii(text)[:100]


def _written(value: Any, folder: Path, name: str = "x.json") -> Path:
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "[" * 100_000
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


_RECORD = {"plan": "?", "name": "r", "sha256": digest({"x": [1.0, 2]}), "value": {"x": [1.0, 2]}}
_PLAN = {"schema": 1, "hash": digest({"a": 1, "b": [1, 2]}), "plan": {"a": 1, "b": [1, 2]}}

KINDS = {
    "config": Kind(_configs(), _use_config),
    "calibration": Kind(_calibrations(), _use_calibration),
    "cost table": Kind([files.read_json(p) for p in cost_model.FOLDER.glob("cpu-*.json")], _use_costs),
    "points": Kind([_configs()[4]["_data"]["points"]["points"]], _use_points),
    "results": Kind(_rows(), _use_results),
    "record": Kind([_RECORD], _use_record),
    "plan": Kind([_PLAN], _use_plan),
    "statistics": Kind([_stats()], _use_stats),
    "projection": Kind(_rows(), _use_projection),
    "compared": Kind([{**_rows()[0]["rows"][1], "bytes": {"videos/a.mp4": 10, "videos/a.mkv": 20}}], _use_compared),
}
