"""Calibration by gradients: what every move of every head does to the velocity error, from one backward pass.

Notation: head outputs o, velocity y, error `e = ⟨ε, Wε⟩/‖y‖²` (the spectral error as a quadratic form), δ_k the
change of a head's output when its threshold moves to candidate k, g the gradient of a functional of the
velocity with respect to a head's output. At an assignment of thresholds (or at the dense model):

- cotangent `2Wε/‖y‖²` gives `m_k = ⟨g, δ_k⟩`: the first-order change of the *joint* error, with all cross-head
  and cross-layer terms in it;
- a random cotangent `W^½ n/‖y‖`, n standard normal, gives `E[⟨g, δ_k⟩²] = ‖W^½ J δ_k‖²/‖y‖²`: the head's own
  second-order term, at the dense model the paper's isolated error. Squaring g·δ token by token and adding the
  squares up leaves out what tokens have in common, a few per cent, and needs two draws where the square of the sum
  needs dozens.

The model is differentiated block by block from stored block inputs: each block is run again with gradients, its
graph is cut at the attention outputs, and attention itself is differentiated by hand over the kept blocks only.
So memory is that of one block's graph plus one stream a block. Masks are constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import HeartError
from ...kernels.ops.backward import attention_backward, serves
from . import draws
from . import velocity_error as errors
from .candidates import DENSE, Spec, Trials
from .replay import Replay, Stream, frozen
from .trajectory import Context

NOISES = 2  # random cotangents a pass
ESTIMATOR = f"tokens-{NOISES}"  # names how `second` is estimated: records of another way are not mixed with these

Choice = Sequence[Sequence[int]]  # [L][H]: index of a candidate, or DENSE


# ---------------------------------------- one context


@dataclass
class Pass:
    """What one context says at one assignment; arrays are float64 [L, H, K]."""

    error: float
    bands: list[float]
    sparsity: np.ndarray  # of every candidate, on the q and k of this assignment
    own: np.ndarray  # [L, H]: of the assignment itself
    first: np.ndarray  # m: first-order change of the joint error (zeros for the dense assignment)
    second: np.ndarray  # D: the token-diagonal self term

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        arrays = {n: getattr(self, n).tolist() for n in ("sparsity", "own", "first", "second")}
        return {"error": self.error, "bands": self.bands, **arrays}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Pass:
        """The inverse of `to_dict`."""
        arrays = {n: np.asarray(data[n], dtype=np.float64) for n in ("sparsity", "own", "first", "second")}
        return cls(data["error"], list(data["bands"]), **arrays)


@dataclass
class _Branch:
    """One guidance branch on its way forward and back."""

    name: str
    inputs: dict[str, Any]
    output: Tensor
    streams: list[Stream]
    masks: dict[tuple[int, int], Any]  # (layer, item) -> masks of the candidates
    outs: dict[tuple[int, int], Tensor]  # (layer, item) -> attention's outputs, in host memory
    noise: dict[int, Tensor] = field(default_factory=dict)  # layer -> ⟨g, δ⟩ of random cotangents, [R, K, H, N]
    change: dict[int, Tensor] = field(default_factory=dict)  # layer -> ⟨g, δ⟩ of the joint error, [K, H]


def forward(replay: Replay, context: Context, spec: Spec, choice: Choice, keep: bool = True) -> list[_Branch]:
    """All branches at an assignment, with block inputs and masks kept for the way back (or neither)."""
    made = []
    for branch in context.branches:
        masks: dict[tuple[int, int], Any] = {}
        outs: dict[tuple[int, int], Tensor] = {}

        def serve(
            call: Any, q: Tensor, k: Tensor, v: Tensor, dense: Any, masks=masks, outs=outs, name=branch.name
        ) -> Tensor:
            trials, at, picked = Trials(spec, call, name, q, k, v), (call.layer, call.item), choice[call.layer]
            masks[at] = trials.masks
            out = trials.mixed(picked, dense(q, k, v) if DENSE in picked else None)
            if keep:
                outs[at] = out.cpu()
            return out

        with torch.no_grad(), replay.handler.serving(serve):
            if keep:
                output, streams = replay.forward_recorded(branch.inputs)
            else:
                output, streams = replay.forward(branch.inputs), []
        made.append(_Branch(branch.name, branch.inputs, output, streams, masks, outs))
    return made


def verify(
    replay: Replay, context: Context, spec: Spec, choice: Choice, measure: errors.ErrorMeasure
) -> dict[str, Any]:
    """The true joint error and realised sparsity of an assignment in one context: plain forwards."""
    own: list[Tensor] = []
    found = []
    only = [_OwnThresholds(spec, row) for row in choice]
    for branch in context.branches:

        def serve(call: Any, q: Tensor, k: Tensor, v: Tensor, dense: Any, name: str = branch.name) -> Tensor:
            picked = choice[call.layer]
            trials = Trials(only[call.layer].spec, call, name, q, k, v)
            local = only[call.layer].local
            own.append(_own_sparsity(trials, local))
            return trials.mixed(local, dense(q, k, v) if DENSE in picked else None)

        with torch.no_grad(), replay.handler.serving(serve):
            found.append(replay.forward(branch.inputs))
    velocity, reference = context.combine(found), context.reference()
    layers = len(choice)
    sparsity = torch.stack(own).unflatten(0, (len(context.branches), -1)).mean(0)
    if sparsity.shape[0] != layers:  # several calls a layer: models that attend item by item
        sparsity = sparsity.unflatten(0, (layers, -1)).mean(1)
    return {
        "error": measure.measure(velocity, reference),
        "bands": errors.bands(velocity, reference).tolist(),
        "sparsity": sparsity.tolist(),
    }


class _OwnThresholds:
    """A spec with only the candidates that a layer's heads have chosen, and the choice in those terms."""

    def __init__(self, spec: Spec, row: Sequence[int]):
        used = sorted({c for c in row if c != DENSE}) or [0]
        self.spec = replace(spec, candidates=tuple(spec.candidates[c] for c in used))
        self.local = [used.index(c) if c != DENSE else DENSE for c in row]


