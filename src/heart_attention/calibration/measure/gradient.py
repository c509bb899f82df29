"""Calibration by gradients: what every move of every head does to the velocity error, from one backward pass.

Notation: head outputs o, velocity y, error `e = ⟨ε, Wε⟩/‖y‖²` (the spectral error as a quadratic form), δ_k the
change of a head's output when its operating point moves to candidate k, g the gradient of a functional of the
velocity with respect to a head's output. At an assignment of points (or at the dense model):

- cotangent `2Wε/‖y‖²` gives `m_k = ⟨g, δ_k⟩`: the first-order change of the *joint* error, with all cross-head
  and cross-layer terms in it;
- a random cotangent `W^½ n/‖y‖`, n standard normal, gives `E[⟨g, δ_k⟩²] = ‖W^½ J δ_k‖²/‖y‖²`: the head's own
  second-order term, at the dense model the paper's isolated error. Squaring g·δ token by token and adding the
  squares up leaves out what tokens have in common, a few per cent, and needs two draws where the square of the sum
  needs dozens.

The model is differentiated block by block from stored block inputs: each block is run again with gradients, its
graph is cut at the attention outputs, and attention itself is differentiated by hand over what masks keep and approximate.
So memory is that of one block's graph plus one stream a block. Masks are constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import HeartError
from ...kernels.ops.backward import attention_backward, serves
from . import draws
from . import velocity_error as errors
from .candidates import DENSE, ChosenPoints, ItemMasks, Spec, Trials
from .replay import Replay, Stream, frozen
from .trajectory import Context

NOISES = 2  # random cotangents a pass
ESTIMATOR = f"tokens-{NOISES}"  # names how `second` is estimated: records of another way are not mixed with these

Choice = Sequence[Sequence[int]]  # [L][H]: index of a candidate, or DENSE


_ARRAYS = ("sparsity", "cost", "realised", "first", "second")


# ---------------------------------------- one context


@dataclass
class Pass:
    """What one context says at one assignment; arrays are float64 [L, H, K]."""

    error: float
    bands: list[float]
    sparsity: np.ndarray  # of every candidate, on the q and k of this assignment
    cost: np.ndarray  # computed keys of every candidate, as a share of all
    realised: np.ndarray  # [L, H]: sparsity of the assignment itself
    first: np.ndarray  # m: first-order change of the joint error (zeros for the dense assignment)
    second: np.ndarray  # D: the token-diagonal self term

    def to_dict(self) -> dict[str, Any]:
        """The pass as plain JSON."""
        arrays = {n: getattr(self, n).tolist() for n in _ARRAYS}
        return {"error": self.error, "bands": self.bands, **arrays}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Pass:
        """The inverse of `to_dict`."""
        arrays = {n: np.asarray(data[n], dtype=np.float64) for n in _ARRAYS}
        return cls(data["error"], list(data["bands"]), **arrays)


@dataclass
class _Branch:
    """One guidance branch in its forward and backward pass."""

    name: str
    inputs: dict[str, Any]
    output: Tensor
    streams: list[Stream]
    masks: dict[tuple[int, int], list[ItemMasks]]  # (layer, item) -> masks of the candidates
    tables: dict[tuple[int, int], Tensor]  # (layer, item) -> sparsity and cost of the candidates, [2, K, H]
    outs: dict[tuple[int, int], Tensor]  # (layer, item) -> attention's outputs, in host memory
    noise: dict[int, Tensor] = field(default_factory=dict)  # layer -> ⟨g, δ⟩ of random cotangents, [R, K, H, N]
    change: dict[int, Tensor] = field(default_factory=dict)  # layer -> ⟨g, δ⟩ of the joint error, [K, H]


def forward(replay: Replay, context: Context, spec: Spec, choice: Choice) -> list[_Branch]:
    """All branches at an assignment, with block inputs, masks and attention's outputs kept for the backward pass."""
    branches = []
    for branch in context.branches:
        state = _Branch(branch.name, branch.inputs, branch.output, [], {}, {}, {})

        def serve(call: Any, q: Tensor, k: Tensor, v: Tensor, dense: Any, state: _Branch = state) -> Tensor:
            trials, place, row = Trials(spec, call, state.name, q, k, v), (call.layer, call.item), choice[call.layer]
            state.masks[place] = trials.masks
            state.tables[place] = torch.stack([trials.sparsity(), trials.cost()])
            out = trials.mixed(row, dense(q, k, v) if DENSE in row else None)
            state.outs[place] = out.cpu()
            return out

        with torch.no_grad(), replay.handler.serving(serve):
            state.output, state.streams = replay.forward_recorded(branch.inputs)
        branches.append(state)
    return branches


