"""A small generation, and a transformer spread over ranks, for tests of several processes."""

import sys
import tempfile

import numpy as np
import tiny_models as tiny
import torch

import heart_attention as heart
from heart_attention.calibration.file import Calibration

STEPS = 6
THRESHOLDS = [[0.5, 0.9, 1.0, 0.7], [0.8, 0.6, 0.95, 0.5]]  # [L, H]


def model():
    return tiny.wan(num_attention_heads=4)


def inputs(step):
    still, moving = tiny.wan_inputs(900.0), tiny.wan_inputs(900.0, seed=1)["hidden_states"]
    shift = [0, 0, 0.01, 0.3, 0.31, 0.9][step]  # some steps drift little, some much
    return {**still, "timestep": torch.tensor([900.0 - step]), "hidden_states": still["hidden_states"] + shift * moving}


def generate(transformer):
    outputs = []
    for step in range(STEPS):
        with tiny.context(transformer, "cond", step):
            outputs.append(tiny.run(transformer, inputs(step)))
    transformer._reset_stateful_cache()
    return torch.stack(outputs)


def parallel(transformer, cp_plan=None, **degrees):
    """diffusers' own way in; it asks for an accelerator's index even on the CPU."""
    from diffusers import ContextParallelConfig

    torch.accelerator.device_count = lambda: 1
    transformer.enable_parallelism(config=ContextParallelConfig(**degrees), cp_plan=cp_plan)
    return transformer


def on_two_ranks(work):
    """Run `work(rank, folder)` in two processes; what each saved as `rank.pt`."""
    method = (
        "fork" if sys.platform == "linux" else "spawn"
    )  # a forked process need not import torch and diffusers again
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (folder,), nprocs=2, start_method=method)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(2)]


def config(**changes):
    given = {
        "backbone": heart.XAttention(stride=4, block=8),
        "thresholds": THRESHOLDS,
        "reuse": heart.TMR(delta=1.3, gate=(0.3, 0.6)),
        "dense_steps": 1,
        "force_sparse": True,
    }
    return heart.HeartConfig(**{**given, **changes})


def calibration():
    """One with these thresholds, in which some heads are measured to be dear and some cheap."""
    candidates = np.unique(THRESHOLDS)
    density = np.array([[0.1, 0.1, 0.9, 0.9], [0.9, 0.1, 0.1, 0.9]])  # [L, H]
    tables = np.broadcast_to(density[..., None], (2, 4, len(candidates)))
    backbone = {"name": "xattention", "stride": 4, "block": 8}
    return Calibration(
        thresholds=np.array(THRESHOLDS), backbone=backbone, candidates=candidates, E=tables, S=1 - tables
    )
