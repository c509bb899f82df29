"""How often a sparse call waits for the GPU, counted on a pretended one: once for TMR's decision, never without drift."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import OnGpu, fake_gpu

from heart_attention.backbones import SVG2, XAttention
from heart_attention.config import HeartConfig
from heart_attention.kernels import flashinfer, triton_attention
from heart_attention.kernels.triton_attention import KERNEL
from heart_attention.masks import BlockMask, ClusterMask
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine
from heart_attention.online.reuse import TMR, Interval, Warmup

pytest.importorskip("triton", reason="the kernels that stubs stand for are not here")

BLOCKS = XAttention(stride=4, block=16)
CLUSTERS = SVG2(4, 6, init_iters=2)
RANKED = SVG2(4, 6, init_iters=2, rank="error")
GROUPS = SVG2(4, 6, init_iters=2, rank="error", equal_groups=16)
H, N, D, STEPS = 4, 96, 16, 6


def counts(backbone, reuse, rest="drop", tau=0.6):
    """Read-backs, launches and whether any and all heads refreshed, of each of a few successive calls."""
    found = []
    with fake_gpu() as gpu:
        config = HeartConfig(backbone, tau, reuse, dense_steps=0, force_sparse=True, rest=rest, kernel="triton")
        engine = Engine(config, 1, H)
        g = torch.Generator().manual_seed(0)
        for step in range(STEPS):
            q, k, v = (OnGpu(torch.randn(1, H, N, D, generator=g).bfloat16()) for _ in range(3))
            gpu.clear()
            engine.attend(
                CallContext(layer=0, layers=1, step=step, branch="c"), q, k, v, F.scaled_dot_product_attention
            )
            found.append((list(gpu.reads), gpu.launches))
        record = engine.stats(wait=True).to_dict()["records"][0]
    refreshed = [sum(step) for step in record["refreshed"][0]] if record["refreshed"] else []
    return found, refreshed


TMRS = [TMR(delta=1e9), TMR(delta=-1.0), TMR(relative=1e9), TMR(relative=0.0, gate=(0.0, 1.0))]


@pytest.mark.parametrize("reuse", TMRS)
def test_tmr_waits_once_for_its_decision(reuse):
    found, _ = counts(BLOCKS, reuse)
    assert not found[0][0], "the first call has nothing to decide"
    assert all(len(reads) == 1 for reads, _ in found[1:]), found


@pytest.mark.parametrize("reuse", [Interval(2), Interval(1), Warmup(2)])
@pytest.mark.parametrize("rest", ["drop", "mean"])
def test_without_drift_nothing_is_waited_for(reuse, rest):
    found, _ = counts(BLOCKS, reuse, rest)
    assert not any(reads for reads, _ in found), found


@pytest.mark.parametrize("backbone, rest, tau", [(CLUSTERS, "drop", 0.6), (RANKED, "mean", 0.1)])
@pytest.mark.parametrize("reuse", TMRS)
def test_clusters_wait_for_the_decision_alone(backbone, rest, tau, reuse):
    """A map ranked anew at each call is planned without a question: the list of runs has room for the most."""
    found, _ = counts(backbone, reuse, rest, tau)
    assert [len(reads) for reads, _ in found] == [0] + [1] * (STEPS - 1), found
    found, _ = counts(backbone, Interval(3), rest, tau)
    assert not any(reads for reads, _ in found), found


@pytest.mark.parametrize(
    "backbone, rest, tau",
    [
        (BLOCKS, "drop", 0.6),
        (BLOCKS, "mean", 0.6),
        (CLUSTERS, "drop", 0.6),
        (RANKED, "mean", 0.1),
        (GROUPS, "mean", 0.1),
    ],
)
@pytest.mark.parametrize("reuse", TMRS)
def test_a_decision_on_the_device_is_not_waited_for(backbone, rest, tau, reuse):
    found, _ = counts(backbone, replace(reuse, decide="device"), rest, tau)
    assert not any(reads for reads, _ in found), found


def test_a_list_of_runs_too_long_for_the_memory_is_counted_first(monkeypatch):
    monkeypatch.setattr(triton_attention, "RUN_BYTES", 64)
    found, _ = counts(CLUSTERS, Interval(3))
    assert [len(reads) for reads, _ in found] == [1, 0, 0, 1, 0, 0]
    assert {place.partition(":")[0] for reads, _ in found for _, place in reads} == {"kernels/triton_attention.py"}


@pytest.mark.parametrize("reuse", TMRS)
def test_clusters_in_equal_groups_wait_for_the_decision_alone(reuse):
    """Blocks have a bound, so ranking by error with the rest approximated needs nothing but TMR's decision."""
    found, _ = counts(GROUPS, reuse, "mean", 0.1)
    assert [len(reads) for reads, _ in found] == [0] + [1] * (STEPS - 1)
    found, _ = counts(GROUPS, Interval(3), "mean", 0.1)
    assert not any(reads for reads, _ in found), found


