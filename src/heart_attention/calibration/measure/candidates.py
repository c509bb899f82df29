"""One attention call seen by calibration: the masks of all candidate thresholds, and heads run with any of them.

The candidates share one prediction (XAttention's block scores, SVG2's clustering from scratch, seeded): a
threshold only decides how much of it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import kernels, token_order
from ...masks import count_labels
from ...online.call import CallContext
from ...online.predict import predict_many

DENSE = -1  # a head's choice when it is not sparse


@dataclass(frozen=True)
class Spec:
    """What is tried: a backbone, candidate thresholds (ascending), a token order, a kernel."""

    backbone: Any
    candidates: tuple[float, ...]
    order: Any = "raster"
    kernel: str = "auto"
    scale_clusters: bool = False  # fit SVG2's cluster counts to the number of tokens, as in HeartConfig


class Trials:
    """One attention call: q, k, v [B, H, N, D] and the candidates' masks, item by item of the batch."""

    def __init__(self, spec: Spec, call: CallContext, branch: str, q: Tensor, k: Tensor, v: Tensor, masks: Any = None):
        self.spec, self.q, self.k, self.v = spec, q, k, v
        self.grid, self.text, self.layer = call.grid, call.text, call.layer
        if masks is None:
            with torch.no_grad():
                masks = [self._predict(b, call, branch) for b in range(q.shape[0])]
        self.masks: list[tuple[list[Any], Any]] = masks

    def _predict(self, b: int, call: CallContext, branch: str) -> tuple[list[Any], Any]:
        q, k, v = (x[b : b + 1].detach() for x in (self.q, self.k, self.v))
        text = call.text[b] if call.text else None
        backbone = self.spec.backbone.scaled_to(q.shape[2]) if self.spec.scale_clusters else self.spec.backbone
        names = token_order.names_at(self.spec.order, call.transformer, call.layer, q.shape[1])
        orders = token_order.orders_of(names, call.grid, q.shape[2], text, backbone.block_tokens, q.device)
        key = (call.layer, branch, call.item + b)
        return predict_many(backbone, q, k, v, self.spec.candidates, text, orders=orders, key=key)

    def sparsity(self) -> Tensor:
        """Share of token pairs left out, float64 [K, H], the mean over the batch."""
        each = [torch.stack([1 - m.density()[0] for m in masks]) for masks, _ in self.masks]
        return torch.stack(each).mean(0).cpu()

    def representative(self) -> list[list[int]]:
        """[K][H]: the first candidate with the same mask, or DENSE where nothing is left out."""
        count, heads = len(self.spec.candidates), range(self.q.shape[1])
        kept = [[_kept(mask) for mask in (*masks, full)] for masks, full in self.masks]  # [B][K + 1], each [H, ...]

        def same(h: int, j: int, k: int) -> bool:
            return all(torch.equal(each[j][h], each[k][h]) for each in kept)

        def first(h: int, k: int) -> int:
            return DENSE if same(h, k, count) else next(j for j in range(k + 1) if same(h, j, k))

        return [[first(h, k) for h in heads] for k in range(count)]

    def run(self, heads: Sequence[int], candidate: int) -> Tensor:
        """The outputs of some heads with one candidate (DENSE: everything kept, by the same kernel), [B, h, N, D]."""
        index = list(heads)
        outs = []
        for b, (masks, full) in enumerate(self.masks):
            mask = (full if candidate == DENSE else masks[candidate]).heads(index)
            outs.append(self._kernel(mask, b, index))
        return torch.cat(outs)

    def climb(self) -> Iterator[Tensor]:
        """The outputs of all heads with each candidate in turn, [B, H, N, D].

        A higher threshold keeps what a lower one keeps and more. So where the kernel can, only what is new is
        computed and merged: all candidates together cost little more than the last.
        """
        everyone, reached, lse = list(range(self.q.shape[1])), None, None
        for n in range(len(self.spec.candidates)):
            parts = [_beyond(masks[n - 1] if n else None, masks[n]) for masks, _ in self.masks]
            kernel = kernels.choose(parts[0], self.q.detach(), self.spec.kernel)
            if not kernel.log_sums or any(part is None for part in parts):
                yield self.run(everyone, n)
                reached = None
                continue
            if n and reached is None:  # the one before was computed without its log-sums
                parts = [masks[n] for masks, _ in self.masks]
            made = [kernel.run_part(part, *self._item(b, everyone)) for b, part in enumerate(parts)]
            out, new = (torch.cat(each) for each in zip(*made))
            if reached is not None and lse is not None:
                out, new = _merge(reached, lse, out, new)
            reached, lse = out, new
            yield out

    def mixed(self, choice: Sequence[int], dense: Tensor | None) -> Tensor:
        """All heads, each with its own candidate; DENSE heads are taken from `dense`, [B, H, N, D]."""
        sparse = [h for h, c in enumerate(choice) if c != DENSE]
        if not sparse:
            assert dense is not None
            return dense
        outs = [self._kernel(self.mixed_mask(b, choice).heads(sparse), b, sparse) for b in range(len(self.masks))]
        out = torch.cat(outs)
        if len(sparse) == len(choice):
            return out
        assert dense is not None
        whole = dense.clone()
        whole[:, sparse] = out
        return whole

    def mixed_mask(self, b: int, choice: Sequence[int]) -> Any:
        """The mask of one batch item with each head's own candidate."""
        masks, full = self.masks[b]
        for c in sorted(set(choice) - {DENSE}):
            heads = [h for h, x in enumerate(choice) if x == c]
            full = full.put(heads, masks[c].heads(heads))
        return full

    def _kernel(self, mask: Any, b: int, heads: list[int]) -> Tensor:
        q, k, v = self._item(b, heads)
        kernel = kernels.choose(mask, q, self.spec.kernel)
        return kernel.run(kernel.plan(mask), q, k, v)

    def _item(self, b: int, heads: list[int]) -> tuple[Tensor, ...]:
        """q, k and v of some heads of one batch item."""
        whole = heads == list(range(self.q.shape[1]))
        return tuple(x.detach()[b : b + 1] if whole else x.detach()[b : b + 1, heads] for x in (self.q, self.k, self.v))


def _beyond(lower: Any, mask: Any) -> Any:
    """What `mask` keeps beyond `lower`, as a mask; None if it does not keep all of `lower`."""
    if lower is None:
        return mask
    name = "blocks" if hasattr(mask, "blocks") else "map"
    if not hasattr(mask, name):
        return None
    now, before = getattr(mask, name), getattr(lower, name)
    return None if bool((before & ~now).any()) else replace(mask, **{name: now & ~before})


def _merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the outputs [B, H, N, D] and log-sums [B, H, N] of both."""
    lse = torch.logaddexp(a_lse, b_lse)
    return torch.lerp(b, a, (a_lse - lse).exp().unsqueeze(-1).to(a.dtype)), lse


def _kept(mask: Any) -> Tensor:
    """What a mask of one item keeps, bool [H, rows, columns]; clusters without tokens keep nothing."""
    if hasattr(mask, "blocks"):
        return mask.blocks[0]
    if not hasattr(mask, "map"):
        return mask.dense_tokens()[0]
    q_sizes, k_sizes = count_labels(mask.q_labels, mask.map.shape[2]), count_labels(mask.k_labels, mask.map.shape[3])
    return mask.map[0] & (q_sizes[0] > 0)[..., :, None] & (k_sizes[0] > 0)[..., None, :]
