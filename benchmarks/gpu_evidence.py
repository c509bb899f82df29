"""What can be proven about the GPU kernels without a GPU; `make gpu-evidence` writes it to docs/gpu-evidence.md.

1. Every Triton kernel runs in Triton's interpreter, fp32, and is compared with the definition.
2. Every Triton kernel is compiled ahead of time for each target with the launch figures that the package would use
   there; registers, spills and shared memory are read from the machine code. Spills over 64 bytes a thread or shared
   memory over the target's limit fail (exit code 1).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Case:
    """One kernel to compile: its arguments' types, constants and launch figures for a target."""

    kernel: str
    what: str
    function: str
    d: int
    dtype: str
    types: dict[str, str]
    constants: dict[str, Any]
    launch: Callable[[str], dict[str, Any]]  # target -> num_warps, num_stages and other options
    per_target: Callable[[str], dict[str, Any]] = lambda target: {}  # constants that depend on the target


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

    @property
    def passes(self) -> bool:
        """Within the limits."""
        return self.spills <= SPILL_LIMIT and self.shared <= self.limit


def cases(sizes: tuple[int, ...] = (64, 128)) -> Iterator[Case]:
    """Every kernel, bf16 inputs, at the head sizes that video models have; at 128 attention and scores in fp32 too."""
    for d in sizes:
        for name, block, gathered in (
            ("blocks", 128, False),
            ("blocks, token order", 128, True),
            ("clusters", 0, True),
        ):
            yield attention_case(d, "bf16", name, block, gathered)
        yield attention_case(d, "bf16", "blocks of 64", 64, False)
        yield attention_case(d, "bf16", "blocks, log-sums", 128, False, sums=True)
        yield attention_case(d, "bf16", "clusters, log-sums", 0, True, sums=True)
        if d == 128:
            yield attention_case(d, "fp32", "blocks", 128, False)
        yield from prediction_cases(d)


def attention_case(d: int, dtype: str, name: str, block: int, gathered: bool, sums: bool = False) -> Case:
    """Attention over equal blocks (block > 0) or clusters; `sums`: with log-sums, as calibration runs it."""
    from heart_attention.kernels import triton_attention as attention

    def config(target: str) -> attention.Config:
        rows = attention.tile_rows(block or 109)  # 300 clusters over the 32,760 tokens of Wan2.1 at 480p
        return attention.config_for(target, d, 4 if dtype == "fp32" else 2, rows, gathered)

    pointers = {f"{x}_ptr": f"*{dtype}" for x in ("q", "k", "v")} | {"out_ptr": "*fp32" if sums else f"*{dtype}"}
    pointers["lse_ptr"] = "*fp32" if sums else "*i32"
    lists = {f"{x}_ptr": "*i32" for x in ("work", "list", "q_perm", "k_perm")}
    return Case(
        f"attention, {name}", "attention", "attention", d, dtype, {**pointers, **lists, "scale_log2": "fp32"},
        {"D": d, "D_PAD": d, "BLOCK": block, "RUN": attention.RUN, "PERM": gathered, "LSE": sums,
         "PRECISION": attention.PRECISION},
        lambda target: attention.launch_options(config(target).warps, config(target).stages),
        lambda target: {"BLOCK_M": config(target).block_m, "BLOCK_N": config(target).block_n},
    )  # fmt: skip


