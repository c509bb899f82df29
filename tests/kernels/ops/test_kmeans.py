"""k-means of several heads: the C code against the definition, bit for bit; and how many parallel regions it opens."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heart_attention.kernels.ops import kmeans, native
from heart_attention.masks import Text

torch.set_num_threads(1)
compiled = pytest.mark.skipif(not native.serves(torch.zeros(1, 1)), reason="no compiler")
HELPERS = Path(__file__).parents[2] / "helpers"
# (tokens, width, clusters) of each head: alike, unlike, fewer clusters than a panel, widths that no vector divides
CASES = [
    [(300, 24, 40)] * 4,
    [(1000, 32, 38), (1000, 32, 125), (700, 32, 9)],
    [(50, 33, 50)],
    [(400, 7, 5)] * 2,
    [(500, 128, 60)] * 5,
    [(1, 1, 1)],
]


def heads(sizes, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = [torch.randn(n, 2, d, generator=g)[:, 1].to(dtype) for n, d, _ in sizes]  # rows apart
    return x, [one[torch.randperm(len(one), generator=g)[:c]] for one, (*_, c) in zip(x, sizes)]


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted):
        assert ours.iterations == theirs.iterations
        for name in ("labels", "centroids", "sizes"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@compiled
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sizes", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c_is_the_definition_to_the_bit(sizes, dtype, threads):
    """Labels, centroids, sizes and iterations, whether heads are clustered alone or by all threads together."""
    x, init = heads(sizes, dtype)
    iters = [(i * 7) % 12 + 1 for i in range(len(x))]
    wanted = kmeans.torch_heads(x, init, iters)
    try:
        torch.set_num_threads(threads)
        assert_equal(kmeans.c_heads(x, init, iters), wanted)
    finally:
        torch.set_num_threads(1)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", [Text(0, 20), Text(280, 15, 5), Text(100, 7, 3)])
def test_text_takes_no_part(text, dtype):
    x, init = heads([(300, 24, 30)] * 3, dtype)
    assert_equal(kmeans.c_heads(x, init, 6, text), kmeans.torch_heads(x, init, 6, text))


@compiled
def test_it_stops_where_nothing_moves_and_keeps_empty_clusters():
    x = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    init = torch.tensor([[0.0], [5.0], [99.0]])
    for found in (kmeans.c_heads([x], [init], 50), kmeans.torch_heads([x], [init], 50)):
        assert found[0].iterations == 2 and found[0].sizes.tolist() == [2, 2, 0] and found[0].centroids[2] == 99


@compiled
def test_what_is_not_a_number_never_rests_and_where_it_begins_is_not_written_to():
    x, init = heads([(100, 8, 5)])
    kept = init[0].clone()
    x[0][3, 2] = float("nan")
    assert kmeans.c_heads(x, init, 7)[0].iterations == 7
    assert torch.equal(init[0], kept)


def test_unlike_heads_keep_their_places(monkeypatch):
    """Heads of unlike size in one call give what each gives alone, whoever computes it."""
    x, init = heads(CASES[1])
    alone = [kmeans.lloyd(one, start, 4) for one, start in zip(x, init)]
    assert_equal(kmeans.lloyd_heads(x, init, 4), alone)
    monkeypatch.setattr(native, "reasons_not", lambda *tensors: ["switched off"])
    assert_equal(
        kmeans.lloyd_heads([y.bfloat16() for y in x], init, 4), kmeans.torch_heads([y.bfloat16() for y in x], init, 4)
    )


COUNTED = """
import ctypes, json, os, torch
from heart_attention.backbones import SVG2, XAttention, kmeans
torch.set_num_threads(2)
library = ctypes.CDLL(os.environ["LD_PRELOAD"])
g = torch.Generator().manual_seed(0)
q, k = (torch.randn(1, 600, 4, 32, generator=g).transpose(1, 2) for _ in range(2))
init = [one[:50] for one in q[0]]
svg2 = SVG2(20, 50)
work = {
    "k-means": lambda: kmeans.lloyd_heads([*q[0]], init, 50),
    "one head": lambda: kmeans.lloyd_heads([q[0, 0]], init[:1], 50),
    "both sides": lambda: svg2._cluster_all(q, k, [[(0, h) for h in range(4)]], None, None, (0, "")),
    "xattention": lambda: XAttention(4, 32).predict(q, k, 0.9),
    "svg2": lambda: svg2.predict(q, k, 0.9),
}
told = {}
for name, run in work.items():
    run()
    before = library.heart_regions()
    run()
    told[name] = library.heart_regions() - before
print(json.dumps(told))
"""


@compiled
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="counts libgomp's regions by LD_PRELOAD")
def test_one_parallel_region_however_many_iterations_and_heads(tmp_path):
    """A region is where threads meet, and where a busy neighbour makes all of them wait."""
    counter = tmp_path / "count.so"
    build = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(counter), str(HELPERS / "count_regions.c"), "-ldl"]
    subprocess.run(build, check=True, timeout=60)
    env = {**os.environ, "LD_PRELOAD": str(counter), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", COUNTED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told.pop("svg2") <= 4  # PyTorch multiplies centroids and sorts their mass after the one that clusters
    assert told == {"k-means": 1, "one head": 1, "both sides": 1, "xattention": 1}
