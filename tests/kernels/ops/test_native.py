"""The C code for prediction: other vector widths, threads, what it serves; and the GPU road in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from heart_attention.backbones import XAttention, kmeans
from heart_attention.kernels.ops import build
from heart_attention.kernels.ops import native as native

torch.set_num_threads(1)
compiled = pytest.mark.skipif(not native.serves(torch.zeros(1, 1)), reason="no compiler")


def inputs(seed, n=300, d=24, heads=2):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, n, heads, d, generator=g).transpose(1, 2) for _ in range(2)]


@compiled
def test_plain_machine(tmp_path, monkeypatch):
    """Built for no more than what every CPU of this kind has, it gives the same."""
    q, k = inputs(0)
    scores, ((labels, *_),) = XAttention(4, 16).scores(q, k), native.kmeans([q[0, 0]], [k[0, 0, :40]], [1])
    monkeypatch.setattr(build, "FLAG_SETS", (("-O0",),))  # no vectors, and built quickly
    monkeypatch.setenv("HEART_CACHE", str(tmp_path))  # another cache folder, so another build
    library = build.load()
    assert str(tmp_path) in library._name
    assert (XAttention(4, 16).scores(q, k) - scores).abs().max() <= 8e-6
    assert torch.equal(native.kmeans([q[0, 0]], [k[0, 0, :40]], [1])[0][0], labels)


@compiled
def test_threads_change_nothing():
    q, k = inputs(1, n=2000)
    try:
        torch.set_num_threads(2)
        two = XAttention(4, 16).scores(q, k), kmeans.lloyd(q[0, 0], k[0, 0, :40], 3)
    finally:
        torch.set_num_threads(1)
    one = XAttention(4, 16).scores(q, k), kmeans.lloyd(q[0, 0], k[0, 0, :40], 3)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1].labels, two[1].labels) and torch.equal(one[1].centroids, two[1].centroids)


def test_what_it_serves(monkeypatch):
    q, _ = inputs(2)
    assert native.serves(q) == native.serves(q.bfloat16())
    assert not native.serves(q.half()) and not native.serves(q.double()) and not native.serves(q.transpose(2, 3))
    assert not native.serves(q, q.bfloat16())
    monkeypatch.setenv("HEART_NO_COMPILER", "1")
    assert not native.serves(q)
    XAttention(4, 16).predict(q, q, 0.5)  # PyTorch serves instead


INTERPRETED = """
import torch
from heart_attention.backbones import XAttention, kmeans
from heart_attention.kernels.ops import scores, triton_predict
torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
q, k = (torch.randn(1, 90, 2, 16, generator=g).transpose(1, 2) for _ in range(2))
order = torch.randperm(90, generator=g)
init = [k[0, h, :7] for h in range(2)]
want = [XAttention(4, 16, pad).scores(q, k, order) for pad in ("block", 64)], kmeans.lloyd_heads([*q[0]], init, 4)
triton_predict.op_reasons = lambda x=None: []  # as on a GPU; the interpreter takes CPU tensors
assert scores.block_scores.choose([*q[0]], [*k[0]], None, 4, 4).name == "triton"
assert scores.block_scores.choose([*q[0]], [*k[0]], None, 4, 3).name != "triton"
for pad, one in zip(("block", 64), want[0]):
    assert (XAttention(4, 16, pad).scores(q, k, order) - one).abs().max() <= 8e-6
assert kmeans.lloyd_heads.choose([*q[0]], init, 4).name == "triton"
for one, other in zip(kmeans.lloyd_heads([*q[0]], init, 4), want[1]):
    assert torch.equal(one.labels, other.labels) and torch.equal(one.sizes, other.sizes)
    assert (one.centroids - other.centroids).abs().max() < 1e-5 and one.iterations == other.iterations
print("agreed")
"""


def test_the_gpu_road_in_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "agreed", done.stderr[-2000:]


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n, d", [(1, 1), (255, 24), (1000, 7)])
def test_token_means(n, d, dtype):
    x = torch.cat(inputs(3, n, d)).to(dtype) + 5  # [2, 2, N, D]: off centre, so that bad summation would show
    assert (native.token_means(x) - x.double().mean(2)).abs().max() < 5e-6
    assert torch.equal(native.token_means(x[:, :, : n // 2 + 1])[1], native.token_means(x[1:, :, : n // 2 + 1])[0])
