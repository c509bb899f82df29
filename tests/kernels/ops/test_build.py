"""Building the C kernels: never an error for the user, safe when processes start together."""

import os
import pathlib
import platform
import shutil
import subprocess
import sys

import pytest
import torch

from heart_attention import kernels
from heart_attention.kernels.ops import build
from heart_attention.masks import BlockMask, ClusterMask

compiler = pytest.mark.skipif(not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler")
USE = """
import torch
from heart_attention import kernels
from heart_attention.kernels.ops import build
build.FLAG_SETS = (("-O0",),)  # builds quickly
from heart_attention.masks import BlockMask
q = torch.ones(1, 1, 40, 8)
print(kernels.available()["cpu"])
print(float(kernels.run(kernels.plan("auto", BlockMask.full(1, 1, 40, 16)), q, q, q).mean()))
"""


def start(cache, **extra):
    env = {**os.environ, "HEART_CACHE": str(cache), "OMP_NUM_THREADS": "1", **extra}
    return subprocess.Popen([sys.executable, "-c", USE], env=env, stdout=subprocess.PIPE, text=True)


@compiler
def test_two_processes_at_once_build_one_library(tmp_path):
    processes = [start(tmp_path), start(tmp_path)]
    for process in processes:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and out.split("\n")[:2] == ["[]", "1.0"]
    assert len(list(tmp_path.glob("kernels-*/kernels-*.so"))) == 1
    assert not list(tmp_path.glob("kernels-*/.build-*"))


@pytest.mark.parametrize(
    "extra, reason",
    [({"HEART_NO_COMPILER": "1"}, "HEART_NO_COMPILER is set"), ({"CC": "/no/such/cc"}, "'/no/such/cc', which is not")],
)
def test_without_compiler_the_portable_kernel_serves(monkeypatch, tmp_path, extra, reason):
    monkeypatch.setenv("HEART_CACHE", str(tmp_path))
    for name, value in extra.items():
        monkeypatch.setenv(name, value)
    assert reason in kernels.available()["cpu"][0]
    plan = kernels.plan("auto", BlockMask.full(1, 1, 40, 16))
    q = torch.ones(1, 1, 40, 8)
    assert plan.kernel == "gather" and torch.allclose(kernels.run(plan, q, q, q), q)


def fake_compiler(folder, body):
    path = folder / "fakecc"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_compiler_that_fails_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("HEART_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", fake_compiler(tmp_path, "echo 'no licence' >&2; exit 3"))
    with pytest.raises(build.BuildError, match="does not compile the C kernels \\(no licence\\)"):
        build.load()


@compiler
def test_compiler_without_openmp_and_native_still_builds(monkeypatch, tmp_path):
    real = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    refuse = f'case "$*" in *-fopenmp*|*-march*) exit 1;; esac; exec {real} "$@"'
    monkeypatch.setenv("HEART_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", fake_compiler(tmp_path, refuse))
    quick = tuple(("-O0", *flags[1:]) for flags in build.FLAG_SETS)
    monkeypatch.setattr(build, "FLAG_SETS", quick)
    assert build.load().heart_has_openmp() == 0
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 20, generator=generator) for _ in range(3))
    mask = BlockMask.full(1, 2, 70, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert (kernels.run(kernels.plan("cpu", mask), q, k, v) - expected).abs().max() < 2e-6


@compiler
@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_vector_widths_compute_the_same(monkeypatch, tmp_path_factory, width, dtype):
    """What a CPU without AVX and one with AVX-512 would run, the latter in pieces."""
    real = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    monkeypatch.setenv("HEART_CACHE", str(tmp_path_factory.getbasetemp() / f"width{width}"))
    monkeypatch.setenv("CC", f"{real} -DVL={width} -Wno-psabi")
    monkeypatch.setattr(build, "FLAG_SETS", (("-O0",),))  # only what it computes matters here, and this builds quickly
    assert build.load().heart_vector_floats() == width
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 9, (1, 2, 170), generator=generator)
    mask = ClusterMask(torch.rand(1, 2, 9, 9, generator=generator) < 1.0, labels, labels.flip(-1))
    for dim in (20, 64):
        q, k, v = (torch.randn(1, 170, 2, dim, generator=generator).transpose(1, 2).to(dtype) for _ in range(3))
        expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
        found = kernels.run(kernels.plan("cpu", mask), q, k, v).double()
        assert ((found - expected).abs() <= 2e-6 + (dtype == torch.bfloat16) * expected.abs() * 2**-8).all()


@compiler
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX-512 is x86's")
def test_avx512_text_compiles(tmp_path):
    """The compiler takes it and uses the wide registers; tools/avx512 runs it, in an emulator where need be."""
    flags = "-O0 -mavx512f -mfma -std=gnu11 -Wall -Wno-unknown-pragmas -Werror -S"  # not every compiler has OpenMP
    command = [*build._compiler(), *flags.split(), "-o"]
    for source in build.sources():
        assembly = tmp_path / f"{source.stem}.s"
        subprocess.run([*command, str(assembly), str(source)], check=True, timeout=300)
        assert "%zmm" in assembly.read_text(), source.name


HARNESS = pathlib.Path(__file__).parents[3] / "tools" / "avx512" / "run.sh"


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("gcc", "ld", "objcopy"))), reason="needs gcc and binutils")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the harness is for x86")
def test_the_widest_vectors_here_agree_with_none(tmp_path):
    """All kernels, this CPU's vectors against no AVX, with unmapped pages after every array."""
    done = subprocess.run(["sh", str(HARNESS), str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and "\nPASS\n" in done.stdout, done.stdout + done.stderr


@compiler
def test_forked_child_works(monkeypatch):
    """OpenMP's threads do not survive a fork: the child must compute with one thread and not wait for ever."""
    script = (
        "import os, torch; torch.set_num_threads(2)\n" + USE.replace("print(kernels", "(kernels") + "pid = os.fork()\n"
        "if pid == 0:\n"
        "    kernels.run(kernels.plan('cpu', BlockMask.full(1, 1, 40, 16)), q, q, q)\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, stdout=subprocess.DEVNULL)


@compiler
def test_one_openmp_library_in_the_process():
    """Two of them would make two pools of threads that fight for the cores."""
    if not (pathlib.Path(torch.__file__).parent / "lib" / "libgomp.so.1").exists():
        pytest.skip("this PyTorch brings no libgomp.so.1")
    assert build.load().heart_has_openmp() == 1
    loaded = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
    assert len(loaded) == 1
