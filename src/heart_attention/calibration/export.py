"""Thresholds out to and in from other tools: ModelOpt's block in a model's config.json, CSV and JSON tables.

The block follows what NVIDIA ModelOpt's `export_sparse_attention_config` writes (NVIDIA/Model-Optimizer,
modelopt/torch/sparsity/attention_sparsity/conversion.py): `{"config_groups": {"group_0": {"sparse_algo",
"targets", …}}, "producer": {"name", "version"}}`, with a fixed `threshold` inside a group where there is no
calibrated formula (its tests/…/test_sparse_attention_export). Ours has a group a layer, `targets` its module
name, `threshold` one number a head. ModelOpt's and TensorRT-LLM's readers look for the algorithm
"softmax_skip" and pass over others, so a block with "xattention" or "svg2" is never mistaken for one of
theirs; their top-level `threshold_scale_factor` (a formula for softmax skipping) has no counterpart here and
is not written.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, backbones
from ..errors import LONGEST, HeartError, named, shown
from ..files import read_bytes, read_json, write_atomic
from .file import LIMIT, Calibration
from .solve import solver

KEY = "sparse_attention_config"
PRODUCER = "heart-attention"
FORMATS = ("modelopt", "csv", "json")


# ---------------------------------------- ModelOpt's block


def layer_names(calibration: Calibration, config: dict[str, Any] | None = None) -> list[str]:
    """Module names of the attention layers, from the class and, for models with two kinds of block, the config."""
    from ..models import FAMILIES

    name = calibration.model["class"] if calibration.model else (config or {}).get("_class_name", "")
    if name not in FAMILIES:
        raise HeartError(f"the attention layers of {name or 'an unknown model'!r} have no known names: give them")
    patterns = [p.replace("\\.", ".") for p in FAMILIES[name].layers]
    first: Any = calibration.layers
    if len(patterns) > 1:
        first = (config or {}).get("num_layers", first if name.startswith("Wan") else None)
        if first is None:
            raise HeartError(f"{name} has two kinds of block: give the transformer's config.json with --config")
    counts = [first, calibration.layers - first]
    if counts[1] < 0:
        raise HeartError(f"the config has {first} layers, more than the calibration's {calibration.layers}")
    return [p.replace(r"\d+", str(i)) for p, n in zip(patterns, counts) for i in range(n)]


def modelopt_block(calibration: Calibration, names: Sequence[str] | None = None) -> dict[str, Any]:
    """The `sparse_attention_config` block: a group a layer, a threshold a head."""
    names = list(names) if names is not None else layer_names(calibration)
    if len(names) != calibration.layers:
        raise HeartError(f"there are {len(names)} layer names for {calibration.layers} layers")
    _refuse_mixed(calibration, "a sparse_attention_config block")
    settings = {k: v for k, v in calibration.backbone.items() if k != "name"}
    groups = {
        f"group_{i}": {
            "sparse_algo": calibration.backbone["name"],
            "targets": [name],
            "threshold": calibration.thresholds[i].tolist(),
            **settings,
        }
        for i, name in enumerate(names)
    }
    return {"config_groups": groups, "producer": {"name": PRODUCER, "version": __version__}}


def write_modelopt(calibration: Calibration, config_json: str | os.PathLike) -> Path:
    """Put the block into a transformer's config.json (made by `save_pretrained`), in place and atomically."""
    config = read_json(config_json)
    if not isinstance(config, dict):
        raise HeartError(f"{config_json} is no model config: it must be a JSON object")
    mine = calibration.model["class"] if calibration.model else None
    if mine and config.get("_class_name") not in (None, mine):
        raise HeartError(f"{config_json} is of a {config['_class_name']}, the calibration of a {mine}")
    config[KEY] = modelopt_block(calibration, layer_names(calibration, config))
    return write_atomic(config_json, json.dumps(config, indent=2, allow_nan=False) + "\n")