def verify(
    replay: Replay, context: Context, spec: Spec, choice: Choice, measure: errors.ErrorMeasure
) -> dict[str, Any]:
    """The true joint error, realised sparsity and cost of an assignment in one context: plain forwards."""
    seen: list[Tensor] = []  # of every call [2, H]: sparsity and cost of each head at its own point
    outputs = []
    rows = [ChosenPoints(spec, row) for row in choice]
    for branch in context.branches:

        def serve(call: Any, q: Tensor, k: Tensor, v: Tensor, dense: Any, name: str = branch.name) -> Tensor:
            row = rows[call.layer]
            trials = Trials(row.spec, call, name, q, k, v)
            seen.append(_at_choice(trials, row.choice))
            return trials.mixed(row.choice, dense(q, k, v) if DENSE in row.choice else None)

        with torch.no_grad(), replay.handler.serving(serve):
            outputs.append(replay.forward(branch.inputs))
    velocity, reference = context.combine(outputs), context.reference()
    # Several calls a layer come from models that attend item by item.
    by_layer = torch.stack(seen).unflatten(0, (len(context.branches), len(choice), -1)).mean((0, 2))  # [L, 2, H]
    return {
        "error": measure.measure(velocity, reference),
        "bands": errors.bands(velocity, reference).tolist(),
        "sparsity": by_layer[:, 0].tolist(),
        "cost": by_layer[:, 1].tolist(),
    }


def _at_choice(trials: Trials, choice: Sequence[int]) -> Tensor:
    """Sparsity and cost of each head at its own point, [2, H]; dense heads leave nothing out."""
    tables = torch.stack([trials.sparsity(), trials.cost()])  # [2, K, H]
    dense = tables.new_tensor([0.0, 1.0])
    return torch.stack([dense if c == DENSE else tables[:, c, h] for h, c in enumerate(choice)], -1)


def differentiate(
    replay: Replay, context: Context, spec: Spec, choice: Choice, measure: errors.ErrorMeasure, seed: int,
    draw: int = 0,
) -> Pass:  # fmt: skip
    """One forward at `choice`, one backward with all cotangents (only the random ones at the dense assignment)."""
    if not isinstance(measure, errors.QuadraticError):
        raise HeartError(
            f"the error {measure.name!r} is not a quadratic form of the velocity, so gradients cannot calibrate with "
            "it: choose spectral or mse, or --method probes"
        )
    branches = forward(replay, context, spec, choice)
    reference = context.reference()
    velocity = context.combine([b.output for b in branches])
    scale = errors.denominator(reference)
    isolated = all(c == DENSE for row in choice for c in row)
    noises = [_noise(context, reference, seed, NOISES * draw + i) for i in range(NOISES)]
    cotangents = [measure.apply_sqrt(noise) / math.sqrt(scale) for noise in noises]
    if not isolated:
        cotangents.append(2 * measure.apply_weight(velocity - reference) / scale)
    spread = [context.spread(c) for c in cotangents]
    with frozen(replay.transformer):
        for i, branch in enumerate(branches):
            _backward(replay, spec, choice, branch, [s[i] for s in spread])
    return _collect(branches, choice, measure, velocity, reference)


def _noise(context: Context, like: Tensor, seed: int, draw: int) -> Tensor:
    key = draws.torch_seed(seed, "cotangent", context.prompt, context.step, draw)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(key)).to(like.device)


def _backward(replay: Replay, spec: Spec, choice: Choice, branch: _Branch, cotangents: list[Tensor]) -> None:
    """Walk the blocks from last to first with all cotangents, collecting products at every attention call."""
    flowing: list[tuple[Tensor, ...]] = [(c,) for c in cotangents]
    for block in reversed(range(replay.blocks(branch.inputs))):
        flowing = _block_backward(replay, spec, choice, branch, block, flowing)
        branch.streams.pop()


