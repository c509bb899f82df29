"""The plan every kernel takes: a mask turned once into lists of kept blocks, boundaries and permutations."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError
from ..masks import Mask
from ..masks.base import check_rest
from .ops.lists import row_lists


@dataclass(frozen=True)
class Plan:
    """What to compute, in the form kernels read.

    Args:
        kind: "block" (equal blocks, boundaries shared by all heads) or "cluster" (own boundaries per head).
        row_ptr: int64 [B, H, Mq + 1]; row i of a head keeps `cols[row_ptr[i]:row_ptr[i + 1]]`.
        cols: int32 [kept]; kept key blocks, ascending inside a row; on a GPU with room behind them.
        counts: int32 [B, H, Mq]; kept key blocks of each row.
        q_starts, k_starts: int32 block boundaries in sorted positions, [M + 1] for blocks, [B, H, C + 1] for
            clusters; an empty cluster has zero length.
        q_perm, k_perm: int32 token at each sorted position, [n] shared by all heads, [B, H, N], or None for identity.
        n_q, n_k: tokens that the blocks cover.
        tail: further tokens after them that attend only to one another (unused text slots).
        rest: what becomes of the groups that are left out: "drop", "mean", "first-order", or in parts "only".
        rest_ptr, rest_cols: int64 [B, H, Mq + 1] and int32 [approximated]: row i of a head approximates the key groups
            `rest_cols[rest_ptr[i]:rest_ptr[i + 1]]` by their means; None if nothing is approximated.
        kernel: name of the kernel that made it.
        extra: what that kernel alone wants to keep.
    """

    kind: str
    row_ptr: Tensor
    cols: Tensor
    counts: Tensor
    q_starts: Tensor
    k_starts: Tensor
    q_perm: Tensor | None
    k_perm: Tensor | None
    n_q: int
    n_k: int
    tail: int = 0
    rest: str = "drop"
    rest_ptr: Tensor | None = None
    rest_cols: Tensor | None = None
    kernel: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, H)."""
        return self.counts.shape[0], self.counts.shape[1]

    @property
    def tokens(self) -> int:
        """Length of the sequence, unused tail included."""
        return self.n_q + self.tail

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self.cols.device

    @property
    def nbytes(self) -> int:
        """Bytes its tensors hold."""
        held = [getattr(self, f.name) for f in fields(self)] + list(self.extra.values())
        return sum(t.nbytes for t in held if isinstance(t, Tensor | Plan))

    def to(self, device: torch.device | str) -> Plan:
        """The same plan on another device."""
        moved = {f.name: _move(getattr(self, f.name), device) for f in fields(self) if f.name != "extra"}
        return replace(self, **moved, extra={name: _move(value, device) for name, value in self.extra.items()})

    def group_sizes(self) -> Tensor:
        """Tokens in each key group, int32 [Mk] or [B, H, Mk]."""
        return self.k_starts.diff(dim=-1)

    def boundaries(self, side: str, b: int, h: int) -> Tensor:
        """Block boundaries of one head, [M + 1]; `side` is "q" or "k"."""
        starts = self.q_starts if side == "q" else self.k_starts
        return starts if starts.ndim == 1 else starts[b, h]

    def permutation(self, side: str, b: int, h: int) -> Tensor | None:
        """Token at each sorted position of one head, [n], or None for identity; `side` is "q" or "k"."""
        perm = self.q_perm if side == "q" else self.k_perm
        return perm if perm is None or perm.ndim == 1 else perm[b, h]


def _move(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor | Plan) else value


def make_plan(
    mask: Mask,
    kernel: str = "",
    extra: dict[str, Any] | None = None,
    part: bool = False,
    rest: str = "drop",
    rests: tuple[str, ...] = ("drop", "mean"),
) -> Plan:
    """Plan a mask; a query row that holds tokens but has no key is an error, unless in `part`.

    In a part `rest` may also be "only": nothing is kept, and what the mask leaves out is approximated. `rests` are those
    that the kernel knows.
    """
    check_rest(rest, (*rests, "only") if part else rests)
    if rest != "drop":
        mask = mask.for_rest("mean")
    layout, flags = mask.layout(), mask.flags
    filled = [starts.diff(dim=-1) > 0 for starts in layout[:2]]  # groups that hold tokens
    kept = flags if layout.k_starts.ndim == 1 else flags & filled[0][..., :, None] & filled[1][..., None, :]
    lists = _lists(torch.zeros_like(kept) if rest == "only" else kept)
    approximated = None if rest == "drop" else _lists(mask.approximated(filled))
    if not part:
        _refuse_empty(lists["counts"] if approximated is None else lists["counts"] + approximated["counts"], filled[0])
    more = {} if approximated is None else {"rest_ptr": approximated["row_ptr"], "rest_cols": approximated["cols"]}
    return Plan(
        mask.kind, **lists, **layout._asdict(), n_q=mask.n_q, n_k=mask.n_k, tail=mask.tail, rest=rest, **more,
        kernel=kernel, extra=extra or {},
    )  # fmt: skip


def _lists(kept: Tensor) -> dict[str, Tensor]:
    """What each row of bool [B, H, M, K] lists, as `row_ptr`, `cols` and `counts` of a plan."""
    counts, ends, cols = row_lists(kept)
    row_ptr = torch.cat([ends[..., :1] - counts[..., :1], ends], dim=-1)  # [B, H, M + 1]
    return {"row_ptr": row_ptr.contiguous(), "cols": cols, "counts": counts}


def _refuse_empty(counts: Tensor, filled: Tensor) -> None:
    """Refuse a row with tokens but without keys: counts [B, H, Mq], filled [Mq] or [B, H, Mq]."""
    empty = (counts == 0) & filled
    if empty.is_cuda:  # told by the device when it gets there: asking would make every call wait
        torch._assert_async(~empty.any(), "a query row holds tokens but keeps no key block: keep at least one")
        return
    if bool(empty.any()):
        b, h, row = (int(x) for x in empty.nonzero()[0])
        raise HeartError(
            f"query row {row} of head {h} (batch item {b}) holds tokens but keeps no key block, "
            f"so its softmax is undefined: keep at least one block in every row"
        )