def prediction_cases(d: int) -> Iterator[Case]:
    """XAttention scoring, k-means and pooling, bf16 tokens."""
    from heart_attention.kernels.ops import triton_predict as predict

    def case(
        name: str,
        function: str,
        types: dict,
        constants: dict,
        launch: dict,
        per_target: Any = None,
        dtype: str = "bf16",
    ) -> Case:
        floats = dict.fromkeys(("sum_ptr", "top_ptr", "c_ptr", "norm_ptr", "out_ptr"), "*fp32")
        ints = dict.fromkeys(("perm_ptr", "label_ptr", "start_ptr"), "*i32")
        return Case(
            name, "prediction", function, d, dtype, {**floats, **ints, **_tokens(dtype), **types}, constants,
            lambda target: launch, per_target or (lambda target: {}),
        )  # fmt: skip

    def precise(target: str) -> dict[str, str]:
        return {"PRECISION": "tf32x3" if target.startswith("sm_") else "ieee"}

    tile_m, tile_n = predict.SCORE_TILE
    head = {"D": d, "D_PAD": d}
    for dtype, size in (("bf16", 2), ("fp32", 4))[: 2 if d == 128 else 1]:
        yield case(
            "XAttention scores, tiles", "antidiagonal_sums", {"scale_log2": "fp32"} | _tokens(dtype),
            {"D": d, "D_STEP": predict.feature_step(size), "STRIDE": 16, "GROUPS": 8, "PERM": False,
             "BLOCK_M": tile_m, "BLOCK_N": tile_n},
            predict.score_launch(size), precise, dtype,
        )  # fmt: skip
    if d == 128:
        yield case(
            "XAttention scores, blocks", "antidiagonal_blocks", {}, {"GROUPS": 8, "PER_TILE": tile_n // 8, "BLOCK_N": 128},
            predict.reduce_launch(),
        )  # fmt: skip
    yield case(
        "k-means, assignment", "nearest_centroid", {"c_ptr": "*bf16"},
        {"D": d, "D_STEP": predict.feature_step(2), "PARTS": 2,
         "BLOCK_M": predict.ASSIGN_TILE[0], "BLOCK_N": predict.ASSIGN_TILE[1]},
        predict.assign_launch(), precise,
    )  # fmt: skip
    rows = {**head, "BLOCK_M": predict.SUM_ROWS}
    yield case("k-means, means", "cluster_means", {}, rows, predict.reduce_launch())
    yield case("pooled drift, token sums", "pooled_sums", {}, rows, predict.reduce_launch())


def _tokens(dtype: str) -> dict[str, str]:
    return dict.fromkeys(("q_ptr", "k_ptr", "x_ptr"), f"*{dtype}")


def compile_case(case: Case, target: str) -> Usage:
    """Compile one case ahead of time and read what it needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from heart_attention.kernels import triton_code

    function = getattr(triton_code, case.function)
    constants, launch = {**case.constants, **case.per_target(target)}, case.launch(target)
    signature, aligned = {}, {}
    for i, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name in constants else case.types.get(name, "i32")
        if signature[name].startswith("*") or re.fullmatch(r"s[a-z][bhn]", name):
            aligned[(i,)] = [["tt.divisibility", 16]]  # what the launcher finds for real tensors: 16-byte alignment
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=aligned)
    start = time.perf_counter()
    compiled = triton.compile(source, target=_gpu_target(GPUTarget, target), options=launch)
    registers, spills = _amd_usage(compiled) if target.startswith("gfx") else _nvidia_usage(compiled, target)
    tile = " × ".join(str(constants[key]) for key in ("BLOCK_M", "BLOCK_N") if key in constants)
    return Usage(
        case.kernel, target, case.d, case.dtype, tile, launch["num_warps"], launch["num_stages"], registers, spills,
        compiled.metadata.shared, TARGETS[target], round(time.perf_counter() - start, 1),
    )  # fmt: skip


def _gpu_target(make: Any, target: str) -> Any:
    return make("hip", target, 64) if target.startswith("gfx") else make("cuda", int(target[3:]), 32)


def _nvidia_usage(compiled: Any, target: str) -> tuple[int, int]:
    """Registers a thread and spilled bytes, from the cubin; the assembler is asked again only if a stack is used."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        text = _output([tools / "cuobjdump", "-res-usage", cubin])
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
        if stack == 0:
            return registers, 0
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        arch = re.search(r"\.target (\w+)", compiled.asm["ptx"]).group(1)
        ptxas = tools / ("ptxas-blackwell" if int(target[3:]) >= 100 else "ptxas")
        text = _output([ptxas, "-v", f"-arch={arch}", ptx, "-o", os.devnull])
        stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text).groups())
        return registers, max(stores, loads)


def _amd_usage(compiled: Any) -> tuple[int, int]:
    """Vector registers a lane and scratch bytes a lane, from the assembly's metadata."""
    text = compiled.asm["amdgcn"]
    registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text).group(1))
    return registers, int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text).group(1))


