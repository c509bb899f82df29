"""Choosing a token order for every head from dense generations.

An `OrderProbe` rides along and, at a few steps, runs each head sparsely in every candidate order against the dense
output. An order serves a head well if it leaves little error at the density that the raster's masks have, and if it
needs few blocks for the mass that is asked for. What mass a predictor promises differs from order to order, so each
head gets a threshold with its order: the one with which it keeps as many blocks as it did.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels, token_order
from ..errors import HeartError
from ..online.call import CallContext, Handler
from ..online.predict import predict

FEWER = 2.0  # how much one per cent fewer blocks weigh against one per cent less error
LEAST, MOST = 0.05, 0.999  # thresholds that heads may get
MARGIN = 0.1  # the raster is left only for something better by a tenth: it costs no gathering of tokens


class OrderProbe(Handler):
    """A handler that answers every call densely and notes what each order would have given.

    Args:
        backbone: predicts block masks.
        thresholds: of every head, [transformers][layers] rows.
        steps: where to look.
        kernel: what runs the trials.
    """

    def __init__(
        self, backbone: Any, thresholds: list[list[tuple[float, ...]]], steps: Collection[int], kernel: str = "auto"
    ) -> None:
        if backbone.block_tokens is None:
            raise HeartError(
                f"{backbone.name} has no blocks of tokens, so no order suits it better: use one with blocks"
            )
        self.backbone, self.thresholds, self.steps, self.kernel = backbone, thresholds, frozenset(steps), kernel
        self.names: tuple[str, ...] = ()
        self.notes: dict[tuple[int, int], list[Tensor]] = {}  # of (transformer, layer): [4, orders, H] each

    @torch.no_grad()
    def attend(self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, dense: Any) -> Tensor:
        """Dense attention, with trials at some steps."""
        out = dense(q, k, v)
        if call.grid is not None and (call.step is None or call.step in self.steps):
            for b in range(q.shape[0]):
                one = slice(b, b + 1)
                self._note(call, call.text[b] if call.text else None, q[one], k[one], v[one], out[one])
        return out

    def _note(self, call: CallContext, text: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        grid, block = call.grid, self.backbone.block_tokens
        assert grid is not None and block is not None
        text = text if text is not None and text.prompt + text.unused else None
        self.names = token_order.candidates(grid, block)
        tau = list(self.thresholds[call.transformer][call.layer])
        nearer = [1 - (1 - t) / 2 if t < 1 else t for t in tau]
        trials = []
        for name in self.names:
            order = token_order.permutation(name, grid, q.shape[2], text, block)
            if order is None:
                return
            order = order.to(q.device)
            trials.append([x for taus in (tau, nearer) for x in self._trial(q, k, v, out, taus, text, grid, order)])
        key = (call.transformer, call.layer)
        self.notes.setdefault(key, []).append(torch.stack([torch.stack(x) for x in trials], 1))

    def _trial(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, tau: list[float], text: Any, grid: Any, order: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Density of the heads' masks in this order, and the relative squared error of their outputs, [H] each."""
        orders = token_order.CallOrders(order)
        mask = predict(self.backbone, q, k, v, tau, self.backbone.new_state(), text, orders=orders, grid=grid)
        kernel = kernels.choose(mask, q, self.kernel)
        sparse = kernel.run(kernel.plan(mask), q, k, v)
        error, size = (x[:, :, order].float().square().sum((0, 2, 3)) for x in (sparse - out, out))
        return mask.density()[0].cpu(), (error / size.clamp(min=1e-30)).double().cpu()


@dataclass(frozen=True)
class Tuned:
    """An order for every head, and what it gives beside the raster.

    Args:
        order: names, [L][H], or [transformers][L][H].
        thresholds: of the same shape.
        blocks: blocks kept at equal thresholds, as a share of the raster's.
        error: error of a head's output at equal density, as a share of the raster's; the geometric mean over heads.
        moved: share of heads that leave the raster.
        calls: attention calls that were looked at.
    """

    order: tuple
    thresholds: tuple
    blocks: float
    error: float
    moved: float
    calls: int


