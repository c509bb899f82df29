"""The plan every kernel takes: a mask turned once into lists of kept blocks, boundaries and permutations."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError


@dataclass(frozen=True)
class Plan:
    """What to compute, in the form kernels read.

    Args:
        kind: "block" (equal blocks, boundaries shared by all heads) or "cluster" (own boundaries per head).
        row_ptr: int64 [B, H, Mq + 1]; row i of a head keeps `cols[row_ptr[i]:row_ptr[i + 1]]`.
        cols: int32 [kept]; kept key blocks, ascending inside a row.
        counts: int32 [B, H, Mq]; kept key blocks of each row.
        q_starts, k_starts: int32 block boundaries in sorted positions, [M + 1] for blocks, [B, H, C + 1] for
            clusters; an empty cluster has zero length.
        q_perm, k_perm: int32 token at each sorted position, [n] shared by all heads, [B, H, N], or None for identity.
        n_q, n_k: tokens that the blocks cover.
        tail: further tokens after them that attend only to one another (unused text slots).
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
        return sum(t.nbytes for t in held if isinstance(t, Tensor))

    def to(self, device: torch.device | str) -> Plan:
        """The same plan on another device."""
        moved = {f.name: _move(getattr(self, f.name), device) for f in fields(self) if f.name != "extra"}
        return replace(self, **moved, extra={name: _move(value, device) for name, value in self.extra.items()})

    def boundaries(self, side: str, b: int, h: int) -> Tensor:
        """Block boundaries of one head, [M + 1]; `side` is "q" or "k"."""
        starts = self.q_starts if side == "q" else self.k_starts
        return starts if starts.ndim == 1 else starts[b, h]

    def permutation(self, side: str, b: int, h: int) -> Tensor | None:
        """Token at each sorted position of one head, [n], or None for identity; `side` is "q" or "k"."""
        perm = self.q_perm if side == "q" else self.k_perm
        return perm if perm is None or perm.ndim == 1 else perm[b, h]