def _own_sparsity(trials: Trials, choice: Sequence[int]) -> Tensor:
    """Sparsity of each head with its own candidate, [H]."""
    table = trials.sparsity()
    return torch.stack([table[c, h] if c != DENSE else table.new_zeros(()) for h, c in enumerate(choice)])


def differentiate(
    replay: Replay, context: Context, spec: Spec, choice: Choice, measure: errors.QuadraticError, seed: int,
    draw: int = 0,
) -> Pass:  # fmt: skip
    """One forward at `choice`, one way back with all cotangents (only the random ones at the dense assignment)."""
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
    return _collect(context, branches, choice, measure, velocity, reference, spec)


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
        picked = choice[call.layer]
        trials = Trials(spec, call, branch.name, q, k, v, branch.masks[call.layer, call.item])
        if all(c == DENSE for c in picked) and not all(serves(full, q) for _, full in trials.masks):
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
                for at, b in enumerate(back):
                    target, place = (totals[i], at) if at < len(leaves) else (at_cuts[i], at - len(leaves))
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
    items = []
    for b in range(trials.q.shape[0]):
        at = slice(b, b + 1)
        q, k, v = (x.detach()[at] for x in (trials.q, trials.k, trials.v))
        items.append(attention_backward(trials.mixed_mask(b, choice), q, k, v, out[at], [g[at] for g in grads]))
    return [tuple(torch.cat([item[i][x] for item in items]) for x in range(3)) for i in range(len(grads))]  # type: ignore


def _contract(branch: _Branch, trials: Trials, out: Tensor, grads: list[Tensor], choice: Sequence[int]) -> None:
    """Add ⟨g, δ_k⟩ of every candidate and head of one call: token by token for random cotangents, else the sum."""
    n, heads, count = out.shape[2], out.shape[1], len(trials.spec.candidates)
    noise = torch.zeros(NOISES, count, heads, n)
    change = torch.zeros(count, heads, dtype=torch.float64)
    first = trials.representative()
    with torch.no_grad():
        for k, each in enumerate(trials.climb()):
            delta = each.float() - out.float()  # [B, H, N, D]
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
    context: Context, branches: list[_Branch], choice: Choice, measure: Any, velocity: Tensor, reference: Tensor,
    spec: Spec,
) -> Pass:  # fmt: skip
    layers = range(len(choice))
    second = np.stack([_mean_square([b.noise.pop(layer) for b in branches]) for layer in layers])
    first = np.stack([sum(b.change[layer] for b in branches).T.numpy() for layer in layers])  # type: ignore[union-attr]
    sparsity = np.mean([_sparsity_table(b.masks, len(choice)) for b in branches], axis=0)  # [L, H, K]
    picked = np.asarray(choice)
    own = np.where(picked == DENSE, 0.0, np.take_along_axis(sparsity, np.maximum(picked, 0)[..., None], -1)[..., 0])
    return Pass(
        measure.measure(velocity, reference), errors.bands(velocity, reference).tolist(), sparsity, own, first, second
    )


def _mean_square(noise: list[Tensor]) -> np.ndarray:
    """The self terms of a layer [H, K]: branches [R, K, H, N] add up, tokens and cotangents do so after squaring."""
    total = torch.stack(noise).sum(0)
    return total.double().square().sum(-1).mean(0).T.numpy()


def _sparsity_table(masks: dict[tuple[int, int], Any], layers: int) -> np.ndarray:
    """float64 [L, H, K] from the masks of one branch's calls."""
    table: list[list[Tensor]] = [[] for _ in range(layers)]
    for (layer, _), items in masks.items():
        for each, _full in items:
            table[layer].append(torch.stack([1 - m.density()[0].cpu() for m in each], -1))
    return torch.stack([torch.stack(rows).mean(0) for rows in table]).numpy()
