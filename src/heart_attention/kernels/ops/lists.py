"""Which entries of each row of a bool tensor are true, as counts and one list after the other."""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from . import build, native
from .chooser import Op, Way

_LISTS = struct.Struct("7q")  # the struct of rank.c
Lists = tuple[Tensor, Tensor, Tensor]  # counts int32 [...], ends int64 [...], columns int32 [all true entries]


def torch_row_lists(flags: Tensor) -> Lists:
    """Of flags [..., M]: true entries of each row, where each row's list ends, and the lists: the definition."""
    counts = flags.sum(dim=-1, dtype=torch.int32)
    return counts, _ends(counts), _columns(flags)


def _ends(counts: Tensor) -> Tensor:
    return counts.reshape(-1).cumsum(0, dtype=torch.int64).view(counts.shape)


def _columns(flags: Tensor) -> Tensor:
    """The column of each true entry, row by row, int32."""
    if flags.device.type != "cpu":
        return _columns_with_room(flags)
    # numpy picks from a broadcast row: no 64-bit indices, which would dominate memory, and several times quicker
    return torch.from_numpy(np.broadcast_to(np.arange(flags.shape[-1], dtype=np.int32), flags.shape)[flags.numpy()])


def _columns_with_room(flags: Tensor) -> Tensor:
    """The same with room for all entries, the end unwritten: how many there are need not be asked of the device."""
    flat = flags.reshape(-1)
    place = torch.where(flat, flat.cumsum(0) - 1, flat.numel())
    columns = torch.arange(flags.shape[-1], dtype=torch.int32, device=flags.device).expand(flags.shape).reshape(-1)
    return columns.new_zeros(flat.numel() + 1).scatter_(0, place, columns)[:-1]


def _c_row_lists(flags: Tensor) -> Lists:
    flags = flags.contiguous()
    counts = torch.empty(flags.shape[:-1], dtype=torch.int32)
    head = (counts.numel(), flags.shape[-1], flags.data_ptr())
    build.call("heart_lists", _LISTS, *head, 0, counts.data_ptr(), 0, build.threads())
    ends = _ends(counts)
    listed = torch.empty(int(ends.view(-1)[-1]) if ends.numel() else 0, dtype=torch.int32)
    build.call("heart_lists", _LISTS, *head, ends.data_ptr(), counts.data_ptr(), listed.data_ptr(), build.threads())
    return counts, ends, listed


def _reasons(flags: Tensor | None = None) -> list[str]:
    if flags is not None and flags.device.type != "cpu":
        return [f"the flags are on {flags.device}, not on the CPU"]
    return native.reasons_not()


row_lists = Op("row lists", Way("c", _c_row_lists, _reasons), Way("torch", torch_row_lists))