def from_modelopt(block: Any) -> Calibration:
    """Thresholds back from a block that `modelopt_block` made."""
    groups = block.get("config_groups") if isinstance(block, dict) else None
    if not isinstance(groups, dict) or not groups or not all(isinstance(g, dict) for g in groups.values()):
        raise HeartError(f"the {KEY} block has no config_groups")
    algos = [g.get("sparse_algo") for g in groups.values()]
    if not all(isinstance(algo, str) for algo in algos):
        raise HeartError(f"the {KEY} block has a group whose sparse_algo is no backbone's name: export it again")
    name, *others = dict.fromkeys(algos)
    if others:
        raise HeartError(
            f"the {KEY} block has groups of {shown(name)} and {shown(others[0])}: HEART reads blocks of one backbone"
        )
    backbones.from_dict({"name": name})  # an unknown name is refused
    try:
        ordered = [groups[f"group_{i}"] for i in range(len(groups))]
    except KeyError as error:
        raise HeartError(f"the {KEY} block lacks {error.args[0]!r}") from None
    rest = {k: v for k, v in ordered[0].items() if k not in ("sparse_algo", "targets", "threshold")}
    return Calibration(
        thresholds=[g.get("threshold") for g in ordered],
        backbone={"name": name, **rest},
        method="imported",
        extra={"imported": {"format": "modelopt", "layers": [str(g.get("targets")) for g in ordered]}},
    )


# ---------------------------------------- tables


def thresholds_json(calibration: Calibration) -> str:
    """The thresholds alone, {"thresholds": [[τ, …], …]}."""
    _refuse_mixed(calibration, "a table of thresholds")
    return json.dumps({"thresholds": calibration.thresholds.tolist()}) + "\n"


def _refuse_mixed(calibration: Calibration, form: str) -> None:
    if not calibration.simple:
        raise HeartError(
            f"this calibration has operating points of several kinds or phases, which {form} cannot hold: export csv"
        )


def to_csv(calibration: Calibration) -> str:
    """A row a head, `layer,head,threshold`; with tables a row a candidate, `…,error,sparsity,chosen`.

    Points of several kinds or phases are told in further columns in front: phase, backbone, order, rest.
    """
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    tables, simple = calibration.E is not None, calibration.simple
    write(
        [
            *([] if simple else ["phase", "backbone", "order", "rest"]),
            *["layer", "head", "threshold"],
            *(["error", "sparsity", "chosen"] if tables else []),
        ]
    )
    for place in np.ndindex(*calibration.choice.shape):
        chosen = int(calibration.choice[place])
        for k in range(len(calibration.points)) if tables else [chosen]:
            point, (*phase, layer, head) = calibration.points[k], place
            kind = (
                []
                if simple
                else [*(phase or [0]), point["backbone"]["name"], _order_at(point, layer, head), point["rest"]]
            )
            figures = [repr(float(table[place][k])) for table in (calibration.E, calibration.S)] if tables else []
            last = [int(k == chosen)] if tables else []
            write([*kind, layer, head, repr(point["threshold"]), *figures, *last])
    return out.getvalue()


def _order_at(point: dict[str, Any], layer: int, head: int) -> str:
    order = point["order"]
    return order if isinstance(order, str) else order[layer][head]


