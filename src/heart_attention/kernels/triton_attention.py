"""Kernel `triton`: block-sparse and variable-block attention on NVIDIA and AMD GPUs, driven by the shared plan.

Both mask kinds become one list of work, longest first: a tile of a query row and where its kept keys are listed.
Block masks list key blocks straight from the plan. Clusters list runs of at most 16 neighbouring keys, packed one
to an int32: a tile of 64 keys is filled from four of them, so small clusters waste little. Token order and cluster
permutations are gathered inside the kernel: q, k, v are never copied, whatever their strides. From sm_90 on blocks in
the order in which they come are fetched through tensor descriptors. What a mask leaves out follows the kept keys as
means of groups, in the same softmax.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import HeartError
from .base import Kernel
from .capability import Call
from .plan import Plan, make_plan

RUN = 16  # keys in one packed run; a power of two, at most 31
RUN_BITS = 5  # as in triton_code
RUN_GROUPS = 8192  # key clusters whose runs one program lists
RUN_BYTES = 1 << 30  # a list of runs with room may take so much
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_SIZE_LIMIT = 256
LOG2E = math.log2(math.e)
SMALLEST_SCALE = 1e-30  # a scale of nought would turn masked logits into NaN
PRECISION = "ieee"  # fp32 is the definition, so it is multiplied in full; the setting means nothing for other types


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch figures of one attention kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tiled: bool = False  # keys come through tensor descriptors


def launch_options(warps: int, stages: int) -> dict[str, Any]:
    """What a launch says besides its arguments.

    Products and sums may fuse: Triton's default from version 3.10 on is that they do not, which costs speed.
    """
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def interpreted() -> bool:
    """True when Triton runs kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=1)
