"""A calibration of a small Wan model with made-up tables: three layers of two heads, three candidates."""

from __future__ import annotations

import numpy as np

from heart_attention import XAttention
from heart_attention.calibration import file
from heart_attention.calibration.file import Calibration
from heart_attention.calibration.solve import solver

CANDIDATES = (0.85, 0.9, 0.95)
WAN = {
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "ffn_dim": 16,
    "freq_dim": 8,
}


def made(model=None, **changes) -> Calibration:
    rng = np.random.default_rng(0)
    bands = rng.random((3, 2, 3, 4)) * 1e-6
    S = np.sort(rng.random((3, 2, 3)))[..., ::-1]
    E = bands @ np.array((1, 0.5, 0.01, 0.01))
    found = solver.solve(E, S, thresholds=CANDIDATES)
    values = {
        "thresholds": found.thresholds,
        "backbone": XAttention().to_dict(),
        "method": "probes",
        "model": None if model is None else file.fingerprint(model),
        "candidates": CANDIDATES,
        "E": E,
        "S": S,
        "bands": bands,
        "error": {"name": "spectral", "weights": [1, 0.5, 0.01, 0.01]},
        "solver": found.to_dict(),
        "verification": {"held_out": {"shared": {"error": 2e-3}, "chosen": {"error": 1e-3}}},
        "height": 480,
        "width": 832,
        "frames": 81,
        "steps": 50,
        "scheduler": "UniPCMultistepScheduler",
        "prompts": {"count": 2, "hash": file.prompts_hash(["a", "b"])},
        "seed": 7,
        "versions": file.versions(),
        "settings": {"strata": "paper", "guidance_scale": 5.0},
    }
    return Calibration(**{**values, **changes})
