"""What can be proven about the GPU kernels without a GPU; `make gpu-evidence` writes it to docs/gpu-evidence.md.

1. Every Triton kernel runs in Triton's interpreter, fp32, and is compared with the definition.
2. Every Triton kernel is compiled ahead of time for each target with the launch figures that the package would use
   there; registers, spills and shared memory are read from the machine code. Spills over 64 bytes a thread or shared
   memory over the target's limit fail (exit code 1).
3. cuDNN's block-sparse attention is compiled to machine code through our adapter, where its package is installed.
4. The instructions of the inner loop of attention are counted in the machine code, beside those of a dense kernel that
   is written and compiled alike. More than the bars for sm_80 and sm_90 fail.
5. Which kernel serves which mask on which GPU generation, by what each kernel says of itself.
6. What the compiler writes for a transformer's blocks with `compile_blocks` is compiled to machine code too.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import heart_attention
from gpu_blocks import compile_blocks
from gpu_cases import cases, dense_case
from gpu_compile import CARDS, KIB, TARGETS, Loop, Usage, compile_case
from gpu_libraries import compile_cudnn

__all__ = ["Loop", "Usage", "cases", "compile_case", "dense_case", "main"]
TOLERANCE = 2e-6
# Instructions a warp and 64 keys, blocks of 128, D=128, bf16: what the inner loop may take at most.
LIBRARIES = ("cudnn", "flashinfer_blocks", "flashinfer", "flex")  # kernels that others maintain
LOOP_BARS = {"sm_80": 520, "sm_90": 300}


def compile_all(targets: list[str], tell: Callable[[str], None]) -> tuple[list[Usage], list[str]]:
    """All cases for all targets; what could not be compiled comes back as sentences."""
    found, failed = [], []
    for target in targets:
        for case in [*cases(), *(dense_case(d) for d in (64, 128))]:
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

    def attend(mask: Any, q: Any, k: Any, v: Any, rest: str = "drop") -> float:
        want = eager.KERNEL.run(eager.KERNEL.plan(mask, rest), q, k, v)
        got = triton_attention.KERNEL.run(triton_attention.KERNEL.plan(mask, rest), q, k, v)
        return float((got - want).abs().max())

    rows = []

    def row(kernel: str, shape: str, error: float, limit: float = TOLERANCE) -> None:
        rows.append({"kernel": kernel, "shape": shape, "error": error, "limit": limit, "passes": error <= limit})

    for d in (64, 128):
        q, k, v = (tokens(150, d) for _ in range(3))
        mask = XAttention(16, 64).predict(q, k, 0.5)
        row("attention, blocks", f"N=150 D={d} block 64", attend(mask, q, k, v))
        row("attention, blocks, rest as means", f"N=150 D={d} block 64", attend(mask, q, k, v, "mean"))
        order = torch.randperm(130, generator=generator)
        tail = BlockMask(mask.blocks, 64, 130, 130, order, tail=20)
        row("attention, blocks, token order", f"N=130+20 unused D={d} block 64", attend(tail, q, k, v))
        mask = SVG2(6, 12, min_ratio=0.2, init_iters=3).predict(q, k, 0.5)
        row("attention, clusters", f"N=150 D={d} 6 × 12 clusters", attend(mask, q, k, v))
        row("attention, clusters, rest as means", f"N=150 D={d} 6 × 12 clusters", attend(mask, q, k, v, "mean"))
        shares = [torch.empty(mask.shape) for _ in range(2)]
        for kernel, share in zip((eager.KERNEL, triton_attention.KERNEL), shares):
            kernel.run(kernel.plan(mask, "mean"), q, k, v, mass=share)
        row("mass of the rest, clusters", f"N=150 D={d} 6 × 12 clusters", float((shares[0] - shares[1]).abs().max()))
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
        row("token means", f"N=150 D={d}", float((triton_predict.pooled_means(q) - q.mean(2)).abs().max()))
    return rows


def run_interpreter() -> list[dict[str, Any]]:
    """`interpreter_errors` in a process of its own: the interpreter is chosen when Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--interpreter-json"]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


# ----- the page


