"""`heart info`: versions, the machine, and which kernels serve here."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

from ..errors import HeartError
from .arguments import add_command, add_json

PACKAGES = ("torch", "diffusers", "transformers", "triton", "flashinfer-python", "numpy")


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = add_command(subparsers, "info", "versions, device, and which kernels serve here or why they do not", run)
    parser.add_argument(
        "--gpu", metavar="sm_90", help="which kernel would serve on that GPU generation; it need not be here"
    )
    parser.add_argument("--presets", action="store_true", help="the presets, and what in them is not the paper's")
    add_json(parser, "it")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    if args.gpu:
        return print_gpu(args.gpu, args.json)
    if args.presets:
        print(json.dumps(presets(), indent=1) if args.json else render_presets())
        return 0
    facts = collect()
    print(json.dumps(facts, indent=1) if args.json else render(facts))
    return 0


def presets() -> dict[str, dict[str, Any]]:
    """Every preset: size, config, and what in it is ours."""
    from ..presets import PRESETS

    return {
        name: {
            "size": f"{p.width}x{p.height}, {p.frames} frames",
            "steps": p.steps,
            "ours": p.ours,
            "config": p.config.to_dict(),
        }
        for name, p in PRESETS.items()
    }


def render_presets() -> str:
    """A line a preset."""
    listed = presets()
    width = max(map(len, listed))
    return "\n".join(
        f"{name:<{width}}  {p['size']}: " + (f"not the paper's: {p['ours']}" if p["ours"] else "the paper's values")
        for name, p in listed.items()
    )


def collect() -> dict[str, Any]:
    """All of it as plain data."""
    import torch

    from .. import __version__, kernels
    from ..kernels import ops

    return {
        "versions": {"heart-attention": __version__, "python": platform.python_version(), **_versions()},
        "device": _device(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector_units": vector_units(),
        "compiled": _compiled(),
        "cache": _cache_folder(),
        "kernels": {name: {"serves": not why, "reasons": why} for name, why in kernels.available().items()},
        "operations": ops.available(),
    }


def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} ({torch.cuda.device_count()} in all)"
    if torch.backends.mps.is_available():
        return "Apple GPU"
    return f"CPU ({_cpu_name()})"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def vector_units() -> list[str]:
    """Those that matter here, of what the CPU says it has."""
    from ..kernels.ops.build import cpu_flags

    flags = set(cpu_flags().split())
    known = ("sse4_2", "avx", "fma", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
    return [name for name in known if name in flags]


def _cache_folder() -> str:
    """Where it is, or why there is none."""
    from .. import files

    try:
        return str(files.cache_dir())
    except HeartError as error:
        return f"none: {error}"


def _compiled() -> dict[str, Any]:
    """How the C kernels were built, or why not."""
    from ..kernels.ops import build

    try:
        library = build.load()
    except build.BuildError as error:
        return {"built": False, "reason": str(error)}
    return {
        "built": True,
        "floats_per_vector": library.heart_vector_floats(),
        "threads": bool(library.heart_has_openmp()),
        "file": library._name,
    }


def render(facts: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"{name:<20}{version or 'not installed'}" for name, version in facts["versions"].items()]
    built = facts["compiled"]
    how = (
        f"built, {built['floats_per_vector']} floats a vector, {'many threads' if built['threads'] else 'one thread'}"
        if built["built"]
        else f"not built: {built['reason']}"
    )
    lines += [
        "",
        f"{'device':<20}{facts['device']}",
        f"{'cores, threads':<20}{facts['cores']}, {facts['threads']}",
        f"{'vector units':<20}{' '.join(facts['vector_units']) or 'none known'}",
        f"{'C kernels':<20}{how}",
        f"{'cache folder':<20}{facts['cache']}",
        "",
        "kernels, in the order in which they are asked:",
    ]
    for name, state in facts["kernels"].items():
        lines.append(f"  {name:<18}{'serves' if state['serves'] else 'no: ' + '; '.join(state['reasons'])}")
    lines += ["", "other operations, by the first that serves:"]
    for name, ways in facts["operations"].items():
        told = [way if not why else f"{way} no: {'; '.join(why)}" for way, why in ways.items()]
        lines.append(f"  {name:<20}{', '.join(told)}")
    return "\n".join(lines)


def print_gpu(gpu: str, as_json: bool) -> int:
    """Print which kernel serves which calls on a GPU generation, and why others do not."""
    from ..kernels import capability

    rows = capability.table(gpu)
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{gpu}, their packages installed, {capability.TOKENS:,} tokens and 40 heads, 30 % kept:\n")
    for row in rows:
        what = f"{row['groups']}, head size {row['head_size']}, {row['dtype']}, rest {row['rest']}"
        others = f" (also {', '.join(row['others'])})" if row["others"] else ""
        print(f"{what:<70}{row['kernel'] or 'none'}{others}")
        for name, reasons in row["reasons"].items():
            print(f"    not {name}: {'; '.join(reasons)}")
    return 0
