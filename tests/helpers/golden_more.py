"""The second golden set (SpargeAttn, SVG, SVG-EAR, LiteAttention, PISA): read when HEART_GOLDEN_MORE names its folder."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = os.environ.get("HEART_GOLDEN_MORE")
SHIPPED = Path(__file__).parent.parent / "golden_data" / "more"


def cases(predictor, field="key"):
    """(case, config) of every configuration of a predictor that has the field; without the full set one test is skipped."""
    found = [pytest.param(*pair, id=_id(*pair)) for pair in _pairs(SHIPPED, predictor, field)]
    if not FOLDER:
        skip = pytest.mark.skip(reason="HEART_GOLDEN_MORE is not set")
        return [*found, pytest.param(None, None, marks=skip, id="full set")]
    return found + [pytest.param(*pair, id=_id(*pair)) for pair in _pairs(Path(FOLDER), predictor, field)]


def _pairs(folder, predictor, field):
    if not (folder / "manifest.json").is_file():
        return []
    about = json.loads((folder / "manifest.json").read_text())
    mine = [Case(folder, name, about[name]) for name in about if about[name]["predictor"] == predictor]
    return [(case, config) for case in mine for config in case.about["configs"] if field in config]


def _id(case, config):
    return f"{case.name}-{config['key']}"


class Case:
    """One golden file: `real(key)` is an int8 input as fp32 [1, H, ...], `[key]` anything else as it is."""

    def __init__(self, folder, name, about):
        self.path, self.name, self.about = folder / f"{name}.npz", name, about

    def _read(self, key):
        with np.load(self.path, allow_pickle=False) as file:
            return file[key]

    def __contains__(self, key):
        return key in self.about["keys"]

    def __getitem__(self, key):
        return torch.from_numpy(self._read(key))

    def real(self, key):
        return self[key].float()[None] * 2.0 ** -int(self._read("scale_exp"))

    def bits(self, key, n):
        """A packed token mask, bool [n, n]."""
        return torch.from_numpy(np.unpackbits(self._read(key))[: n * n].reshape(n, n).astype(bool))