@pytest.mark.parametrize("mask", ["blocks", "shared"])
def test_flashinfer_is_chosen_and_planned_without_a_question(mask):
    """Its own planning waits, but only where it serves."""
    with fake_gpu() as gpu:
        one = torch.eye(6, dtype=torch.bool).expand(1, 1, 6, 6)
        flags = OnGpu(one.clone()).expand(1, 3, 6, 6) if mask == "shared" else OnGpu(one.repeat(1, 3, 1, 1))
        made = BlockMask(flags, 16, N, N)
        gpu.clear()
        with mock.patch.object(torch.cuda, "mem_get_info", lambda *a: (1 << 30, 1 << 30)):
            flashinfer.KERNEL.reasons_not(made, rest="mean")
            assert flashinfer.KERNEL.plan(made).extra["shared"] is (mask == "shared")
        assert not gpu.reads, gpu.reads


def test_a_reused_mask_costs_few_launches():
    found, _ = counts(BLOCKS, Interval(STEPS + 1))
    assert all(launches <= 3 for _, launches in found[1:]), [launches for _, launches in found]
    found, _ = counts(BLOCKS, TMR(delta=1e9))
    assert all(launches <= 20 for _, launches in found[1:]), [launches for _, launches in found]


@pytest.mark.parametrize("rest", ["drop", "mean"])
def test_statistics_of_a_gpu_arrive_late_but_whole(rest):
    with fake_gpu():
        config = HeartConfig(BLOCKS, 0.6, Interval(2), dense_steps=0, force_sparse=True, kernel="triton", rest=rest)
        engine = Engine(config, 1, H)
        q, k, v = (OnGpu(torch.randn(1, H, N, D).bfloat16()) for _ in range(3))
        for step in range(3):
            engine.attend(
                CallContext(layer=0, layers=1, step=step, branch="c"), q, k, v, F.scaled_dot_product_attention
            )
        stats = engine.stats(wait=True).to_dict()
        assert stats["calls"] == 3 and 0 < stats["density"] < 1
        mass = stats["records"][0]["rest_mass"][0]
        told = [value is not None for step in mass for value in step]
        assert len(told) == 3 * H and all(told) == any(told) == (rest == "mean")
        engine.reset()
        assert engine.stats().to_dict()["calls"] == 3


@pytest.mark.parametrize("kind", ["block", "cluster"])
@pytest.mark.parametrize("rest", ["drop", "mean"])
def test_plans_with_room_list_the_same(kind, rest):
    g = torch.Generator().manual_seed(1)
    flags = torch.rand(1, 3, 6, 6, generator=g) < 0.4
    flags[..., 0] = True
    labels = torch.randint(0, 5, (1, 3, N), generator=g).to(torch.int16)  # the sixth cluster is empty
    want = KERNEL.plan(BlockMask(flags, 16, N, N) if kind == "block" else ClusterMask(flags, labels, labels), rest)
    with fake_gpu():
        there, named = OnGpu(flags), OnGpu(labels)
        mask = BlockMask(there, 16, N, N) if kind == "block" else ClusterMask(there, named, named)
        plan = KERNEL.plan(mask, rest)
    kept = int(want.counts.sum())
    assert torch.equal(plan.cols.inner[:kept], want.cols)
    work, rows = plan.extra[f"work{plan.extra['rows']}"].inner, plan.extra["rows"]
    got, expected = _sorted(work[work[:, 1] < work[:, 2]]), _sorted(want.extra[f"work{rows}"])
    told = 3 if kind == "cluster" else 7  # runs are listed by a kernel, and kernels are stubs here
    assert torch.equal(got[:, :told], expected[:, :told])


def _sorted(work):
    """Tiles in the order of their heads and queries."""
    return work[(work[:, 0].long() * N + work[:, 1]).argsort()]
