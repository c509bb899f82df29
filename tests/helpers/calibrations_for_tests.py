"""Calibrations of the embedded model that tests make out of the shipped one, without measuring anything."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from heart_attention import Calibration, tiny
from heart_attention.evaluation import methods

JOINT = Path(tiny.path()).parent / "calibrations" / "xattention.heart.json"


def paper_calibration(path) -> str:
    """A file that says it was made by the paper's protocol; its figures are the shipped one's."""
    made = Calibration.load(JOINT)
    keep = [list(made.candidates).index(t) for t in methods.PAPER_CANDIDATES]
    settings = {**made.settings, "strata": "paper", "mean": "plain", "dense_steps": 5}
    paper = replace(
        made, method="probes", candidates=methods.PAPER_CANDIDATES, E=made.E[..., keep], S=made.S[..., keep], bands=None,
        cost=None, points=None, choice=None, thresholds=made.thresholds.clip(0.85, 0.95), settings=settings, shipped=False,
    )  # fmt: skip
    return str(paper.save(path))


def points_calibration(path, phases: int = 2, budget: str = "time=0.5", seed: int = 0) -> str:
    """A file of operating points of several kinds for the embedded model, its tables made up and its choice solved."""
    made, rng = Calibration.load(JOINT), np.random.default_rng(seed)
    svg2 = {"name": "svg2", "q_clusters": 8, "k_clusters": 16, "min_ratio": 0.0}
    kinds = [(made.backbone, "drop", "raster"), (made.backbone, "drop", "tiles"), (svg2, "mean", "raster")]
    points = [
        {"backbone": backbone, "threshold": tau, "rest": rest, "order": order}
        for backbone, rest, order in kinds
        for tau in (0.3, 0.6, 0.9)
    ]
    shape = (phases, made.layers, made.heads, len(points))
    cost = np.tile([0.1, 0.3, 0.6], 3) * rng.uniform(0.5, 1.0, shape)
    E = rng.lognormal(-10, 1, (*shape[:3], 1)) * (1 - cost) ** 3 * rng.lognormal(0, 0.3, shape)
    time = {"kind": "cpu-c", "digest": "made up", "tokens": 4096, "heads": made.heads, "head_dim": 32, "refresh": 0.25,
            "steps": 50, "dense_steps": 5, "scale_clusters": False}  # fmt: skip
    tables = {"E": E, "S": 1 - cost, "cost": cost, "choice": np.zeros(shape[:3], int)}
    tables = tables if phases > 1 else {name: table[0] for name, table in tables.items()}
    sigmas = np.linspace(1, 0, phases + 1)[1:-1].tolist()
    levels = {"sigmas": sigmas, "weights": [1.0] * phases, "steps": list(range(10, 10 + phases))} if phases > 1 else {}
    settings = {"dense_steps": 5, "budget": budget}
    calibration = replace(
        made, thresholds=None, backbone=None, candidates=None, bands=None, points=points, phases=levels, settings=settings,
        verification={}, extra={"time": time}, shipped=False, **tables,
    )  # fmt: skip
    return str(calibration.resolve(budget).save(path))