def _block_backward(
    replay: Replay, spec: Spec, choice: Choice, branch: _Branch, block: int, flowing: list[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    leaves = tuple(s.detach().to(branch.output.device).requires_grad_() for s in branch.streams[block])
    cuts: list[tuple[Trials, Tensor, Tensor]] = []  # calls in order, with the output and the leaf in its place

    def serve(call: Any, q: Tensor, k: Tensor, v: Tensor, dense: Any) -> Tensor:
        row = choice[call.layer]
        trials = Trials(spec, call, branch.name, q, k, v, branch.masks[call.layer, call.item])
        if all(c == DENSE for c in row) and not all(serves(item.full[0], q) for item in trials.masks):
            out = dense(q, k, v)  # the model's own attention has its own backward
        else:
            out = branch.outs.pop((call.layer, call.item)).to(q.device)
        leaf = out.detach().requires_grad_()
        cuts.append((trials, out, leaf))
        return leaf

    with torch.enable_grad(), replay.handler.serving(serve):
        after = replay.advance(branch.inputs, block, leaves)
    sums = [_grad(after, (*leaves, *(leaf for *_, leaf in cuts)), c) for c in flowing]
    totals = [list(s[: len(leaves)]) for s in sums]
    at_cuts = [list(s[len(leaves) :]) for s in sums]
    for n in reversed(range(len(cuts))):
        trials, out, _ = cuts[n]
        grads = [g[n] for g in at_cuts]
        _contract(branch, trials, out.detach(), grads, choice[trials.layer])
        earlier = (*leaves, *(leaf for *_, leaf in cuts[:n]))
        if earlier:  # before the first block nothing depends on any head
            if out.requires_grad:
                backs = [_grad((out,), earlier, (g,)) for g in grads]
            else:
                triples = _call_backward(trials, out, grads, choice[trials.layer])
                backs = [_grad((trials.q, trials.k, trials.v), earlier, t) for t in triples]
            for i, back in enumerate(backs):
                for n_input, b in enumerate(back):
                    is_leaf = n_input < len(leaves)
                    target, place = (totals[i], n_input) if is_leaf else (at_cuts[i], n_input - len(leaves))
                    target[place] = target[place] + b
    return [tuple(t) for t in totals]


def _grad(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangent: Sequence[Tensor]) -> list[Tensor]:
    pairs = [(o, c) for o, c in zip(outputs, cotangent) if o.requires_grad]
    if not pairs or not inputs:
        return [torch.zeros_like(x) for x in inputs]
    got = torch.autograd.grad(
        [o for o, _ in pairs], list(inputs), [c.to(o.dtype) for o, c in pairs], retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for g, x in zip(got, inputs)]


def _call_backward(
    trials: Trials, out: Tensor, grads: list[Tensor], choice: Sequence[int]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(dq, dk, dv) [B, H, N, D] for each cotangent, part by part of the call."""
    inputs = (trials.q.detach(), trials.k.detach(), trials.v.detach())
    sums = [tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs) for _ in grads]
    for b in range(trials.q.shape[0]):
        for part in trials.parts(b, choice):
            q, k, v, result, *cotangents = (x[b : b + 1, part.heads] for x in (*inputs, out, *grads))
            for total, triple in zip(sums, attention_backward(part.mask, q, k, v, result, cotangents, rest=part.rest)):
                for target, x in zip(total, triple):
                    target[b : b + 1, part.heads] = x
    return sums  # type: ignore[return-value]


def _contract(branch: _Branch, trials: Trials, out: Tensor, grads: list[Tensor], choice: Sequence[int]) -> None:
    """Add ⟨g, δ_k⟩ of every candidate and head of one call: token by token for random cotangents, else the sum."""
    n, heads, count = out.shape[2], out.shape[1], len(trials.spec.points)
    noise = torch.zeros(NOISES, count, heads, n)
    change = torch.zeros(count, heads, dtype=torch.float64)
    first = trials.representative()
    with torch.no_grad():
        for k, candidate in trials.climb():
            delta = candidate.float() - out.float()  # [B, H, N, D]
            products = [(g.float() * delta).sum(-1).sum(0) for g in grads]  # each [H, N]
            noise[:, k] = torch.stack(products[:NOISES]).cpu()
            if len(grads) > NOISES:
                change[k] = products[NOISES].double().sum(-1).cpu()
            for h, current in enumerate(choice):  # a mask that is the present one changes nothing, not even by rounding
                if first[k][h] == (DENSE if current == DENSE else first[current][h]):
                    noise[:, k, h], change[k, h] = 0, 0
    for known, new in ((branch.noise, noise), (branch.change, change)):
        known[trials.layer] = known[trials.layer] + new if trials.layer in known else new


def _collect(
    branches: list[_Branch], choice: Choice, measure: errors.ErrorMeasure, velocity: Tensor, reference: Tensor
) -> Pass:
    layers = range(len(choice))
    second = np.stack([_mean_square([b.noise.pop(layer) for b in branches]) for layer in layers])
    first = np.stack([torch.stack([b.change[layer] for b in branches]).sum(0).T.numpy() for layer in layers])
    sparsity, cost = np.mean([_tables(b.tables, len(choice)) for b in branches], axis=0)  # [L, H, K]
    index = np.asarray(choice)
    chosen = np.take_along_axis(sparsity, np.maximum(index, 0)[..., None], -1)[..., 0]
    return Pass(
        error=measure.measure(velocity, reference),
        bands=errors.bands(velocity, reference).tolist(),
        sparsity=sparsity,
        cost=cost,
        realised=np.where(index == DENSE, 0.0, chosen),
        first=first,
        second=second,
    )


def _mean_square(noise: list[Tensor]) -> np.ndarray:
    """The self terms of a layer [H, K]: branches [R, K, H, N] add up, tokens and cotangents do so after squaring."""
    total = torch.stack(noise).sum(0)
    return total.double().square().sum(-1).mean(0).T.numpy()


def _tables(tables: dict[tuple[int, int], Tensor], layers: int) -> np.ndarray:
    """Sparsity and cost, float64 [2, L, H, K], of one branch's calls; calls of one layer are averaged."""
    by_layer: list[list[Tensor]] = [[] for _ in range(layers)]
    for (layer, _), table in tables.items():
        by_layer[layer].append(table.mT)  # [2, H, K]
    return torch.stack([torch.stack(calls).mean(0) for calls in by_layer], 1).numpy()
