"""What the compiler writes for the blocks of Wan2.1-1.3B with `compile_blocks`, compiled for GPUs that are not there.

torch.compile asks the driver about the device. So a block is traced on the CPU with tensors without memory, at 480p and 81
frames, in bf16, with attention as HEART's opaque call; then one process a target answers the questions about the device,
moves the traced graph there and takes the Triton code that Inductor writes for it. Every kernel is compiled to machine code
in each of the launch configurations that Inductor would try. Passes over the graph ran as for a CPU, and nothing ran on a
GPU. All of it reaches into private parts of torch, here and not in the package; written against torch 2.13. By hand:
`python benchmarks/gpu_blocks.py sm_90`, with `--code` to read what is written.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

TARGETS = ("sm_80", "sm_90")
DIM, HEADS, TOKENS, TEXT = 1536, 12, 32_760, 512  # of Wan2.1-1.3B at 480p and 81 frames
GPU = torch.device("cuda", 0)
THREADS = {"sm_80": (108, 2048), "sm_90": (132, 2048)}  # multiprocessors, threads each


class Done(Exception):
    """The graph or the code stands; what follows is not wanted."""


# ---------------------------------------- the graph, on a CPU


def traced() -> tuple[torch.fx.GraphModule, FakeTensorMode]:
    """The graph of a block after Inductor's passes, and the mode of its tensors."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    found: list[torch.fx.GraphModule] = []

    def take(graph: torch.fx.GraphModule, inputs: Any) -> None:
        found.append(graph)
        raise Done

    backend = aot_autograd(fw_compiler=take, inference_compiler=take, decompositions=select_decomp_table())
    block, inputs = wan_block()
    try:
        with torch.no_grad():
            torch.compile(block, fullgraph=True, backend=backend)(*inputs)
    except Exception:
        if not found:
            raise
    (graph,) = found
    mode = next(node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder").fake_mode
    joint_graph_passes(graph)
    with V.set_fake_mode(mode):
        compile_fx.view_to_reshape(graph)
        compile_fx._recursive_post_grad_passes(graph, is_inference=True)
    return graph, mode


def wan_block() -> tuple[torch.nn.Module, tuple]:
    """A block under HEART, and inputs without memory."""
    from diffusers import WanTransformer3DModel

    import heart_attention as heart

    model = WanTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM // HEADS, in_channels=16, out_channels=16, text_dim=4096,
        freq_dim=256, ffn_dim=8960, num_layers=1,
    ).eval().to(torch.bfloat16)  # fmt: skip
    heart.enable(model, "xattention")
    small = {"hidden_states": torch.zeros(1, 16, 1, 4, 4), "encoder_hidden_states": torch.zeros(1, 2, 4096)}
    with torch.no_grad():  # so that HEART knows step and grid
        model(**{name: x.bfloat16() for name, x in small.items()}, timestep=torch.tensor([500]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden, text = (torch.empty(1, n, DIM, dtype=torch.bfloat16) for n in (TOKENS, TEXT))
        modulation = torch.empty(1, 6, DIM, dtype=torch.bfloat16)
        angles = tuple(torch.empty(1, TOKENS, 1, DIM // HEADS) for _ in range(2))
    return model.blocks[0], (hidden, text, modulation, angles)


# ---------------------------------------- the code, for a GPU


def pretend(target: str) -> None:
    """Answer the compiler's questions about the device as a GPU of that target would."""
    import torch._inductor.config as settings
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as triton_of_torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    number = int(target[3:])
    processors, threads = THREADS[target]
    device = types.SimpleNamespace(
        major=number // 10, minor=number % 10, multi_processor_count=processors, warp_size=32, name=target,
        max_threads_per_multi_processor=threads, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        total_memory=80 << 30, gcnArchName="", L2_cache_size=50 << 20, shared_memory_per_block_optin=163 << 10,
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": device,
        "get_device_capability": (number // 10, number % 10), "_exchange_device": 0, "_maybe_exchange_device": 0,
        "get_rng_state": torch.zeros(0), "set_rng_state": None, "synchronize": None, "_lazy_init": None,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, _always(value))
    answers = {
        "is_available": True,
        "current_device": 0,
        "get_device_properties": device,
        "get_compute_capability": number,
    }
    for name, value in answers.items():
        setattr(CudaInterface, name, staticmethod(_always(value)))
    CudaInterface.Worker.get_device_properties = staticmethod(_always(device))  # type: ignore[method-assign]
    triton_of_torch.triton_backend = _always(make_backend(GPUTarget("cuda", number, 32)))
    scheduler.has_triton = _always(True)
    triton_helpers.set_driver_to_gpu = _always(None)
    settings.force_disable_caches, settings.use_static_triton_launcher, settings.compile_threads = True, False, 1


def _always(value: Any) -> Callable:
    return lambda *args, **kwargs: value


def move(graph: torch.fx.GraphModule, mode: FakeTensorMode) -> list[Any]:
    """Make all tensors of the graph tensors on the GPU; gives its inputs."""

    def there(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU)

    with mode:
        for node in graph.graph.nodes:
            node.meta["val"] = pytree.tree_map(there, node.meta.get("val"))
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": GPU}
        return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def written(graph: torch.fx.GraphModule, mode: FakeTensorMode, inputs: list[Any]) -> str:
    """The code that Inductor writes for the graph."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering

    codegen, found = GraphLowering.codegen, []

    def stop(self: Any) -> Any:
        found.append(codegen(self)[0].value)
        raise Done

    GraphLowering.codegen = stop  # type: ignore[method-assign]
    compile_fx._recursive_post_grad_passes = _always(None)  # they ran
    try:
        with mode, tracing(TracingContext(mode)):
            compile_fx.compile_fx_inner(graph, inputs)
    except Exception:
        if not found:
            raise
    return found[0]


def machine_code(code: str, target: str, folder: Path) -> list[dict[str, Any]]:
    """What every kernel in the code needs, in the configuration that needs most registers."""
    from gpu_compile import nvidia_usage

    rows = []
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S):
        path = folder / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        made = [kernel._precompile_config(config).kernel for config in kernel.configs]
        used = [(*nvidia_usage(one, target), one.metadata.shared) for one in made]
        registers, spills, shared = (max(column) for column in zip(*used))
        rows.append(
            {"kernel": name, "configurations": len(made), "registers": registers, "spills": spills, "shared": shared}
        )
    return rows


def one_target(target: str) -> dict[str, Any]:
    """All kernels of a block for one target, what it calls beside them, and the code."""
    graph, mode = traced()
    pretend(target)
    code = written(graph, mode, move(graph, mode))
    calls = code[code.index("def call(") :]
    with tempfile.TemporaryDirectory() as folder:
        kernels = machine_code(code, target, Path(folder))
    return {
        "target": target,
        "kernels": kernels,
        "launches": len(re.findall(r"\btriton_\w+\.run\(", calls)),
        "products": len(re.findall(r"extern_kernels\.(?:add|b)?mm\(", calls)),
        "attention": len(re.findall(r"= torch\.ops\.heart\.attend", calls)),
        "code": code,
    }


def compile_blocks(tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every target in a process of its own; a target that failed has the last line of the complaint under "error"."""
    rows = []
    for target in TARGETS:
        command = [sys.executable, "-W", "ignore", __file__, target]
        done = subprocess.run(command, capture_output=True, text=True)
        complaint = (done.stderr.strip().splitlines() or ["nothing was written"])[-1][:200]
        rows.append(
            {"target": target, "error": complaint} if done.returncode else json.loads(done.stdout.splitlines()[-1])
        )
        tell(f"compiled blocks {rows[-1]}")
    return rows


if __name__ == "__main__":
    made = one_target(sys.argv[1])
    text = made.pop("code")
    print(text if "--code" in sys.argv else json.dumps(made))