WAITING = """
## Waiting and memory

A pretended GPU (`tests/helpers/fake_gpu.py`: tensors that say they are on a GPU and compute on the CPU) counts in the test
suite what makes the host wait in a sparse call, and fails on operations that mix tensors of both places. Blocks through
the Triton kernel: TMR waits once, for its decision, whether masks are reused or not; `Interval` and `Warmup` never wait.
Densities and the mass of the rest reach the host one call late, by copies that nobody waits for, so the first call on a
GPU decides dense or sparse by an expected density. A reused block mask takes 2 launches without drift and 17 to 21 with
it (`tests/online/test_read_backs.py`).

Clusters wait no more often, whether dropped or approximated, reused or ranked by error in every call: one launch
(`kept_runs`) lists the runs of kept keys, with room for the most that a row can have, so nobody asks how many there are.
At 75,600 tokens, 40 heads and 1,024 × 2,048 clusters that room is 0.9 GB while a layer runs, on paper; lists of more than
1 GiB (`RUN_BYTES`) are counted first, and such a call waits once more.

`TMR(decide="device")` waits for nothing at all: every head is predicted in every call, and the device chooses between old
and new masks, anchors and centroids (`torch.where`). Outputs are those of a decision on the host bit for bit
(`tests/online/test_device_decision.py`: blocks, clusters, ranked by error, equal groups, with text, mixed batches), and
`stats` tells the same refreshes and drifts. Its price is what TMR saves, the predictions: with four heads a block mask that
could be reused takes 180 launches instead of 17, clusters 396 instead of 17, clusters ranked by error 666 instead of 333
(pretended GPU). So it is no default; it is for a host that other work keeps from answering in time. Backbones that
learn from a call (LiteAttention) are refused.

Resident on the device over all layers and both guidance branches, Wan2.1-14B at 75,600 tokens: XAttention, Band, Radial,
ExactMass and SVG 0.14 GB, SpargeAttn 0.28, LiteAttention 0.31, PISA 0.56, SVG2 and EAR 300 × 1,000 1.09 GB; SVG2 ranked by
error 0.97 GB whatever the number of clusters, since labels alone are kept and maps are made anew (the bar is 1.5); centroids
(2.1 to 5.0 GB) wait in the computer's own memory. Wan2.1-1.3B at 32,760 tokens: 0.01 to 0.12 GB. That is on paper, and a
test holds it (`tests/benchmarks/test_resident.py`, which also compares paper with running all ten at a small size and finds
every tensor that the engine keeps). Running one head of one layer at these sizes on a CPU gave the same for XAttention, SVG2
and SpargeAttn (`benchmarks/memory.py --real --heads 1`). Plans come on top where those of all layers take at most 400 MB (0.17
and 0.38 GB for XAttention and SpargeAttn on the smaller model, CPU's kernel), whatever backbones a layer mixes; others are
made from packed masks and labels at each call; kept, they would be 1.3 GB for blocks and 3 GB for clusters.

## The rest of the block

`heart.enable(pipe, …, compile_blocks=True)`, or `--compile`, compiles the repeated blocks around attention, which stays one
opaque call. On the embedded model at its native size, on a CPU (`benchmarks/compile_blocks.py`, steps in turns, two Zen-4
cores, nothing else running), time of a forward outside video attention with compiled blocks is **0.77** of that without
them with two threads and **0.81** with one (medians of eight; worst 0.94 and 0.96); outputs differ by 6e-7 of their
largest value. The products take most of what is left.
What Inductor writes for GPUs is compiled to machine code below.

"""


