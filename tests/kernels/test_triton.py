"""The Triton kernels without a GPU: in the interpreter (a process of its own) and compiled ahead of time."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heart_attention.errors import HeartError
from heart_attention.kernels import triton_attention
from heart_attention.kernels.ops import triton_predict
from heart_attention.masks import BlockMask

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(not triton_attention.installed(), reason="triton is not installed")


def evidence():
    """benchmarks/gpu_evidence.py as a module."""
    folder = str(HERE.parents[1] / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("gpu_evidence")


def test_the_page_says_what_the_command_would_write():
    """Prose and the table of kernels; figures come from the compiler and stand as they were measured."""
    module, page = evidence(), (HERE.parents[1] / "docs" / "gpu-evidence.md").read_text()
    parts = (module.INTRODUCTION, module.serving_table(), module.WAITING, module.CUDNN, module.LOOPS, module.BLOCKS)
    parts += (module.CLOSING,)
    for part in parts:
        assert part.strip() in page, f"{part.strip()[:60]}…: write docs/gpu-evidence.md anew"


@needs_triton
def test_interpreter_agrees_with_the_definitions():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-o", "addopts=", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(HERE / "triton_interpreted.py")], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def compile_within_limits(target, wanted):
    module = evidence()
    cases = [case for case in module.cases() if wanted(case)]
    assert cases, "no such kernel: nothing would be compiled"
    for case in cases:
        usage = module.compile_case(case, target)
        assert usage.passes, usage
        assert usage.registers > 16


@needs_triton
def test_attention_compiles_within_limits():
    compile_within_limits("sm_80", lambda case: case.kernel == "attention, clusters" and case.d == 128)


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_inner_loop_keeps_its_bar(target):
    """Instructions for 64 keys, blocks of 128, D=128, bf16; beside a dense kernel compiled alike."""
    module = evidence()
    ours, dense = (
        module.compile_case(next(c for c in cases if c.kernel == name and c.d == 128), target)
        for name, cases in (("attention, blocks", module.cases((128,))), ("dense attention", [module.dense_case(128)]))
    )
    assert not module.over_bars([ours]) and ours.loop.total <= 1.05 * dense.loop.total
    assert ours.loop.tensor == dense.loop.tensor > 0
    line = [x for x in module.loop_table([ours, dense]).splitlines() if x.startswith(f"| {target} | attention")]
    assert len(line) == 1 and line[0].endswith(f"| {ours.loop.total / dense.loop.total:.2f} |")


@needs_triton
def test_a_slow_or_spilling_loop_is_told():
    module = evidence()
    usage = module.Usage(
        "attention, blocks", "sm_80", 128, "bf16", "", 8, 3, 200, 0, 0, 1, 0.0, module.Loop(128, 90, 302)
    )
    assert not module.over_bars([usage])
    assert module.over_bars([replace(usage, spills=8)]) and module.over_bars(
        [replace(usage, loop=module.Loop(128, 90, 303))]
    )


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942"])
def test_every_kernel_compiles_within_limits(target):
    compile_within_limits(target, lambda case: True)


@needs_triton
@pytest.mark.slow
def test_arguments_that_happen_to_be_one_compile():
    """Triton makes integers equal to 1 constants, and other types follow; also fp16, a padded head and an order."""
    from heart_attention.kernels import triton_code

    module = evidence()
    ones = (
        "heads n_q n_k n clusters groups splits span k_tiles k_blocks q_groups k_groups q_blocks valid_q_groups".split()
    )
    for case in module.cases((128,)):
        if case.dtype == "bf16":
            names = getattr(triton_code, case.function).arg_names
            odd = {"D": 20, "D_PAD": 32, "PERM": True, **dict.fromkeys(ones, 1)}
            constants = {**case.constants, **{key: value for key, value in odd.items() if key in names}}
            types = {key: value.replace("bf16", "fp16") for key, value in case.types.items()}
            assert module.compile_case(replace(case, constants=constants, types=types), "sm_80").passes


@needs_triton
def test_limits_can_fail():
    module = evidence()
    usage = module.Usage("attention", "sm_80", 128, "bf16", "", 8, 2, 255, 65, 0, 1, 0.0)
    assert not usage.passes
    usage.spills, usage.shared = 64, 2
    assert not usage.passes
    usage.shared = 1
    assert usage.passes
    assert "**fails**" in module.page(
        [], [], [{"kernel": "", "shape": "", "error": 1.0, "limit": 0.0, "passes": False}]
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_why_it_cannot_serve_here():
    q = torch.zeros(1, 1, 20, 16)
    reasons = triton_attention.KERNEL.reasons_not(None, q)
    assert any("no CUDA or ROCm device" in r for r in reasons) and any("tensors are on cpu" in r for r in reasons)
    plan = triton_attention.KERNEL.plan(BlockMask.full(1, 1, 20, 16))
    with pytest.raises(HeartError, match="runs on a GPU and the tensors are on cpu"):
        triton_attention.KERNEL.run(plan, q, q, q)
    assert triton_predict.op_reasons(q) == ["it runs on a GPU and the tensors are on cpu"]


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_120", "gfx942", "interpreter"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_configs_are_powers_of_two(target, itemsize, rows):
    for d in (16, 64, 128, 256):
        config = triton_attention.config_for(target, d, itemsize, rows, False)
        for value in (config.block_m, config.block_n):
            assert value >= 16 and value & (value - 1) == 0
        assert config.block_m <= rows and config.block_n % triton_attention.RUN == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_the_gpu(dtype):
    from heart_attention.backbones import SVG2, XAttention
    from heart_attention.kernels import eager

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1000, 4, 128, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3))
    for mask in (XAttention().predict(q, k, 0.7), SVG2(10, 30, init_iters=3).predict(q, k, 0.7)):
        got = triton_attention.KERNEL.run(triton_attention.KERNEL.plan(mask), q, k, v)
        want = eager.KERNEL.run(eager.KERNEL.plan(mask), q, k, v)
        limit = 2e-6 if dtype == torch.float32 else 2e-2
        assert (got.float() - want.float()).abs().max() <= limit


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_prediction_on_the_gpu(dtype):
    from heart_attention.backbones import XAttention, kmeans

    torch.manual_seed(0)
    q, k = (torch.randn(1, 1000, 4, 128).to(dtype).transpose(1, 2) for _ in range(2))
    got = triton_predict.xattention_scores(q.cuda(), k.cuda(), 16, 128).cpu()
    assert (got - XAttention().scores(q.float(), k.float())).abs().max() <= 1e-5
    assert (triton_predict.pooled_means(q.cuda()).cpu() - q.float().mean(2)).abs().max() <= 1e-5
    found = triton_predict.kmeans(q.cuda(), q[:, :, :30].cuda(), 1)
    for h in range(4):
        want = kmeans.lloyd(q[0, h].float(), q[0, h, :30].float(), 1)
        assert (found.labels[0, h].cpu() != want.labels).float().mean() <= 0.002  # ties beyond the bits kept


@pytest.mark.slow
@needs_triton
def test_what_the_compiler_writes_for_blocks_becomes_machine_code():
    """Norms, RoPE and modulation fused around one call of ours, without spills."""
    module = evidence()
    rows = module.compile_blocks(lambda line: None)
    assert [row["target"] for row in rows] == ["sm_80", "sm_90"] and not any("error" in row for row in rows), rows
    for row in rows:
        assert row["attention"] == 1 and row["products"] == 10 and row["launches"] == len(row["kernels"]) >= 4
        assert all(kernel["registers"] > 16 and kernel["spills"] == 0 for kernel in row["kernels"])
    assert all(f"| {row['target']} | {row['launches']} | 10 | 1 |" in module.blocks_table(rows) for row in rows)