def _move(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def make_plan(mask: Any, kernel: str = "", extra: dict[str, Any] | None = None, part: bool = False) -> Plan:
    """Plan a BlockMask or ClusterMask; a query row that holds tokens but keeps nothing is an error, unless in `part`."""
    parts, empty = _block_parts(mask) if hasattr(mask, "blocks") else _cluster_parts(mask)
    if not part:
        _refuse_empty(empty)
    return Plan(**parts, kernel=kernel, extra=extra or {})


def _block_parts(mask: Any) -> tuple[dict[str, Any], Tensor]:
    """Fields of a plan, and which rows are empty, bool [B, H, Mq]."""
    blocks = mask.blocks  # bool [B, H, Mq, Mk]
    starts = {side: _even_starts(n, mask.block, blocks.device) for side, n in (("q", mask.n_q), ("k", mask.n_k))}
    expected = (len(starts["q"]) - 1, len(starts["k"]) - 1)
    if tuple(blocks.shape[2:]) != expected:
        raise HeartError(
            f"a mask of {tuple(blocks.shape[2:])} blocks does not cover {mask.n_q} x {mask.n_k} tokens in blocks of "
            f"{mask.block}: it needs {expected}"
        )
    if mask.order is not None:
        for order in mask.order.reshape(-1, mask.order.shape[-1]):
            _check_order(order, mask.n_q, mask.n_k)
    order = None if mask.order is None else mask.orders().to(device=blocks.device, dtype=torch.int32).contiguous()
    lists = _kept_lists(blocks)
    made = dict(
        kind="block", **lists, q_starts=starts["q"], k_starts=starts["k"], q_perm=order, k_perm=order,
        n_q=mask.n_q, n_k=mask.n_k, tail=mask.tail,
    )  # fmt: skip
    return made, lists["counts"] == 0


def _cluster_parts(mask: Any) -> tuple[dict[str, Any], Tensor]:
    kept = mask.map  # bool [B, H, Cq, Ck]
    q_perm, q_starts = _sort_labels(mask.q_labels, kept.shape[2], "query")
    k_perm, k_starts = _sort_labels(mask.k_labels, kept.shape[3], "key")
    q_full, k_full = q_starts.diff(dim=-1) > 0, k_starts.diff(dim=-1) > 0  # [B, H, C]: holds tokens
    lists = _kept_lists(kept & q_full[..., :, None] & k_full[..., None, :])
    made = dict(
        kind="cluster", **lists, q_starts=q_starts, k_starts=k_starts, q_perm=q_perm, k_perm=k_perm,
        n_q=q_perm.shape[-1], n_k=k_perm.shape[-1], tail=0,
    )  # fmt: skip
    return made, (lists["counts"] == 0) & q_full


def _even_starts(n: int, block: int, device: torch.device) -> Tensor:
    """Boundaries of equal blocks, the last one cut: [ceil(n / block) + 1]."""
    starts = torch.arange(0, n + block, block, dtype=torch.int32, device=device)
    return starts.clamp_(max=n)


def _check_order(order: Tensor, n_q: int, n_k: int) -> None:
    seen = torch.zeros(n_q, dtype=torch.bool, device=order.device)
    fits = n_q == n_k and order.shape == (n_q,) and 0 <= int(order.min()) and int(order.max()) < n_q
    if fits:
        seen[order.long()] = True
    if not fits or not bool(seen.all()):
        raise HeartError(
            f"the token order of a mask over {n_q} query and {n_k} key tokens is not a permutation of both: "
            f"give each of 0 … {n_q - 1} once"
        )


def _kept_lists(kept: Tensor) -> dict[str, Tensor]:
    """CSR of bool [B, H, M, K]; indices stay int64 only as long as they must (they dominate the memory)."""
    columns = max(kept.shape[3], 1)
    counts = kept.sum(dim=-1, dtype=torch.int32)  # [B, H, M]
    cols = kept.reshape(-1).nonzero().view(-1).remainder_(columns).to(torch.int32)
    ends = counts.reshape(-1).cumsum(0, dtype=torch.int64).view(counts.shape)
    row_ptr = torch.cat([ends[..., :1] - counts[..., :1], ends], dim=-1)  # [B, H, M + 1]
    return {"row_ptr": row_ptr.contiguous(), "cols": cols, "counts": counts}


def _sort_labels(labels: Tensor, clusters: int, side: str) -> tuple[Tensor, Tensor]:
    """Tokens sorted by label (stable) and the boundaries of the clusters: int32 [B, H, N], [B, H, C + 1]."""
    if int(labels.min()) < 0 or int(labels.max()) >= clusters:
        raise HeartError(
            f"{side} labels run from {int(labels.min())} to {int(labels.max())} but the map has {clusters} clusters"
        )
    perm = _stable_argsort(labels)
    sizes = torch.zeros(*labels.shape[:2], clusters + 1, dtype=torch.int32, device=labels.device)
    sizes.scatter_add_(2, labels.long() + 1, torch.ones((), dtype=torch.int32).to(labels.device).expand(labels.shape))
    return perm, sizes.cumsum(dim=-1, dtype=torch.int32)


def _stable_argsort(labels: Tensor) -> Tensor:
    """numpy sorts 16-bit integers by radix, several times quicker than torch on a CPU."""
    if labels.device.type != "cpu":
        return labels.argsort(dim=-1, stable=True).to(torch.int32)
    order = labels.to(torch.int16).numpy().argsort(axis=-1, kind="stable")
    return torch.from_numpy(order).to(torch.int32)


def _refuse_empty(empty: Tensor) -> None:
    if bool(empty.any()):
        b, h, row = (int(x) for x in empty.nonzero()[0])
        raise HeartError(
            f"query row {row} of head {h} (batch item {b}) holds tokens but keeps no key block, "
            f"so its softmax is undefined: keep at least one block in every row"
        )
