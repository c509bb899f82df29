"""Prediction at full length (N=32,760, D=128) needs no more than 128 MB beyond its inputs and outputs."""

import json
import os
import subprocess
import sys

import pytest

LIMIT = 128e6
# Heads share their numbers, so that inputs are small and a head more would show. The peak is the process's own.
SCRIPT = """
import json, resource, sys, torch
from heart_attention.backbones import SVG2, XAttention
torch.set_num_threads(1)
name, heads, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
backbone = {"xattention": XAttention(), "svg2": SVG2(init_iters=1)}[name]
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
dtype = getattr(torch, sys.argv[4])
q, k = (torch.randn(1, 1, n, 128).to(dtype).expand(1, heads, n, 128) for _ in range(2))
backbone.predict(q[:, :1, :2048], k[:, :1, :2048], 0.9)  # libraries and the compiled kernel come in
before = peak()
mask = backbone.predict(q, k, 0.9)
print(json.dumps({"extra": peak() - before - mask.nbytes, "density": mask.density().mean().item()}))
"""


def extra_bytes(name, heads, dtype="float32", n=32760, **environment):
    command = [sys.executable, "-c", SCRIPT, name, str(heads), str(n), dtype]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                          capture_output=True, text=True, timeout=300, check=True)  # fmt: skip
    return json.loads(done.stdout)["extra"]


@pytest.mark.skipif(os.name == "nt", reason="no resource module")
@pytest.mark.parametrize("name, heads, dtype, environment", [
    ("xattention", 3, "float32", {}),
    ("xattention", 2, "bfloat16", {"HEART_NO_COMPILER": "1"}),
    ("svg2", 1, "bfloat16", {}),
    ("svg2", 1, "float32", {"HEART_NO_COMPILER": "1"}),
])  # fmt: skip
def test_no_more_than_128_mb(name, heads, dtype, environment):
    assert extra_bytes(name, heads, dtype, **environment) <= LIMIT


if __name__ == "__main__":  # the full size, by hand
    for name in ("xattention", "svg2"):
        for dtype in ("float32", "bfloat16"):
            for environment in ({}, {"HEART_NO_COMPILER": "1"}):
                print(name, dtype, environment, f"{extra_bytes(name, 12, dtype, **environment) / 1e6:.0f} MB")