def read_table(path: str | os.PathLike, backbone: dict[str, Any], budget: Any = "shared=0.9") -> Calibration:
    """A per-head table from CSV or JSON, or a config.json with a block of ours.

    CSV: rows `layer,head,threshold` under a header; or bare numbers, a row a layer. With the columns error
    and sparsity and several rows a head it is a measured table, solved for `budget` unless a column `chosen`
    says which. JSON: [[τ, …], …], {"thresholds": [[…]]}, or a list of records with the same names as the
    columns.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".json":
            return _from_json(read_json(path, LIMIT), backbone, budget)
        return _from_csv(read_bytes(path, LIMIT).decode(), backbone, budget)
    except UnicodeDecodeError:
        raise HeartError(f"{named(path)} is not a text file: give CSV or JSON") from None
    except HeartError as error:
        raise error if named(path) in str(error) else HeartError(f"{named(path)}: {error}"[:LONGEST]) from None


def _from_json(data: Any, backbone: dict[str, Any], budget: Any) -> Calibration:
    if isinstance(data, dict) and KEY in data:
        return from_modelopt(data[KEY])
    if isinstance(data, dict) and "config_groups" in data:
        return from_modelopt(data)
    if isinstance(data, dict) and "thresholds" in data:
        data = data["thresholds"]
    if isinstance(data, list) and data and all(isinstance(row, dict) for row in data):
        return _from_records(data, backbone, budget)
    return Calibration(thresholds=data, backbone=backbone, extra={"imported": {"format": "json"}})


def _from_csv(text: str, backbone: dict[str, Any], budget: Any) -> Calibration:
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=None)) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise HeartError(f"this is no CSV ({error})") from None
    if not rows:
        raise HeartError("the table is empty")
    if any(re.search(r"[a-df-z]", cell.lower()) for cell in rows[0]):  # a header ("e" may be an exponent)
        names = [cell.strip().lower() for cell in rows[0]]
        if any(len(row) != len(names) for row in rows[1:]):
            raise HeartError(f"a row of the table does not have {len(names)} cells")
        return _from_records([dict(zip(names, row)) for row in rows[1:]], backbone, budget)
    table = [[_number(cell, "threshold", i) for cell in row] for i, row in enumerate(rows)]
    return Calibration(thresholds=table, backbone=backbone, extra={"imported": {"format": "csv"}})


def _number(value: Any, name: str, row: int) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise HeartError(f"row {row + 1} has {shown(value)} as its {name}, not a number") from None


def _index(value: Any, name: str, row: int) -> int:
    number = _number(value, name, row)
    if not (number.is_integer() and 0 <= number < 100_000):
        raise HeartError(f"row {row + 1} has {shown(value)} as its {name}, not a whole number from 0")
    return int(number)


def _from_records(rows: list[dict[str, Any]], backbone: dict[str, Any], budget: Any) -> Calibration:
    missing = [name for name in ("layer", "head", "threshold") if any(name not in row for row in rows)]
    if missing or not rows:
        raise HeartError(f"the table lacks the column {', '.join(missing) or 'layer'}")
    cells: dict[tuple[int, int], dict[float, dict[str, Any]]] = {}
    for i, row in enumerate(rows):
        key = _index(row["layer"], "layer", i), _index(row["head"], "head", i)
        tau = _number(row["threshold"], "threshold", i)
        if tau in cells.setdefault(key, {}):
            raise HeartError(f"row {i + 1} gives threshold {tau:g} of layer {key[0]}, head {key[1]} a second time")
        cells[key][tau] = {"row": i, **row}
    layers, heads = (1 + max(key[axis] for key in cells) for axis in (0, 1))
    if len(cells) != layers * heads:
        raise HeartError(f"the table has {len(cells)} heads, not all of {layers} layers × {heads} heads")
    measured = all("error" in row and "sparsity" in row for row in rows)
    if not measured:
        return _plain_thresholds(cells, layers, heads, backbone)
    return _measured(cells, layers, heads, backbone, budget)


def _plain_thresholds(cells: dict, layers: int, heads: int, backbone: dict[str, Any]) -> Calibration:
    if any(len(row) > 1 for row in cells.values()):
        raise HeartError("several thresholds for one head need the columns error and sparsity to choose by")
    table = [[next(iter(cells[l, h])) for h in range(heads)] for l in range(layers)]
    return Calibration(thresholds=table, backbone=backbone, extra={"imported": {"format": "rows"}})


def _measured(cells: dict, layers: int, heads: int, backbone: dict[str, Any], budget: Any) -> Calibration:
    candidates = sorted(cells[0, 0])
    if any(sorted(row) != candidates for row in cells.values()):
        raise HeartError("all heads must have the same candidate thresholds")

    def table(name: str) -> np.ndarray:
        values = [
            [[_number(cells[l, h][t][name], name, cells[l, h][t]["row"]) for t in candidates] for h in range(heads)]
            for l in range(layers)
        ]
        return np.array(values)

    E, S = table("error"), table("sparsity")
    extra = {"imported": {"format": "rows"}}
    if all("chosen" in row for one in cells.values() for row in one.values()):
        chosen = table("chosen") != 0
        if (chosen.sum(-1) != 1).any():
            raise HeartError("the column chosen must mark exactly one row of every head")
        thresholds, report = np.array(candidates)[chosen.argmax(-1)], {}
    else:
        result = solver.solve_budget(E, S, candidates, budget)
        thresholds, report = result.thresholds, result.to_dict()
    return Calibration(
        thresholds, backbone, candidates=candidates, E=E, S=S, solver=report, extra=extra, method="imported"
    )