def page(
    usages: list[Usage],
    failed: list[str],
    checks: list[dict[str, Any]],
    cudnn: list[dict[str, Any]] | None = None,
    blocks: list[dict[str, Any]] | None = None,
) -> str:
    """docs/gpu-evidence.md."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton"))
    versions += f", heart-attention {heart_attention.__version__}"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [INTRODUCTION, f"Written by `make gpu-evidence` on {today} with {versions}, Python {platform.python_version()},\n",
             f"{platform.system()} {platform.machine()}; {_gpu()}.\n\n", serving_table(), WAITING, "## Interpreter\n\n",
             "| kernel | shape | largest difference | allowed | |\n|---|---|---|---|---|\n"]  # fmt: skip
    parts += [
        f"| {c['kernel']} | {c['shape']} | {c['error']:.1e} | {c['limit']:.0e} | {_word(c['passes'])} |\n"
        for c in checks
    ]
    parts += [loop_table(usages), cudnn_table(cudnn or []), blocks_table(blocks or []), "\n## Compiled ahead of time\n"]
    for target in TARGETS:
        mine = [u for u in usages if u.target == target]
        if mine:
            parts.append(_target_table(target, mine))
    if failed:
        parts.append("\n## Not compiled\n\n" + "".join(f"- {line}\n" for line in failed))
    return "".join(parts) + CLOSING


def serving_table() -> str:
    """Which kernel serves which calls on which GPU generation; with and without the rest share a row if served alike."""
    from heart_attention.kernels import capability

    found: dict[tuple, list[str]] = {}
    for rows in zip(*(capability.table(gpu) for gpu in capability.GPUS)):
        cells = [" ".join([f"**{row['kernel']}**", *(n for n in row["others"] if n in LIBRARIES)]) for row in rows]
        what = (rows[0]["groups"], str(rows[0]["head_size"]), rows[0]["dtype"], *cells)
        found.setdefault(what, []).append(rows[0]["rest"])
    lines = [SERVING, f"| groups | head size | type | rest | {' | '.join(capability.GPUS)} |\n", "|---" * 11 + "|\n"]
    for what, rests in found.items():
        lines.append(f"| {' | '.join([*what[:3], ' or '.join(rests), *what[3:]])} |\n")
    return "".join(lines)


def cudnn_table(rows: list[dict[str, Any]]) -> str:
    """Machine code of cuDNN's kernels, or that it was not made here."""
    if not rows:
        return CUDNN + "The package was not installed when this page was written.\n"
    lines = [
        CUDNN,
        "| target | block | D | registers a thread | stack bytes | machine code KiB |\n|---|---|---|---|---|---|\n",
    ]
    for r in rows:
        found = r.get("error") or f"{r['registers']} | {r['stack']} | {r['bytes'] / KIB:.0f}"
        lines.append(f"| {r['target']} | {r['block']} | {r['d']} | {found} |\n")
    return "".join(lines)


def blocks_table(rows: list[dict[str, Any]]) -> str:
    """Machine code of what the compiler wrote for a block; targets that failed are told elsewhere."""
    lines = [BLOCKS]
    for r in (row for row in rows if "error" not in row):
        most = {what: max(kernel[what] for kernel in r["kernels"]) for what in ("registers", "spills", "shared")}
        made = sum(kernel["configurations"] for kernel in r["kernels"])
        lines.append(
            f"| {r['target']} | {r['launches']} | {r['products']} | {r['attention']} | {made} | {most['registers']} | "
            f"{most['spills']} | {most['shared'] / KIB:.0f} |\n"
        )
    return "".join(lines)


def loop_table(usages: list[Usage]) -> str:
    """Instructions of the inner loops, and their ratio to the dense kernel's of the same target and head size."""
    dense = {(u.target, u.d): u.loop.total for u in usages if u.loop and u.kernel == "dense attention"}
    lines = [LOOPS]
    for u in usages:
        if u.loop and (u.target, u.d) in dense:
            lines.append(
                f"| {u.target} | {u.kernel} | {u.d} | {u.tile} | {u.loop.tensor:.0f} | {u.loop.shared:.0f} | "
                f"{u.loop.other:.0f} | {u.loop.total:.0f} | {u.loop.total / dense[u.target, u.d]:.2f} |\n"
            )
    return "".join(lines)


def over_bars(usages: list[Usage]) -> list[str]:
    """Inner loops of the plain kernel over blocks of 128 that take more than their bar, or spill, as sentences."""
    return [
        f"{u.target}: {u.loop.total:.0f} instructions for 64 keys and {u.spills} B spilled, over {LOOP_BARS[u.target]}"
        for u in usages
        if u.kernel == "attention, blocks" and u.d == 128 and u.loop and u.target in LOOP_BARS
        if u.loop.total > LOOP_BARS[u.target] or u.spills
    ]


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

The adapters to flashinfer (0.7.2) and cuDNN's block-sparse attention (nvidia-cudnn-frontend 1.32) are tested against
stand-ins that check the arguments these packages take and compute with the definition; both need CUDA to run. cuDNN's
kernels are also compiled to machine code through the adapter's own call. FlexAttention is compiled and run on the CPU in
the test suite, against the definition, with and without the rest.

