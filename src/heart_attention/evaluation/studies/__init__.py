"""The paper's observations and ablations, one file each; every study writes numbers, a figure and a paragraph."""

from __future__ import annotations

STUDIES = ("iou", "drift", "timesteps", "response", "frequency", "interactions")
ABLATIONS = ("components", "policy", "delta", "objective")