def _output(command: list) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def compile_all(targets: list[str], tell: Callable[[str], None]) -> tuple[list[Usage], list[str]]:
    """All cases for all targets; what could not be compiled comes back as sentences."""
    found, failed = [], []
    for target in targets:
        for case in cases():
            try:
                found.append(compile_case(case, target))
                u = found[-1]
                tell(f"{target} {u.kernel} D={u.d} {u.dtype}: {u.registers} registers, {u.spills} B spilled, "
                     f"{u.shared / KIB:.0f} KiB shared, {u.seconds} s")  # fmt: skip
            except Exception as error:  # a compiler can fail in any way; the run must go on and report it
                failed.append(f"{case.kernel} (D={case.d}, {case.dtype}) for {target}: {_first_line(error)}")
                tell(failed[-1])
    return found, failed


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ----- the interpreter


def interpreter_errors() -> list[dict[str, Any]]:
    """Largest absolute difference of every kernel from its definition, in this process's interpreter, fp32."""
    import torch

    from heart_attention.backbones import SVG2, XAttention
    from heart_attention.kernels import eager, triton_attention
    from heart_attention.kernels.ops import triton_predict
    from heart_attention.masks import BlockMask

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int, d: int, heads: int = 2) -> torch.Tensor:
        return torch.randn(1, n, heads, d, generator=generator).transpose(1, 2)  # a view, as diffusers gives it

    def attend(mask: Any, q: Any, k: Any, v: Any) -> float:
        want = eager.KERNEL.run(eager.KERNEL.plan(mask), q, k, v)
        got = triton_attention.KERNEL.run(triton_attention.KERNEL.plan(mask), q, k, v)
        return float((got - want).abs().max())

    rows = []

    def row(kernel: str, shape: str, error: float, limit: float = TOLERANCE) -> None:
        rows.append({"kernel": kernel, "shape": shape, "error": error, "limit": limit, "passes": error <= limit})

    for d in (64, 128):
        q, k, v = (tokens(150, d) for _ in range(3))
        mask = XAttention(16, 64).predict(q, k, 0.5)
        row("attention, blocks", f"N=150 D={d} block 64", attend(mask, q, k, v))
        order = torch.randperm(130, generator=generator)
        tail = BlockMask(mask.blocks, 64, 130, 130, order, tail=20)
        row("attention, blocks, token order", f"N=130+20 unused D={d} block 64", attend(tail, q, k, v))
        mask = SVG2(6, 12, min_ratio=0.2, init_iters=3).predict(q, k, 0.5)
        row("attention, clusters", f"N=150 D={d} 6 × 12 clusters", attend(mask, q, k, v))
        got = triton_predict.xattention_scores(q, k, 16, 64)
        row(
            "XAttention scores",
            f"N=150 D={d} stride 16 block 64",
            float((got - XAttention(16, 64).scores(q, k)).abs().max()),
        )
        half = [x.half() for x in (q, k, v)]
        row("attention, clusters, fp16", f"N=150 D={d} 6 × 12 clusters", attend(mask, *half), 2e-3)
        init = q[:, :, :20].contiguous()
        labels, centroids, _ = SVG2().cluster(q, init, 2)
        found = triton_predict.kmeans(q, init, 2)
        row("k-means, assignment", f"N=150 D={d} C=20, labels that differ", float((labels != found.labels).sum()), 0)
        row("k-means, means", f"N=150 D={d} C=20", float((centroids - found.centroids).abs().max()))
        want = (q.mean(2) - k.mean(2)).abs().sum(-1) * 2
        got = triton_predict.pooled_drift(q, k, k.mean(2), q.mean(2))
        row("pooled drift", f"N=150 D={d}", float((got - want).abs().max()), 2e-5)
    return rows


def run_interpreter() -> list[dict[str, Any]]:
    """`interpreter_errors` in a process of its own: the interpreter is chosen when Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--interpreter-json"]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


# ----- the page


def page(usages: list[Usage], failed: list[str], checks: list[dict[str, Any]]) -> str:
    """docs/gpu-evidence.md."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton", "heart-attention")
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [INTRODUCTION, f"Written by `make gpu-evidence` on {today} with {versions}, Python {platform.python_version()}, ",
             f"{platform.system()} {platform.machine()}; {_gpu()}.\n\n", "## Interpreter\n\n",
             "| kernel | shape | largest difference | allowed | |\n|---|---|---|---|---|\n"]  # fmt: skip
    parts += [
        f"| {c['kernel']} | {c['shape']} | {c['error']:.1e} | {c['limit']:.0e} | {_word(c['passes'])} |\n"
        for c in checks
    ]
    parts += ["\n## Compiled ahead of time\n"]
    for target in TARGETS:
        mine = [u for u in usages if u.target == target]
        if mine:
            parts.append(_target_table(target, mine))
    if failed:
        parts.append("\n## Not compiled\n\n" + "".join(f"- {line}\n" for line in failed))
    return "".join(parts) + CLOSING