**Not proven here**: speed on any GPU, and numbers from real tensor cores. `heart project` gives projected times, marked
as such. On a machine with a GPU, `pytest tests/kernels` runs the kernels on it, and `heart compare` measures.

"""

SERVING = """## Which kernel serves

Bold is what "auto" takes when the packages are installed, for 75,600 tokens and 40 heads with a mask each and 30 % kept;
behind it stand further kernels that others maintain and that would serve too. `heart info --gpu sm_90` prints the
reasons of those that would not. By contract, that is by the rules that each package states and our adapters follow: none
of them ran on a GPU here. `flex` ran on a CPU, compiled, in the test suite. Clusters, with the rest or without, go to our
Triton kernel on every generation: cuDNN's and FlexAttention's kernels take equal blocks, FlashInfer's lists every kept key
of every row, over 128 MB at this size. Cut into equal groups (`SVG2(equal_groups=64)`) they are blocks and go where blocks
go; docs/rest.md has what that costs in error. `flashinfer_rest` (FlashInfer's BlockSparseTSWrapper: kept blocks and the
means of all others in one launch; sm_100, head size 128, bf16) is taken by name only, since its makers call it
experimental, and so is `cudnn_fp8`, since 8-bit products change results (cuDNN's twin in 8 bits for bf16 tensors of head
size 128 with the rest dropped: blocks of 128 on sm_100, of 64 and 128 on sm_120); both contract-tested. FlashInfer's
kernels for blocks of 64 were left out: on sm_100 they take what cuDNN takes there (bf16, head size 128), on sm_120 whole
blocks alone. So was flash-attn-4: its block lists work on sm_90 alone, where cuDNN serves, and sm_80 ignores them without
a word.

"""

CUDNN = """
## cuDNN's kernels, compiled

Block-sparse attention of nvidia-cudnn-frontend, compiled to machine code for GPUs that are not here, through the very
call that the adapter makes, with tensors without memory (`benchmarks/gpu_libraries.py`); it stops at the launch. bf16.
Blocks of 64 on sm_90 are missing: their compilation asks the driver about the device.

"""

BLOCKS = """
## Compiled blocks

What Inductor writes for a block of Wan2.1-1.3B at 480p and 81 frames in bf16 with `compile_blocks=True`, compiled to machine
code for GPUs that are not here (`benchmarks/gpu_blocks.py`; `--code` prints it). The block is traced on a CPU, its graph
moved, and the compiler's questions about the device are answered as that GPU would. Norms, modulation, RoPE, residuals and
activation become so many Triton kernels; products go to the vendor's library, attention to ours. Registers a thread, spilled
bytes a thread and shared memory are the most of all kernels in all configurations that the compiler would try.

| target | Triton kernels | products | attention | configurations | registers | spilled bytes | shared KiB |
|---|---|---|---|---|---|---|---|
"""

LOOPS = """
## Inner loops

Instructions that one warp executes for 64 keys in the loop over whole blocks (bf16), counted in the machine code. The
last column compares with dense attention in Triton, written and compiled alike (`benchmarks/gpu_dense.py`). The bars are
520 on sm_80 and 300 on sm_90 for blocks of 128 at D=128, without spills.

| target | kernel | D | tile | tensor cores | shared memory | other | all | of dense |
|---|---|---|---|---|---|---|---|---|
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
    libraries, blocks = compile_cudnn(tell), compile_blocks(tell)
    failed += [f"cudnn {r['target']} block {r['block']} D={r['d']}: {r['error']}" for r in libraries if "error" in r]
    failed += [f"compiled blocks for {r['target']}: {r['error']}" for r in blocks if "error" in r]
    if args.write:
        args.write.write_text(page(usages, failed, checks, libraries, blocks))
    bad = [u for u in usages if not u.passes]
    slow = over_bars(usages)
    for line in slow:
        tell(line)
    if args.json:
        print(
            json.dumps(
                {
                    "interpreter": checks,
                    "compiled": [asdict(u) for u in usages],
                    "cudnn": libraries,
                    "blocks": blocks,
                    "failed": failed,
                }
            )
        )
    wrong = sum(not c["passes"] for c in checks)
    tell(f"{len(usages)} compiled, {len(bad)} over a limit, {len(failed)} not compiled; {wrong} of {len(checks)} wrong")
    return 1 if bad or failed or wrong or slow else 0


if __name__ == "__main__":
    sys.exit(main())
