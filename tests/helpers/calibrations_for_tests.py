"""Calibrations of the embedded model that tests make out of the shipped one, without measuring anything."""

from dataclasses import replace
from pathlib import Path

from heart_attention import Calibration, tiny
from heart_attention.evaluation import methods

JOINT = Path(tiny.path()).parent / "calibrations" / "xattention.heart.json"


def paper_calibration(path) -> str:
    """A file that says it was made by the paper's protocol; its figures are the shipped one's."""
    made = Calibration.load(JOINT)
    keep = [list(made.candidates).index(t) for t in methods.PAPER_CANDIDATES]
    settings = {**made.settings, "strata": "paper", "mean": "plain"}
    paper = replace(
        made, method="probes", candidates=methods.PAPER_CANDIDATES, E=made.E[..., keep], S=made.S[..., keep], bands=None,
        cost=None, points=None, choice=None, thresholds=made.thresholds.clip(0.85, 0.95), settings=settings, shipped=False,
    )  # fmt: skip
    return str(paper.save(path))
