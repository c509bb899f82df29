"""Compile cuDNN's block-sparse attention to machine code for a GPU that is not there, through our adapter's own call.

The package compiles for the device it finds when it is called. So one process a target answers its questions about the
device, hands over tensors without memory, and stops where the kernel would be launched. By hand, with the extra `cudnn`
installed: `python benchmarks/gpu_libraries.py sm_90a 128 128` (target, block, head size).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

# target, block, head size: what the package takes of the sizes that video models have; but for blocks of 64 on sm_90,
# whose compilation asks the driver about the device
CUDNN = (
    ("sm_90a", 128, 128), ("sm_90a", 128, 64), ("sm_100a", 128, 128), ("sm_100a", 64, 128),
    ("sm_100a", 128, 64), ("sm_120a", 128, 128), ("sm_120a", 64, 128),
)  # fmt: skip
PROCESSORS = {"9": 132, "10": 148, "12": 170}  # streaming multiprocessors of H100, B200, RTX 5090


class Compiled(Exception):
    """The kernel stands; what follows would be its launch."""


def compile_cudnn(tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every case in a process of its own; empty if the package is not installed."""
    from heart_attention.kernels import cudnn

    if not cudnn.installed():
        return []
    rows = []
    for target, block, d in CUDNN:
        with tempfile.TemporaryDirectory() as folder:
            more = {"CUTE_DSL_ARCH": target, "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder}
            command = [sys.executable, "-W", "ignore", __file__, target, str(block), str(d)]
            done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True)
            row = {"target": target, "block": block, "d": d, **_read(Path(folder), done)}
        rows.append(row)
        tell(f"cudnn {target} block {block} D={d}: {row}")
    return rows


def _read(folder: Path, done: subprocess.CompletedProcess) -> dict[str, Any]:
    """Registers and stack of the machine code that the process left, or the last line of its complaint."""
    from gpu_compile import tools

    cubins = list(folder.glob("*.cubin"))
    if done.returncode or not cubins:
        return {"error": (done.stderr.strip().splitlines() or ["nothing was compiled"])[-1][:200]}
    command = [str(tools() / "cuobjdump"), "-res-usage", str(cubins[0])]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return {"registers": registers, "stack": stack, "bytes": cubins[0].stat().st_size, **json.loads(done.stdout)}


def pretend(target: str) -> None:
    """Answer PyTorch's questions about the device as a GPU of that target would."""
    import torch

    number = target.removeprefix("sm_").rstrip("a")
    capability = (int(number[:-1]), int(number[-1]))
    device = types.SimpleNamespace(multi_processor_count=PROCESSORS[number[:-1]], L2_cache_size=50 << 20)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *which: capability
    torch.cuda.get_device_properties = lambda *which: device
    torch.cuda.device = lambda *which: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *which: types.SimpleNamespace(cuda_stream=0)


def compile_one(block: int, d: int, tokens: int = 1280) -> dict[str, Any]:
    """Call our adapter with tensors without memory until the package has compiled its kernel."""
    import cutlass.cute
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from heart_attention.kernels import cudnn
    from heart_attention.kernels.plan import Plan

    compiler, made = cutlass.cute.compile, []

    def compile_and_stop(*args: Any, **options: Any) -> Any:
        made.append(compiler(*args, **options))
        raise Compiled

    cutlass.cute.compile = compile_and_stop
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(Compiled):
        q, k, v = (
            torch.empty(1, tokens, 2, d, dtype=torch.bfloat16, device="cuda:0").transpose(1, 2) for _ in range(3)
        )
        rows = -(-tokens // block)
        counts = torch.ones(1, 2, rows, dtype=torch.int32, device="cuda:0")
        lists = torch.zeros(1, 2, rows, rows, dtype=torch.int32, device="cuda:0")
        extra = {"block": block, "lists": lists, "sizes": None, "empty": False}
        plan = Plan(
            "block", counts, counts, counts, counts, counts, None, None, tokens, tokens, kernel="cudnn", extra=extra
        )
        cudnn.KERNEL._attend(plan, q, k, v, d**-0.5)
    return {"kernels": len(made)}


if __name__ == "__main__":
    pretend(sys.argv[1])
    print(json.dumps(compile_one(int(sys.argv[2]), int(sys.argv[3]))))