def tune(probe: OrderProbe, keep: float = 1.0) -> Tuned:
    """The order that serves each head best over all that the probe saw.

    `keep`: how many blocks each head shall keep, as a share of what it kept in raster order.
    """
    if not 0 < keep < math.inf:
        raise HeartError(f"heads cannot keep {keep} of their blocks: give a share above 0")
    if not probe.notes:
        raise HeartError("no attention call was looked at: generate with the probe attached, at one of its steps")
    transformers = max(t for t, _ in probe.notes) + 1
    layers = max(layer for _, layer in probe.notes) + 1
    means = {key: torch.stack(notes).mean(0) for key, notes in probe.notes.items()}  # [4, orders, H]
    picks = {key: _pick(mean) for key, mean in means.items()}
    missing = [(t, layer) for t in range(transformers) for layer in range(layers) if (t, layer) not in picks]
    if missing:
        raise HeartError(f"layer {missing[0][1]} of transformer {missing[0][0]} was not looked at: give more steps")
    taus = {key: _thresholds(mean, picks[key], probe.thresholds[key[0]][key[1]], keep) for key, mean in means.items()}
    names = {key: tuple(probe.names[i] for i in pick) for key, pick in picks.items()}
    tables = [tuple(tuple(x[t, n] for n in range(layers)) for t in range(transformers)) for x in (names, taus)]
    order, thresholds = tables if transformers > 1 else (x[0] for x in tables)
    return Tuned(order, thresholds, *_gain(means, picks), sum(map(len, probe.notes.values())))


def at_equal_density(mean: Tensor) -> Tensor:
    """Logarithm of each order's error at the raster's density, [orders, H]: its own two points, and the line on."""
    density, error, more, less = mean[0], _log(mean[1]), mean[2], _log(mean[3])
    slope = ((less - error) / (more - density).clamp(min=1e-3)).clamp(-100, 0)
    return error + slope * (density[:1] - density)


def _pick(mean: Tensor) -> list[int]:
    score = at_equal_density(mean) + FEWER * (mean[0] / mean[0, :1]).log()
    score[0] += math.log(1 - MARGIN)
    sparse = mean[0, 0] < 1  # a head that keeps everything stays as it is
    return (score.argmin(0) * sparse).tolist()


def _thresholds(mean: Tensor, pick: list[int], tau: tuple[float, ...], keep: float) -> tuple[float, ...]:
    """Thresholds with which heads keep that share of the raster's blocks.

    Two points of a head's density are known. Above the first, density goes about as log(1 - τ); below, as a power of τ.
    """
    thresholds = []
    for h, (i, t) in enumerate(zip(pick, tau)):
        density, more, wanted = float(mean[0, i, h]), float(mean[2, i, h]), keep * float(mean[0, 0, h])
        if t < 1 and more - density > 1e-3:
            if wanted > density:
                t = 1 - (1 - t) * 0.5 ** ((wanted - density) / (more - density))
            elif wanted < density:
                t *= (wanted / density) ** (math.log((1 + 1 / t) / 2) / math.log(more / density))
        thresholds.append(min(max(t, LEAST), MOST) if t < 1 else t)
    return tuple(thresholds)


def _gain(means: dict, picks: dict) -> tuple[float, float, float]:
    """Blocks and error beside the raster, and the share of heads that left it."""
    chosen, raster, errors, moved = [], [], [], []
    for key, mean in means.items():
        index = torch.tensor(picks[key])
        equal = at_equal_density(mean)
        chosen.append(mean[0].gather(0, index[None])[0])
        raster.append(mean[0, 0])
        errors.append(equal.gather(0, index[None])[0] - equal[0])
        moved.append(index != 0)
    blocks = float(torch.cat(chosen).sum() / torch.cat(raster).sum())
    return blocks, math.exp(float(torch.cat(errors).mean())), float(torch.cat(moved).double().mean())


def _log(x: Tensor) -> Tensor:
    return x.clamp(min=1e-12).log()