def installed() -> bool:
    """True when Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def target_of(device: torch.device) -> str:
    """What configurations are chosen by: "sm_80", "sm_90", …, "gfx942", … or "interpreter"."""
    if device.type != "cuda":
        return "interpreter"
    return _target(device.index if device.index is not None else torch.cuda.current_device())


@lru_cache(maxsize=16)
def _target(index: int) -> str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def config_for(target: str, d_pad: int, itemsize: int, rows: int, gathered: bool, block: int = 128) -> Config:
    """Launch figures that compile without spills and within shared memory (docs/gpu-evidence.md has the table).

    Args:
        target: as `target_of` names it.
        rows: query tokens a program should take, from `tile_rows`.
        gathered: whether tokens are reached through a permutation.
        block: key tokens a block, 0 for clusters: tiles of keys should divide it.
    """
    config = _config(target, d_pad, itemsize, rows, gathered, block == 0)
    keys = min(config.block_n, max(16, block & -block)) if block else config.block_n
    return replace(config, block_n=keys, tiled=config.tiled and block % keys == 0)


def _config(target: str, d_pad: int, itemsize: int, rows: int, gathered: bool, clusters: bool) -> Config:
    if target.startswith("gfx"):
        return _config_amd(d_pad, itemsize, rows)
    if itemsize == 4 or d_pad > 128:
        return _config_wide(d_pad, itemsize, rows)
    tiled = not gathered and (target == "sm_90" or target.startswith("sm_10"))
    if rows < 128:
        return Config(rows, 64, 4, 2, tiled)
    if d_pad == 128 and target.startswith("sm_12"):
        return Config(128, 32, 8, 3)  # 64 keys a tile spill there
    if target == "sm_90" and tiled:
        return Config(128, 128, 8, 2, True)
    return Config(128, 64, 8, 3 if target == "sm_80" and not clusters else 2, tiled)


def _config_wide(d_pad: int, itemsize: int, rows: int) -> Config:
    """fp32 or heads over 128: larger tiles do not fit the register file."""
    rows = min(rows, 32 if itemsize == 2 or d_pad <= 128 else 16)
    return Config(rows, 32 if d_pad * itemsize <= 256 else 16, 4 if rows < 32 else 8, 1)


def _config_amd(d_pad: int, itemsize: int, rows: int) -> Config:
    """64 KiB of local memory a work group."""
    if itemsize == 4 or d_pad > 128:
        return _config_wide(d_pad, itemsize, rows)
    return Config(rows, 64, 4 if rows < 128 else 8, 1)


class Triton(Kernel):
    """Kernel `triton`."""

    name = "triton"
    log_sums = True
    rest_mass = True

    def reasons_on(self, call: Call) -> list[str]:
        """Why it would not serve such a call on such a GPU; empty if it would."""
        old = ["it needs an NVIDIA GPU of capability 8.0 or later"] if 0 < call.nvidia < 80 else []
        return old + _reasons_type(call.dtype, call.head_size)

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """Why it cannot serve; empty if it can."""
        reasons = []
        if not installed():
            reasons.append("triton is not installed: pip install 'heart-attention[gpu]'")
        if interpreted():
            reasons += [] if q is None else _reasons_input(q)
            return reasons
        if not torch.cuda.is_available():
            reasons.append("no CUDA or ROCm device is available to PyTorch")
        elif torch.version.hip is None and torch.cuda.get_device_capability()[0] < 8:
            reasons.append(f"it needs an NVIDIA GPU of capability 8.0 or later, not {target_of(torch.device('cuda'))}")
        if q is not None:
            if not q.is_cuda:
                reasons.append(f"it runs on a GPU and the tensors are on {q.device.type}")
            reasons += _reasons_input(q)
        return reasons

    def plan(self, mask: Any, rest: str = "drop") -> Plan:
        """Plan a mask: the shared lists, and this kernel's work list."""
        return self._plan(mask, rest, part=False)

    def _plan(self, mask: Any, rest: str, part: bool) -> Plan:
        plan = make_plan(mask, self.name, part=part, rest=rest)
        if plan.kind == "cluster":
            plan.extra.update(key_runs(plan)._asdict())
        rows, plan.extra["block"] = mask.block_shape or (-(-plan.n_q // plan.counts.shape[-1]), 0)
        plan.extra["rows"] = tile_rows(rows)
        if plan.rest_ptr is not None:
            plan.extra["bias"] = plan.group_sizes().float().log2().contiguous()  # of empty groups -inf, never listed
        work_list(plan, plan.extra["rows"])
        return plan

    def run(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        scale: float | None = None,
        mass: Tensor | None = None,
    ) -> Tensor:
        """Attention over what the plan keeps, [B, H, N, D]; with `mass`, the kernel writes each query's share too."""
        share = None if mass is None or plan.rest_ptr is None else torch.zeros(q.shape[:3], device=q.device)
        out = self._run(plan, q, k, v, torch.empty_like(q) if out is None else out, scale, None, share)
        if mass is not None:
            mass.copy_(torch.zeros_like(mass) if share is None else share[:, :, : plan.n_q].mean(-1))
        return out

    def run_part(self, mask: Any, q: Tensor, k: Tensor, v: Tensor, rest: str = "drop") -> tuple[Tensor, Tensor]:
        """Attention over a part of each query's keys, possibly none: outputs [B, H, N, D] and log-sums [B, H, N].

        Parts over disjoint keys add up: weigh their outputs with the softmax of their log-sums. Both are fp32, so that
        adding up many parts costs no precision.
        """
        lse = torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device)
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        return self._run(self._plan(mask, rest, part=True), q, k, v, out, None, lse), lse

    def _run(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        scale: float | None,
        lse: Tensor | None,
        share: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        reasons = _reasons_launch(plan, q, k, v, out)
        if reasons:
            raise HeartError(f"the triton kernel cannot run this: {'; '.join(reasons)}")
        launch(plan, q, k, v, out, scale, lse, share)
        if plan.tail:  # whole in every part: equal outputs stay what they are, however they are weighed
            n = plan.n_q
            out[:, :, n:] = F.scaled_dot_product_attention(q[:, :, n:], k[:, :, n:], v[:, :, n:], scale=scale)
        return out


def _reasons_input(q: Tensor) -> list[str]:
    return _reasons_type(q.dtype, q.shape[-1])


def _reasons_type(dtype: torch.dtype, head_size: int) -> list[str]:
    reasons = []
    if dtype not in DTYPES:
        reasons.append(f"it takes fp32, bf16 and fp16, not {dtype}")
    if head_size > HEAD_SIZE_LIMIT:
        reasons.append(f"it takes head sizes up to {HEAD_SIZE_LIMIT}, not {head_size}")
    return reasons


def _reasons_launch(plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[str]:
    reasons = _reasons_input(q)
    if not q.is_cuda and not interpreted():
        reasons.append(f"it runs on a GPU and the tensors are on {q.device.type}")
    if plan.device != q.device:
        reasons.append(f"the plan is on {plan.device} and the tensors on {q.device}")
    if out.stride(-1) != 1:
        reasons.append("the last dimension of out must be contiguous")
    if any((x.shape[2] - 1) * x.stride(2) + x.shape[3] >= 2**31 for x in (q, k, v, out)):
        reasons.append("one head spans more than 2^31 elements of memory")
    return reasons


def tile_rows(size: int) -> int:
    """Query tokens a program takes for blocks (or clusters, on average) of that size: a power of two in 16 … 128."""
    return max(16, min(128, 1 << max(size - 1, 0).bit_length()))


class Runs(NamedTuple):
    """Kept keys of every query cluster as packed runs."""

    runs: Tensor  # int32, first position << RUN_BITS | length
    run_first: Tensor  # int64 [rows], where each row's runs begin
    run_end: Tensor  # int64 [rows], and where they end


def key_runs(plan: Plan) -> Runs:
    """Kept keys of every query cluster as packed runs.

    Kept clusters that touch in sorted order are joined first: they are one stretch of keys. A GPU writes them with room
    for the most that a row can have, because their number is not known to the host; only a list that would take more
    than `RUN_BYTES` is counted first, and the host waits for the count.
    """
    groups = plan.k_starts.shape[-1] - 1
    room = plan.n_k // RUN + (groups + 1) // 2  # each stretch has at most one run that is not full
    if plan.device.type == "cuda" and groups <= RUN_GROUPS and 4 * plan.counts.numel() * room <= RUN_BYTES:
        return key_runs_on_device(plan, room)
    return key_runs_counted(plan)


def key_runs_on_device(plan: Plan, room: int) -> Runs:
    """`key_runs` by one launch, with `room` runs for every row."""
    from . import triton_code

    rows, groups = plan.counts.numel(), plan.k_starts.shape[-1] - 1
    runs = torch.empty(rows * room, dtype=torch.int32, device=plan.device)
    found = torch.empty(rows, dtype=torch.int32, device=plan.device)
    triton_code.kept_runs[(rows,)](
        plan.cols, plan.row_ptr, plan.counts, plan.k_starts, runs, found, plan.counts.shape[-1], groups, room,
        RUN=RUN, BLOCK=max(16, 1 << (groups - 1).bit_length()), **launch_options(4, 1),
    )  # fmt: skip
    first = torch.arange(rows, device=plan.device) * room
    return Runs(runs, first, first + found)


def key_runs_counted(plan: Plan) -> Runs:
    """`key_runs` in PyTorch, a list without room."""
    rows, device = plan.counts.numel(), plan.device
    entry = torch.arange(len(plan.cols), device=device)
    row = torch.searchsorted(plan.counts.reshape(-1).cumsum(0), entry, right=True)  # [entries]
    real, row = row < rows, row.clamp(max=rows - 1)  # a GPU's list has room at its end
    starts, head = plan.k_starts.reshape(-1, plan.k_starts.shape[-1]), row // plan.counts.shape[-1]
    begin, end = starts[head, plan.cols.long()].long(), starts[head, plan.cols.long() + 1].long()
    fresh = torch.ones_like(real)  # entries that open a stretch, and those that close one
    fresh[1:] = (row[1:] != row[:-1]) | (begin[1:] != end[:-1]) | ~real[1:]
    closes = torch.ones_like(real)
    closes[:-1] = fresh[1:]
    opened = begin[torch.where(fresh, entry, 0).cummax(0).values] if len(entry) else begin
    pieces = torch.where(closes & real, (end - opened + RUN - 1) // RUN, 0)
    last = pieces.cumsum(0)
    run = torch.arange(int(pieces.sum()), device=device)  # the one question to the device
    stretch = torch.searchsorted(last, run, right=True)
    position = opened[stretch] + (run - (last - pieces)[stretch]) * RUN
    length = (end[stretch] - position).clamp(max=RUN)
    run_end = torch.zeros(rows, dtype=torch.int64, device=device).index_add_(0, row, pieces).cumsum(0)
    run_first = torch.cat([run_end.new_zeros(1), run_end[:-1]]) if rows else run_end
    return Runs(((position << RUN_BITS) | length).to(torch.int32), run_first, run_end)


def work_list(plan: Plan, block_m: int) -> Tensor:
    """int32 [W, 7]: head, first and end query position, first and end entry of the kept list and of the rest's.

    The longest tiles come first.
    """
    key = f"work{block_m}"
    if key in plan.extra:
        return plan.extra[key]
    heads, rows = plan.shape[0] * plan.shape[1], plan.counts.shape[-1]
    starts = plan.q_starts.expand(heads, -1) if plan.q_starts.ndim == 1 else plan.q_starts.reshape(heads, -1)
    begin, end = starts[:, :-1].reshape(-1).long(), starts[:, 1:].reshape(-1).long()  # [heads * rows]
    first, last = _kept_range(plan)
    rest = torch.zeros_like(plan.row_ptr) if plan.rest_ptr is None else plan.rest_ptr
    row, nth = _tiles((end - begin + block_m - 1) // block_m, heads * (plan.n_q // block_m + rows))
    spare = row == heads * rows  # a GPU's list has room at its end: tiles without queries
    row = row.clamp(max=heads * rows - 1)
    q0 = torch.where(spare, end[row], begin[row] + nth * block_m)
    ranges = (first, last, rest[..., :-1].reshape(-1), rest[..., 1:].reshape(-1))
    work = torch.stack([row // rows, q0, torch.minimum(q0 + block_m, end[row]), *(x[row] for x in ranges)], dim=1)
    size = RUN if plan.kind == "cluster" else plan.extra["block"]  # keys an entry
    work = work[((work[:, 4] - work[:, 3]) * size + work[:, 6] - work[:, 5]).argsort(descending=True, stable=True)]
    plan.extra[key] = work.to(torch.int32).contiguous()
    return plan.extra[key]


def _tiles(tiles: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The row of each tile and which of its row's it is, int64 [W], for rows of so many tiles each.

    On a GPU the list has room for `most`, since their number is not known to the host; the row of spare ones is one beyond.
    """
    ends = tiles.cumsum(0)
    count = most if tiles.is_cuda else int(ends[-1]) if len(ends) else 0
    row = torch.searchsorted(ends, torch.arange(count, device=tiles.device), right=True)
    return row, torch.arange(count, device=tiles.device) - (ends - tiles)[row.clamp(max=len(tiles) - 1)]


def _kept_range(plan: Plan) -> tuple[Tensor, Tensor]:
    """First and end entry of every row in the list of what it keeps, int64 [heads * rows]."""
    if plan.kind == "cluster":
        return plan.extra["run_first"], plan.extra["run_end"]
    first = plan.row_ptr[..., :-1].reshape(-1)
    return first, first + plan.counts.reshape(-1)


def launch(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    scale: float,
    lse: Tensor | None = None,
    share: Tensor | None = None,
) -> None:
    """Start the device kernel over the plan's work list.

    `lse` [B, H, N] takes the log-sums, or `share` [B, H, N] each query's mass in the approximated part: not both.
    """
    from . import triton_code

    d, rest, gathered = q.shape[-1], plan.rest_ptr is not None, plan.q_perm is not None
    d_pad = max(16, 1 << (d - 1).bit_length())
    sizes = (d_pad, q.element_size(), plan.extra["rows"], gathered, plan.extra["block"])
    config = config_for(target_of(q.device), *sizes)
    work = work_list(plan, config.block_m)
    if not len(work):
        return
    if scale < 0:  # the kernel takes the scale inside its maximum, so it must be positive
        q, scale = -q, -scale
    tiles = _descriptors(plan, k, v, config.block_n, d_pad) if config.tiled else None
    means = _means(plan, k, v) if rest else (work, work, work, work)
    triton_code.attention[(len(work),)](
        q, k, v, *(tiles or (None, None)), out, _first(lse, share, work), work,
        plan.extra["runs"] if plan.kind == "cluster" else plan.cols,
        work if plan.q_perm is None else plan.q_perm, work if plan.k_perm is None else plan.k_perm, *means,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        _step(plan.q_perm), _step(plan.k_perm), _step(plan.extra.get("bias")),
        q.shape[1], plan.n_k, plan.k_starts.shape[-1] - 1, q.shape[2], max(scale, SMALLEST_SCALE) * LOG2E,
        D=d, D_PAD=d_pad, BLOCK=plan.extra["block"], RUN=RUN, PERM=gathered, LSE=lse is not None, REST=rest,
        SHARE=share is not None, TILED=tiles is not None, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        PRECISION=PRECISION,
        **launch_options(config.warps, config.stages),
    )  # fmt: skip


def _descriptors(plan: Plan, k: Tensor, v: Tensor, keys: int, d_pad: int) -> tuple[Any, Any] | None:
    """Tensor descriptors of k and v with tiles of `keys` tokens; None where their memory is not aligned to 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    k, v = k[:, :, : plan.n_k], v[:, :, : plan.n_k]  # tokens beyond read as zeros
    for x in (k, v):
        if x.data_ptr() % 16 or any(x.stride(i) * x.element_size() % 16 for i in range(3)):
            return None
    return tuple(TensorDescriptor(x, x.shape, x.stride(), [1, 1, keys, d_pad]) for x in (k, v))  # type: ignore


def _means(plan: Plan, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means of all key groups in the type of the keys, the log2 of their sizes, and which groups rows approximate."""
    from .ops.triton_predict import group_means

    return group_means(plan, k), group_means(plan, v), plan.extra["bias"], plan.rest_cols


def _first(*tensors: Tensor | None) -> Tensor:
    """The first that is there."""
    return next(x for x in tensors if x is not None)


def _step(x: Tensor | None) -> int:
    """Elements from one head to the next, of a permutation or a bias: none when all heads share it."""
    return 0 if x is None or x.ndim == 1 else x.shape[-1]


KERNEL = Triton()
