"""XAttention: block scores from antidiagonal sums of S×S tiles of QKᵀ, blocks chosen by top-p.

SEMANTICS in one line: one GEMM of 1/S of QKᵀ's flops, softmax over key groups, sums over blocks, selection in
fp64. Heads are taken in turn and queries in chunks, so nothing near N×N ever exists, and a head's result does
not depend on which others are predicted with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import HeartError
from ..kernels.ops import native as native
from ..masks import BlockMask, Text, top_p
from .base import Key, NoState, Settings, Thresholds, check_positive, check_qk, read_text, read_thresholds

CHUNK_BLOCKS = 64  # query blocks a GEMM: enough to run at full speed, few enough for its result to stay in cache
SCORE_FLOATS = 1 << 19  # scores that exist at once, unless one head has more


@dataclass(frozen=True)
class XAttention(Settings):
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
        if self.pad not in ("block", "chunk"):
            check_positive("XAttention", pad=self.pad)
            self._check_chunk(int(self.pad))

    def new_state(self) -> NoState:
        """XAttention remembers nothing."""
        return NoState()

    def scaled_to(self, n_tokens: int) -> XAttention:
        """Itself: nothing here depends on the number of tokens."""
        return self

    @torch.no_grad()
    def scores(self, q: Tensor, k: Tensor, order: Tensor | None = None) -> Tensor:
        """Block scores, fp32 [B, H, Mq, Mk]; padded blocks are included when `pad` is the original's."""
        check_qk(q, k)
        order = None if order is None else _stretch(order.to(q.device), q.shape[2], None)
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
        batch, n_heads, n, _ = q.shape
        tau = read_thresholds(thresholds, batch, n_heads)
        q, k, order, tail = self._without_tail(q, k, text, order)
        n_q, n_k = n - tail, k.shape[2]
        rows, cols = -(-n_q // self.block), -(-n_k // self.block)
        blocks = torch.ones(batch, n_heads, rows, cols, dtype=torch.bool, device=q.device)
        sparse = (tau < 1).nonzero().tolist()  # the others are dense by definition
        step = max(1, SCORE_FLOATS // (self._blocks(n_q) * self._blocks(n_k)))
        for start in range(0, len(sparse), step):
            part = sparse[start : start + step]
            b, h = torch.tensor(part).unbind(-1)
            share = tau[b, h].unsqueeze(-1).to(q.device)  # [heads, 1]
            blocks[b, h] = self.select(self._scores(q, k, order, part)[:, :rows], share)[..., :cols]
        return BlockMask(blocks, self.block, n_q, n_k, order, tail, text=read_text(text, n))

    def select(self, scores: Tensor, thresholds: Tensor | float) -> Tensor:
        """Top-p over block scores [..., Mk], plus key block 0, which the original always keeps; bool."""
        kept = top_p(scores, thresholds, strict=True)
        kept[..., 0] = True
        return kept

    def _without_tail(
        self, q: Tensor, k: Tensor, text: Text | None, order: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """q, k without unused text slots, the order stretched over the prompt, and the number of slots."""
        n = q.shape[2]
        text = read_text(text, n)
        tail = text.unused if text else 0
        if (text is not None or order is not None) and k.shape[2] != n:
            raise HeartError(f"text or a token order needs as many keys as queries, not {k.shape[2]} and {n}")
        if tail and text is not None and text.end != n:
            raise HeartError(
                f"unused text slots end at token {text.end} of {n}: XAttention can leave them out only "
                "at the end of the sequence"
            )
        if order is not None:
            order = _stretch(order.to(q.device), n - tail, text)
        return q[:, :, : n - tail], k[:, :, : n - tail], order, tail

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
        if _gpu_serves(self, q):
            return _gpu_scores(self, q_heads, k_heads, order, shape)
        out = torch.zeros(shape, dtype=torch.float32, device=q.device)
        filled = [one[: -(-q.shape[2] // self.block)] for one in out]  # block rows with tokens, of each head
        s, per_block = self.stride, self.block // self.stride
        visible = -(-k.shape[2] // s) if self.pad == "block" else shape[2] * per_block  # key groups with mass
        if native.serves(q, k):
            native.block_scores(q_heads, k_heads, order, s, per_block, visible, filled)
        else:
            for one, other, scores in zip(q_heads, k_heads, filled):
                _torch_scores(one, other, order, s, per_block, visible, scores)
        return out


def _gpu_serves(settings: XAttention, q: Tensor) -> bool:
    from ..kernels.ops import triton_predict

    reasons = triton_predict.score_reasons(settings.stride, settings.block)
    return triton_predict.serves(q, "XAttention", *reasons)


def _gpu_scores(
    settings: XAttention, q: list[Tensor], k: list[Tensor], order: Tensor | None, shape: tuple[int, int, int]
) -> Tensor:
    from ..kernels.ops import triton_predict

    s, block, masked = settings.stride, settings.block, settings.pad == "block"
    more: dict[str, Any] = {"order": order, "q_blocks": shape[1], "k_blocks": shape[2], "masked": masked}
    each = [triton_predict.xattention_scores(a[None, None], b[None, None], s, block, **more) for a, b in zip(q, k)]
    return torch.cat(each).squeeze(1)


def _torch_scores(
    q: Tensor, k: Tensor, order: Tensor | None, s: int, per_block: int, visible: int, out: Tensor
) -> None:
    """Block scores of one head in plain PyTorch: the definition. q, k [N, D] -> out fp32 [Mq, Mk].

    `visible` groups of keys take part in the softmax; those after the last token have logit 0.
    """
    keys = _flipped_keys(k, order, s, per_block, out.shape[1])  # [per_block · Mk, S·D]
    scale = 1 / (s * math.sqrt(q.shape[-1]))
    block, step = s * per_block, min(CHUNK_BLOCKS, out.shape[0])
    buffer = torch.empty(step * per_block, keys.shape[0], dtype=torch.float32, device=q.device)
    for start in range(0, out.shape[0], step):
        stop = min(start + step, out.shape[0])
        rows = _query_groups(q, order, s, start * block, stop * block)  # [groups, S·D]
        logits = buffer[: rows.shape[0]]
        torch.addmm(logits, rows, keys.T, beta=0, alpha=scale, out=logits)
        _block_sums(logits, per_block, keys.shape[0] - visible, out[start:stop])


def _flipped_keys(k: Tensor, order: Tensor | None, s: int, per_block: int, blocks: int) -> Tensor:
    """Keys in groups of S tokens, each group reversed, zero-padded, in fp32: [per_block · blocks, S·D].

    Reversing keys instead of queries leaves the queries a plain view. The groups come ordered by their place
    in a block first and by block second, so that summing over a block is a sum of whole vectors.
    """
    n, d = k.shape
    padded = blocks * per_block * s
    token = torch.arange(padded, device=k.device).view(blocks, per_block, s).flip(-1).transpose(0, 1).flatten()
    if padded == n:
        return _rows(k, token if order is None else order[token]).view(-1, s * d)
    keys = torch.zeros(padded, d, dtype=torch.float32, device=k.device)
    place = (token < n).nonzero().squeeze(-1)
    token = token[place]
    keys[place] = _rows(k, token if order is None else order[token])
    return keys.view(-1, s * d)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [N, D] as fp32."""
    return x.index_select(0, index).float()


def _query_groups(q: Tensor, order: Tensor | None, s: int, start: int, stop: int) -> Tensor:
    """Query tokens start..stop in groups of S, fp32 [groups, S·D]; a view where it can be.

    The last group is padded with zeros; groups that are all padding are left out.
    """
    n, d = q.shape
    real = min(stop, n)
    part = q[start:real].float() if order is None else _rows(q, order[start:real])
    missing = -(real - start) % s
    if missing:
        part = torch.nn.functional.pad(part, (0, 0, 0, missing))
    return part.reshape(-1, s * d)


def _block_sums(logits: Tensor, per_block: int, hidden: int, out: Tensor) -> None:
    """Softmax of logits [groups, per_block · Mk], summed over blocks into out [Mq, Mk]; spoils `logits`.

    `hidden` key groups at the end of the last block are padding without mass.
    """
    tile = logits.view(logits.shape[0], per_block, -1)
    if hidden:
        tile[:, per_block - hidden :, -1] = -math.inf
    logits.sub_(logits.amax(1, keepdim=True)).exp_()
    mass = tile.sum(1)  # [groups, Mk]
    mass /= mass.sum(1, keepdim=True)
    missing = -mass.shape[0] % per_block
    if missing:
        mass = torch.nn.functional.pad(mass, (0, 0, 0, missing))
    torch.sum(mass.view(-1, per_block, mass.shape[1]), 1, out=out)


def _stretch(order: Tensor, n: int, text: Text | None) -> Tensor:
    """The order of all `n` tokens: an order of the video tokens alone leaves the prompt after them as it is."""
    video = n if text is None else text.start
    if text is not None and order.numel() == video and text.start + text.prompt == n:
        order = torch.cat([order.long(), torch.arange(video, n, device=order.device)])
    if order.numel() != n:
        raise HeartError(
            f"an order of {order.numel()} tokens does not fit the {n} tokens of video and prompt: "
            "give all of them, or the video alone with the text at the end"
        )
    if order.device.type == "cpu" and not 0 <= int(order.min()) <= int(order.max()) < n:
        raise HeartError(f"an order names tokens outside 0..{n - 1}: give a permutation of the {n} tokens")
    return order.long()
