"""Which kernel would serve a call on a GPU, by what each kernel says of itself: no GPU is needed for the question."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError

GPUS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
BLOCKS = ((64, 64), (128, 128), None)
HEAD_SIZES = (64, 128)
DTYPES = (torch.bfloat16, torch.float32)
BY_NAME = ("cudnn_fp8", "flashinfer_rest")  # kernels that "auto" never takes
TOKENS = 75_600  # of Wan2.1 14B at 720p, as are 40 heads of size 128


@dataclass(frozen=True)
class Call:
    """An attention call as far as a kernel's abilities depend on it.

    Args:
        gpu: "sm_90" for an NVIDIA GPU of capability 9.0, "gfx942" for an AMD one.
        block: query and key tokens a block; None for clusters.
        cut: whether these blocks are clusters cut into equal groups, so that tokens are gathered head by head.
        head_size, dtype, tokens, heads: of q, k and v.
        density: kept share of all token pairs.
        rest: what becomes of what the mask leaves out.
    """

    gpu: str
    block: tuple[int, int] | None
    head_size: int
    dtype: torch.dtype = torch.bfloat16
    tokens: int = TOKENS
    heads: int = 40
    density: float = 0.3
    rest: str = "drop"
    cut: bool = False

    @property
    def groups(self) -> str:
        """What the mask is between, in words."""
        if self.block is None:
            return "clusters"
        return f"{'clusters in equal groups' if self.cut else 'blocks'} of {self.block[0]}"

    @property
    def nvidia(self) -> int:
        """Capability of an NVIDIA GPU times ten (90 for sm_90), 0 for others."""
        return int(self.gpu[3:]) if self.gpu.startswith("sm_") else 0


def gpu_of(device: torch.device) -> str:
    """How the GPU of a device is called here."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def call_of(mask: Any, q: Tensor, rest: str) -> Call:
    """The call that a mask and queries on a GPU make."""
    return Call(gpu_of(q.device), mask.block_shape, q.shape[-1], q.dtype, mask.n_q, q.shape[0] * q.shape[1], rest=rest)


def check_gpu(gpu: str) -> str:
    """The name of a GPU generation, or an error that says how to write one."""
    if not re.fullmatch(r"sm_\d{2,3}|gfx[0-9a-f]{3,4}", gpu):
        raise HeartError(f"{gpu!r} names no GPU generation: write sm_90 for NVIDIA capability 9.0, or gfx942 for AMD")
    return gpu


def calls(gpu: str) -> list[Call]:
    """The calls of the table: blocks, clusters, clusters in equal groups, head sizes, types, with and without the rest."""
    kinds = [(block, False) for block in BLOCKS] + [(block, True) for block in BLOCKS if block is not None]
    made = [Call(gpu, block, d, dtype, cut=cut) for block, cut in kinds for d in HEAD_SIZES for dtype in DTYPES]
    return [replace(call, rest=rest) for call in made for rest in ("drop", "mean")]


def answers(call: Call) -> dict[str, list[str]]:
    """Every kernel, its package installed, with the reasons why it would not serve the call; in the order of "auto"."""
    from .registry import MODULES, get

    return {name: get(name).reasons_on(call) for name in MODULES}


def table(gpu: str) -> list[dict[str, Any]]:
    """A row for every call of a GPU generation: what it is, which kernel "auto" takes, which others would serve, reasons."""
    return [_row(call) for call in calls(check_gpu(gpu))]


def _row(call: Call) -> dict[str, Any]:
    found = answers(call)
    serving = [name for name, reasons in found.items() if not reasons and name not in BY_NAME]
    return {
        "gpu": call.gpu,
        "groups": call.groups,
        "head_size": call.head_size,
        "dtype": str(call.dtype).removeprefix("torch."),
        "rest": call.rest,
        "kernel": serving[0] if serving else None,
        "others": serving[1:],
        "reasons": {name: reasons for name, reasons in found.items() if reasons},
    }
