"""Dense or sparse is decided once for a layer over all its ranks: nothing hangs, and all is as on one process.

None of these runs forces sparse attention. A rank that waits for another in vain fails after `PATIENCE` seconds.
"""

import datetime
import time
import types

import pytest
import tiny_models as tiny
import torch
from models_in_parallel import generate, on_two_ranks, parallel

import heart_attention as heart
from heart_attention import backbones
from heart_attention.models.attachment import attach
from heart_attention.online.cost_model import Costs, CostTable, Line
from heart_attention.online.engine import Engine
from heart_attention.online.points import Point, PointTable

PATIENCE = 60
HEADS = 3  # on two ranks: two and one
FREE = Line(0.0, 0.0)


def table(fixed=0.0, kernel=1.0):
    """Costs in units of dense attention over one token pair; a head of the tiny model has 16,384."""
    costs = Costs(Line(0.0, 1.0), Line(fixed, kernel), prediction=FREE, drift=FREE, first=FREE, means=FREE)
    return CostTable("made up", "a test", 0.0, {"block": {16: costs}, "cluster": {16: costs}})


POINTS = (
    Point(heart.XAttention(stride=4, block=8), 0.5),
    Point(backbones.by_name("lite", tile_q=8, tile_k=8), 0.5),
    Point(heart.XAttention(stride=4, block=8), 0.8),
)
ONE_LEARNS = PointTable(POINTS, [[[[1, 1, 0]] * 2]])  # what rank 0 has learns from attention, what rank 1 has does not
# At half the noise one rank's heads change, the other's stay: in layer 0 of rank 1, in layer 1 of rank 0.
ONE_CHANGES = PointTable(POINTS, [[[[0, 0, 0], [0, 0, 0]], [[0, 0, 2], [2, 0, 0]]]], (0.5,))
NOISE = [0.9, 0.8, 0.7, 0.4, 0.3, 0.2]  # of each step
SCHEDULE = types.SimpleNamespace(
    timesteps=1000 * torch.tensor(NOISE), config=types.SimpleNamespace(num_train_timesteps=1000)
)

# name: thresholds [L, H] or points, the cost table of each rank (a lone process has the first), seconds that rank 1 is late
CASES = {
    "sparse pays for three heads but not for one": ([[0.5] * 3] * 2, [table(14_000)] * 2, 0.0),
    "no rank can be quicker": ([[0.5] * 3] * 2, [table(kernel=9.0)] * 2, 0.0),
    "masks of one rank keep too much": ([[0.99, 0.99, 0.1], [0.99, 0.99, 0.99]], [table(kernel=1.1)] * 2, 0.0),
    "a rank whose heads are all dense": ([[1.0, 1.0, 0.5], [0.5, 0.5, 1.0]], [table()] * 2, 0.0),
    "one rank has a backbone that learns": (ONE_LEARNS, [table()] * 2, 0.0),
    "a phase changes the heads of one rank": (ONE_CHANGES, [table()] * 2, 0.0),
    "a rank that is late": ([[0.5] * 3] * 2, [table(14_000)] * 2, 0.2),
    "one rank's table says no": ([[0.5] * 3] * 2, [table(kernel=9.0), table()], 0.0),
    "the other rank's table says no": ([[0.5] * 3] * 2, [table(), table(kernel=9.0)], 0.0),
}


def config(chosen):
    given = {"points": chosen} if isinstance(chosen, PointTable) else {"thresholds": chosen}
    backbone, reuse = heart.XAttention(stride=4, block=8), heart.TMR(delta=1.3, gate=(0.3, 0.6))
    return heart.HeartConfig(backbone, reuse=reuse, dense_steps=1, **given)


def run(name, rank=None):
    """Outputs, and for each (layer, step) why it ran dense ("" for sparse), on one process or on a rank of two."""
    chosen, tables, late = CASES[name]
    handler = Engine(config(chosen), layers=2, heads=HEADS, costs=tables[rank or 0])
    attach(model := tiny.wan(num_attention_heads=HEADS), handler, SCHEDULE)
    if rank is not None:
        parallel(model, ulysses_degree=2, ulysses_anything=True)
    if rank and late:
        model.register_forward_pre_hook(lambda *_: time.sleep(late))
    return generate(model), {(row.layer, row.step): row.reason for row in handler.recorder.rows}


def work(rank, folder):
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=PATIENCE)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=patience
    )
    torch.save({name: run(name, rank) for name in CASES}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results():
    return on_two_ranks(work)


@pytest.mark.parametrize("name", [name for name in CASES if "table" not in name])
def test_ranks_decide_as_one_process_does(results, name):
    expected, reasons = run(name)
    for outputs, theirs in (found[name] for found in results):
        assert torch.allclose(outputs, expected, atol=1e-5)
        alone = "every threshold is 1"  # of the heads on that rank: they are dense in a sparse layer too
        assert {k: v for k, v in theirs.items() if v != alone} == {k: reasons[k] for k in theirs if theirs[k] != alone}
        assert all(reasons[k] in ("", alone) for k, v in theirs.items() if v == alone)


@pytest.mark.parametrize("name", [name for name in CASES if "table" in name])
def test_ranks_with_different_costs_agree_on_dense(results, name):
    for outputs, reasons in (found[name] for found in results):
        assert all(reasons.values())
        assert torch.allclose(outputs, generate(tiny.wan(num_attention_heads=HEADS)), atol=1e-6)


def test_the_cases_are_what_they_say(results):
    """Sparse, dense, and both in one generation, so that agreement means something."""
    kinds = {name: {bool(reason) for (_, step), reason in run(name)[1].items() if step} for name in CASES}
    assert kinds["sparse pays for three heads but not for one"] == {False}
    assert kinds["no rank can be quicker"] == {True}
    assert kinds["masks of one rank keep too much"] == {False, True}
