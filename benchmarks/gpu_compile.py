"""Compile a Triton kernel for a GPU that is not there, and read from the machine code what it needs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_cases import Case

PRODUCTS = {"HMMA", "HGMMA", "QMMA", "QGMMA", "UTCHMMA", "UTCQMMA"}
SHARED = {"LDS", "LDSM", "STS", "STSM", "LDGSTS", "LDGDEPBAR", "DEPBAR", "UTMALDG", "SYNCS", "BAR"}
SPILL_LIMIT = 64  # bytes a thread
KIB = 1024
# Shared memory a thread block may ask for, bytes (CUDA C++ Programming Guide, compute capabilities; AMD: LDS).
TARGETS = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_120": 99 * KIB,
    "gfx90a": 64 * KIB,
    "gfx942": 64 * KIB,
}
CARDS = {
    "sm_80": "A100, A800",
    "sm_86": "RTX 30, A40",
    "sm_89": "RTX 40, L40S",
    "sm_90": "H100, H20",
    "sm_100": "B200",
    "sm_120": "RTX 50",
    "gfx90a": "MI200",
    "gfx942": "MI300",
}


@dataclass(frozen=True)
class Loop:
    """Instructions that a warp executes for 64 keys in the innermost loop over whole blocks."""

    tensor: float  # products on tensor cores
    shared: float  # shared memory, asynchronous copies and barriers
    other: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.tensor + self.shared + self.other


@dataclass
class Usage:
    """What the machine code of one case needs."""

    kernel: str
    target: str
    d: int
    dtype: str
    tile: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    limit: int
    seconds: float
    loop: Loop | None = None

    @property
    def passes(self) -> bool:
        """Within the limits."""
        return self.spills <= SPILL_LIMIT and self.shared <= self.limit


def compile_case(case: Case, target: str) -> Usage:
    """Compile one case ahead of time and read what it needs."""
    start = time.perf_counter()
    compiled = compiled_case(case, target)
    seconds = round(time.perf_counter() - start, 1)
    constants, launch = {**case.constants, **case.per_target(target)}, case.launch(target)
    registers, spills = _amd_usage(compiled) if target.startswith("gfx") else nvidia_usage(compiled, target)
    tile = " × ".join(str(constants[key]) for key in ("BLOCK_M", "BLOCK_N") if key in constants)
    loop = None
    if case.what == "attention" and case.dtype != "fp32" and not target.startswith("gfx"):
        loop = inner_loop(
            disassembled(compiled), constants["BLOCK_M"] // launch["num_warps"], case.d, constants["BLOCK_N"]
        )
    return Usage(
        case.kernel, target, case.d, case.dtype, tile, launch["num_warps"], launch["num_stages"], registers, spills,
        compiled.metadata.shared, TARGETS[target], seconds, loop,
    )  # fmt: skip


def compiled_case(case: Case, target: str) -> Any:
    """Triton's compiled kernel of one case."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(case.module), case.function)
    found = {**case.constants, **case.per_target(target)}
    constants = {name: value for name, value in found.items() if name in function.arg_names}
    types = {**case.types, **case.types_of(target)}
    signature, aligned = {}, {}
    for i, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name].startswith("*") or re.fullmatch(r"s[a-z][bhn]", name):
            aligned[(i,)] = [["tt.divisibility", 16]]  # what the launcher finds for real tensors: 16-byte alignment
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=aligned)
    return triton.compile(source, target=_gpu_target(GPUTarget, target), options=case.launch(target))


def _gpu_target(make: Any, target: str) -> Any:
    return make("hip", target, 64) if target.startswith("gfx") else make("cuda", int(target[3:]), 32)


def tools() -> Path:
    """Where the Triton wheel keeps NVIDIA's assembler and disassembler."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def nvidia_usage(compiled: Any, target: str) -> tuple[int, int]:
    """Registers a thread and spilled bytes, from the cubin; the assembler is asked again only if a stack is used."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        text = _output([tools() / "cuobjdump", "-res-usage", cubin])
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
        if stack == 0:
            return registers, 0
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        arch = re.search(r"\.target (\w+)", compiled.asm["ptx"]).group(1)
        ptxas = tools() / ("ptxas-blackwell" if int(target[3:]) >= 90 else "ptxas")
        text = _output([ptxas, "-v", f"-arch={arch}", ptx, "-o", os.devnull])
        stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text).groups())
        return registers, max(stores, loads)


def disassembled(compiled: Any) -> str:
    """The machine code of a compiled kernel as text."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        return _output([tools() / "nvdisasm", "-c", cubin])


def inner_loop(text: str, rows: int, d: int, keys: int) -> Loop:
    """Count the first innermost loop with tensor-core products, for 64 keys.

    Args:
        rows: query rows of a warp.
        d: head size.
        keys: keys of a tile, believed where the products do not say their shape (sm_100).
    """
    names, body = _first_product_loop(text)
    shapes = [re.search(r"^H(?:G)?MMA\.(?:\w+\.)*?(?:64x(\d+)x16|16816)", line) for line in body]
    if any(shapes):  # each is 16 × 8 × 16, or a warp's quarter of 64 × n × 16; an unrolled loop takes more keys
        keys = sum(16 * int(m.group(1) or 8) * 16 for m in shapes if m) // (rows * d * 2)
    tensor, shared = (sum(name in kinds for name in names) for kinds in (PRODUCTS, SHARED))
    return Loop(*(round(64 * x / keys, 1) for x in (tensor, shared, len(names) - tensor - shared)))


def _first_product_loop(text: str) -> tuple[list[str], list[str]]:
    """Names and lines of the instructions in the first innermost loop that has products."""
    lines, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(lines)
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?(.*?);", line):
            lines.append(code.group(1).strip())
    names = [line.split()[0].split(".")[0] for line in lines]
    loops = []
    for end, line in enumerate(lines):
        jump = re.search(r"BRA.*?`\((\.L_\w+)\)", line)
        begin = labels.get(jump.group(1), len(lines)) if jump else len(lines)
        if begin <= end and any(name in PRODUCTS for name in names[begin : end + 1]):
            loops.append((begin, end + 1))
    begin, end = next(a for a in sorted(loops) if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops))
    return names[begin:end], lines[begin:end]


def _amd_usage(compiled: Any) -> tuple[int, int]:
    """Vector registers a lane and scratch bytes a lane, from the assembly's metadata."""
    text = compiled.asm["amdgcn"]
    registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text).group(1))
    return registers, int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text).group(1))


def _output(command: list) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
