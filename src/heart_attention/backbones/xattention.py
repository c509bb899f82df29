"""XAttention: block scores from antidiagonal sums of S×S tiles of QKᵀ, blocks chosen by top-p.

SEMANTICS in one line: one GEMM of 1/S of QKᵀ's flops, softmax over key groups, sums over blocks, selection in
fp64. Heads are taken in turn and queries in chunks, so nothing near N×N ever exists, and a head's result does
not depend on which others are predicted with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import HeartError
from ..kernels.ops.scores import block_scores
from ..masks import BlockMask, Text, top_p
from .base import Backbone, Key, Shape, Thresholds, check_positive, check_qk, pairs, read_thresholds
from .blocks import covered, stretch

SCORE_FLOATS = 1 << 19  # scores that exist at once, unless one head has more


@dataclass(frozen=True)
class XAttention(Backbone):
    """The XAttention predictor.

    Args:
        stride: tokens S of a group; the score is taken on antidiagonals of S×S tiles.
        block: tokens of a block of the mask.
        pad: "block" pads to a whole block and masks the padding out; "chunk" pads with zeros to the chunk that
            the original takes and lets them take softmax mass, as it does; an integer C does so with chunk C.
    """

    stride: int = 16
    block: int = 128
    pad: str | int = "block"

    name: ClassVar[str] = "xattention"
    default_threshold: ClassVar[float] = 0.9

    def __post_init__(self) -> None:
        check_positive("XAttention", stride=self.stride, block=self.block)
        if self.block % self.stride:
            raise HeartError(
                f"XAttention's block {self.block} does not divide by its stride {self.stride}: "
                "choose a block that is a multiple of the stride"
            )
        if not isinstance(self.pad, str) or self.pad not in ("block", "chunk"):
            check_positive("XAttention", pad=self.pad)
            self._check_chunk(int(self.pad))

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.block

    def prediction_work(self, shape: Shape) -> float:
        """One product of 1/S of the pairs."""
        return pairs(shape) / self.stride

    @torch.no_grad()
    def scores(self, q: Tensor, k: Tensor, order: Tensor | None = None) -> Tensor:
        """Block scores, fp32 [B, H, Mq, Mk]; padded blocks are included when `pad` is the original's."""
        check_qk(q, k)
        order = None if order is None else stretch(order.to(q.device), q.shape[2], None)
        every = [(b, h) for b in range(q.shape[0]) for h in range(q.shape[1])]
        return self._scores(q, k, order, every).unflatten(0, q.shape[:2])

    @torch.no_grad()
    def predict(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Thresholds,
        state: Any = None,
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
    ) -> BlockMask:
        """The blocks to compute (see `Backbone.predict`).

        With text, the mask covers video and valid prompt; unused slots at the end attend only to themselves.
        """
        check_qk(q, k)
        batch, n_heads = q.shape[:2]
        tau = read_thresholds(thresholds, batch, n_heads)
        seen = covered("XAttention", q, k, text, order)
        q, k, n_q, n_k = q[:, :, : seen.n_q], k[:, :, : seen.n_k], seen.n_q, seen.n_k
        rows, cols = seen.blocks((self.block, self.block))
        blocks = torch.ones(batch, n_heads, rows, cols, dtype=torch.bool, device=q.device)
        sparse = (tau < 1).nonzero().tolist()  # the others are dense by definition
        step = max(1, SCORE_FLOATS // (self._blocks(n_q) * self._blocks(n_k)))
        for start in range(0, len(sparse), step):
            part = sparse[start : start + step]
            b, h = torch.tensor(part).unbind(-1)
            share = tau[b, h].unsqueeze(-1).to(q.device)  # [heads, 1]
            blocks[b, h] = self.select(self._scores(q, k, seen.order, part)[:, :rows], share)[..., :cols]
        return seen.mask(blocks, (self.block, self.block))

    @torch.no_grad()
    def predict_many(
        self,
        q: Tensor,
        k: Tensor,
        thresholds: Sequence[float],
        text: Text | None = None,
        *,
        order: Tensor | None = None,
        heads: Sequence[int] | Tensor | None = None,
        key: Key | None = None,
        v: Tensor | None = None,
    ) -> tuple[list[BlockMask], BlockMask]:
        """A mask for each threshold and the full one, from one set of scores."""
        full = self.predict(q, k, 1.0, text=text, order=order)
        scores = self.scores(q[:, :, : full.n_q], k[:, :, : full.n_k], full.order)
        rows, cols = full.blocks.shape[2:]
        selected = [self.select(scores[:, :, :rows], float(tau))[..., :cols] for tau in thresholds]
        return [replace(full, blocks=blocks) if tau < 1 else full for blocks, tau in zip(selected, thresholds)], full

    def select(self, scores: Tensor, thresholds: Tensor | float) -> Tensor:
        """Top-p over block scores [..., Mk], plus key block 0, which the original always keeps; bool."""
        kept = top_p(scores, thresholds, strict=True)
        kept[..., 0] = True
        return kept

    def _blocks(self, n: int) -> int:
        """Blocks of `n` tokens after padding."""
        return self._padded(n) // self.block

    def _padded(self, n: int) -> int:
        """`n` rounded up as `pad` says."""
        if self.pad == "block":
            chunk = self.block
        elif self.pad == "chunk":
            power = 1 << (n - 1).bit_length()
            chunk = max(2048, min(max(2048, power), (1 << 28) // power))
            self._check_chunk(chunk)
        else:
            chunk = int(self.pad)
        return -(-n // chunk) * chunk

    def _check_chunk(self, chunk: int) -> None:
        if chunk % self.block:
            raise HeartError(
                f"XAttention pads to a chunk of {chunk}, which does not divide by the block {self.block}: "
                "choose pad='block' or a multiple of the block"
            )

    def _scores(self, q: Tensor, k: Tensor, order: Tensor | None, which: list[Any]) -> Tensor:
        """Block scores of the heads (b, h) in `which`, fp32 [heads, Mq, Mk]; by what serves this device best."""
        q_heads, k_heads = ([x[b, h] for b, h in which] for x in (q, k))
        shape = (len(which), self._blocks(q.shape[2]), self._blocks(k.shape[2]))
        out = torch.zeros(shape, dtype=torch.float32, device=q.device)
        filled = [one[: -(-q.shape[2] // self.block)] for one in out]  # block rows with tokens, of each head
        per_block = self.block // self.stride
        visible = -(-k.shape[2] // self.stride) if self.pad == "block" else shape[2] * per_block  # key groups with mass
        block_scores(q_heads, k_heads, order, self.stride, per_block, visible, filled)
        return out