def _gpu() -> str:
    import torch

    return f"a {torch.cuda.get_device_name()} was present" if torch.cuda.is_available() else "no GPU was present"


def _target_table(target: str, usages: list[Usage]) -> str:
    unit = "a lane" if target.startswith("gfx") else "a thread"
    lines = [f"\n### {target} ({CARDS[target]}; {TARGETS[target] // KIB} KiB shared memory a block)\n\n",
             f"| kernel | type | D | tile | warps | stages | registers {unit} | spilled bytes | shared KiB | |\n",
             "|---|---|---|---|---|---|---|---|---|---|\n"]  # fmt: skip
    for u in usages:
        lines.append(
            f"| {u.kernel} | {u.dtype} | {u.d} | {u.tile} | {u.warps} | {u.stages} | {u.registers} | {u.spills} | "
            f"{u.shared / KIB:.0f} | {_word(u.passes)} |\n"
        )
    return "".join(lines)


def _word(passes: bool) -> str:
    return "passes" if passes else "**fails**"


INTRODUCTION = """# GPU evidence

HEART's GPU kernels were written where there is no GPU. This page says what is known about them all the same, how it
was found out, and what is not known. Two independent things are checked:

- **They compute the right thing.** Each Triton kernel runs in Triton's interpreter (`TRITON_INTERPRET=1`), which
  executes the same device code tile by tile with NumPy, and is compared with the fp32 definition in plain PyTorch
  (`kernels/eager.py`, `backbones/`). The test suite does the same over generated shapes, densities, uneven rows, empty
  clusters, single tokens and non-contiguous inputs. In fp32, and once in fp16 for the 16-bit path; not in bf16, because
  the interpreter multiplies bf16 matrices wrongly.
- **They fit the machine.** Each kernel is compiled to machine code for every target with the very launch figures the
  package would choose there; registers, spills and shared memory are read from the binary. More than 64 spilled bytes a
  thread, or more shared memory than a block may have, fails the command.

The flashinfer adapter (`kernels/flashinfer.py`) is tested against a stand-in that checks the arguments its wrappers take
(version 0.7.2) and computes with the definition; flashinfer itself needs CUDA to run.

**Not proven here**: speed on any GPU, and numbers from real tensor cores. `heart project` gives projected times, marked
as such. On a machine with a GPU, `pytest tests/kernels` runs the kernels on it, and `heart compare` measures.

"""

CLOSING = """
## Reading the tables

A tile is query tokens × key tokens of one program (groups of 16 tokens for scores, tokens × centroids for assignment).
"blocks" are 128 × 128 tokens in raster order; "token order" reaches them through a permutation; "clusters" are SVG2's,
gathered through a permutation in packed runs of up to 16 keys. fp32 is multiplied in full and meant for checking, not for
speed. On AMD the registers are vector registers and spills are scratch bytes a lane.
"""


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for; 0 when everything passes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--json", action="store_true", help="print figures for machines")
    parser.add_argument("--interpreter-json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.interpreter_json:
        print(json.dumps(interpreter_errors()))
        return 0
    tell = (lambda line: None) if args.json else lambda line: print(line, flush=True)
    checks = run_interpreter()
    for c in checks:
        tell(f"interpreter {c['kernel']} {c['shape']}: {c['error']:.1e} (allowed {c['limit']:.0e})")
    usages, failed = compile_all(args.targets, tell)
    if args.write:
        args.write.write_text(page(usages, failed, checks))
    bad = [u for u in usages if not u.passes]
    if args.json:
        print(json.dumps({"interpreter": checks, "compiled": [asdict(u) for u in usages], "failed": failed}))
    wrong = sum(not c["passes"] for c in checks)
    tell(f"{len(usages)} compiled, {len(bad)} over a limit, {len(failed)} not compiled; {wrong} of {len(checks)} wrong")
    return 1 if bad or failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
