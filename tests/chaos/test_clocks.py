"""Clocks that jump to and fro: the same decisions, the same bits, the same files; only times differ."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import heart_attention as heart
from heart_attention import tiny
from heart_attention.calibration.workflow import calibrate

pytestmark = pytest.mark.slow
JUMPS = (86400.0, -86400.0, 0.001, -3600.0, 1e9, -1e9)  # seconds


def jumping(real, jumps):
    """A clock that leaps to and fro at every reading."""
    return lambda: real() + next(jumps)


@pytest.fixture
def broken_clocks(monkeypatch):
    """Switches on clocks that run backwards and forwards."""

    def switch_on():
        for name in ("time", "monotonic", "perf_counter"):
            monkeypatch.setattr(time, name, jumping(getattr(time, name), itertools.cycle(JUMPS)))

    return switch_on


@pytest.mark.parametrize("backbone", [heart.XAttention(8, 64), heart.SVG2(16, 32)])
@pytest.mark.parametrize("force_sparse", [False, True])
def test_clocks_that_jump_change_no_decision(broken_clocks, backbone, force_sparse):
    pipe = tiny.load()
    config = heart.HeartConfig(backbone, 0.8, heart.TMR(relative=0.2), dense_steps=1, force_sparse=force_sparse)
    call = {**tiny.QUICK, "num_inference_steps": 4, "output_type": "latent"}

    def generate():
        with heart.enabled(pipe, config):
            latents = pipe("a red ball", generator=torch.Generator().manual_seed(1), **call).frames
            stats = heart.stats(pipe)
            return latents, stats["dense_reasons"], stats["density"], stats["refresh_rate"]

    usual = generate()
    broken_clocks()
    odd = generate()
    assert torch.equal(usual[0], odd[0]) and usual[1:] == odd[1:]


def test_clocks_that_jump_change_no_calibration(broken_clocks, tmp_path):
    """Neither the file nor what is on disk, also when a run goes on that another began; leftovers in use stay."""
    import killed_runs
    from models_for_tests import wan_pipe

    pipe, settings = wan_pipe(layers=2), killed_runs.settings("probes")
    alone = calibrate.run(pipe, settings, tmp_path / "alone").to_bytes()
    kept = {p.name for p in (tmp_path / "alone").rglob("*.json")}
    broken_clocks()
    assert calibrate.run(pipe, settings, tmp_path / "odd").to_bytes() == alone
    assert {p.name for p in (tmp_path / "odd").rglob("*.json")} == kept
    assert calibrate.run(pipe, settings, tmp_path / "odd").to_bytes() == alone
