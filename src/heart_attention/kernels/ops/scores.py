"""XAttention's block scores: softmax of antidiagonal sums over S×S tiles of QKᵀ, summed over blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import native, triton_predict
from .chooser import Op, Way

CHUNK_BLOCKS = 64  # query blocks a GEMM: enough to run at full speed, few enough for its result to stay in cache
Heads = list[Tensor]  # [N, D] each, alike in shape


def torch_block_scores(
    q: Heads, k: Heads, order: Tensor | None, stride: int, per_block: int, visible: int, out: Heads
) -> None:
    """Block scores of some heads in plain PyTorch: the definition. q, k [N, D] each -> out fp32 [Mq, Mk] each.

    `visible` groups of keys take part in the softmax; those after the last token have logit 0.
    """
    for one, other, scores in zip(q, k, out):
        _head_scores(one, other, order, stride, per_block, visible, scores)


def _head_scores(q: Tensor, k: Tensor, order: Tensor | None, s: int, per_block: int, visible: int, out: Tensor) -> None:
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


def _triton_block_scores(
    q: Heads, k: Heads, order: Tensor | None, stride: int, per_block: int, visible: int, out: Heads
) -> None:
    """The same by the GPU's kernels, all heads in one launch."""
    if not q:
        return
    masked = visible == -(-len(k[0]) // stride)  # padding has no mass
    sizes = {"q_blocks": out[0].shape[0], "k_blocks": out[0].shape[1]}
    heads = (torch.stack(list(x))[None] for x in (q, k))  # [1, H, N, D]
    found = triton_predict.xattention_scores(*heads, stride, stride * per_block, order=order, masked=masked, **sizes)
    torch._foreach_copy_(list(out), list(found[0]))


def _triton_reasons(
    q: Heads | None = None, k: Heads | None = None, order: Tensor | None = None, stride: int = 16, per_block: int = 8,
    *more: object,
) -> list[str]:  # fmt: skip
    sizes = triton_predict.score_reasons(stride, stride * per_block)
    return triton_predict.op_reasons(None if q is None else q[0]) + sizes


def _c_reasons(q: Heads | None = None, k: Heads | None = None, *more: object) -> list[str]:
    return native.reasons_not() if q is None or k is None else native.reasons_not(q[0], k[0])


block_scores = Op(
    "block scores",
    Way("triton", _triton_block_scores, _triton_reasons),
    Way("c", native.block_scores, _c_reasons),
    Way("torch", torch_block_scores),
)
