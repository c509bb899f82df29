"""Isolated probes, the paper's measurement: one head sparse, all others dense, what becomes of the velocity.

A probe of layer l runs only the layers from l on. Everything before is the dense model's, so one dense pass
goes through the blocks once, and at each block of interest its input, q, k, v and dense attention output are at
hand: every probe of that layer starts there. The result equals a full forward bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import velocity_error as errors
from .candidates import DENSE, Spec, Trials
from .replay import Replay, Stream
from .trajectory import Context


@dataclass
class _Site:
    """One branch of a context, stopped before the block of a layer."""

    inputs: dict[str, Any]
    name: str
    block: int = 0
    stream: Stream = ()
    next: Stream | None = None  # the dense stream after `block`, once known
    calls: list[tuple[Trials, Tensor]] = field(default_factory=list)  # of the layer, with their dense outputs


def probe(
    replay: Replay, context: Context, wanted: Mapping[int, Sequence[int]], spec: Spec, measure: errors.ErrorMeasure,
    null: bool = True,
) -> Iterator[tuple[int, dict[str, Any]]]:  # fmt: skip
    """Probe the `wanted` heads of each layer in one context; yields (layer, record) as layers are done.

    A record holds per head: `sparsity`, `error`, `attention` (error of the head's own output) and the unweighted
    `bands` of every candidate, `cost` (computed keys as a share of all), and how many different masks were really
    run. Only the wanted heads are predicted. With `null` the first record also has the floor of the measurement: the
    probed heads of the first layer through the sparse kernel with nothing left out.
    """
    with torch.no_grad():
        reference = context.reference()
        sites = [_Site(b.inputs, b.name) for b in context.branches]
        for layer in sorted(wanted):
            for site in sites:
                _reach(replay, site, layer, spec, wanted[layer])
            record: dict[str, Any] = {
                "heads": {
                    str(h): _probe_head(replay, context, sites, layer, place, measure, reference)
                    for place, h in enumerate(wanted[layer])
                }
            }
            if null:
                record["null"] = _null(replay, context, sites, layer, measure, reference)
                null = False
            yield layer, record


def _reach(replay: Replay, site: _Site, layer: int, spec: Spec, heads: Sequence[int]) -> None:
    """Bring a branch to the block of `layer`, densely, and look at some heads of its attention there."""
    block = replay.block_of(layer, site.inputs)
    while site.block < block:
        after = site.next if site.next is not None else replay.advance(site.inputs, site.block, site.stream)
        site.block, site.stream, site.next = site.block + 1, after, None
    calls: list[tuple[Trials, Tensor]] = []

    def look(call: Any, q: Tensor, k: Tensor, v: Tensor, dense: Any) -> Tensor:
        out = dense(q, k, v)
        if call.layer == layer:
            calls.append((Trials(spec, call, site.name, q, k, v, heads=heads), out))
        return out

    with replay.handler.serving(look):
        site.next = replay.advance(site.inputs, block, site.stream)
    site.calls = calls


def _velocity(replay: Replay, context: Context, sites: list[_Site], layer: int, outputs: list[list[Tensor]]) -> Tensor:
    """The sampler's velocity when `layer` answers with `outputs` (per branch and call) and all else is dense."""
    velocities = []
    for site, answers in zip(sites, outputs):
        turn = iter(answers)

        def serve(call: Any, q: Tensor, k: Tensor, v: Tensor, dense: Any, turn: Any = turn) -> Tensor:
            return next(turn) if call.layer == layer else dense(q, k, v)

        with replay.handler.serving(serve):
            velocities.append(replay.finish(site.inputs, site.block, site.stream))
    return context.combine(velocities)


def _with_heads(dense: Tensor, heads: Sequence[int], out: Tensor) -> Tensor:
    """The dense outputs [B, H, N, D] with some heads replaced."""
    whole = dense.clone()
    whole[:, list(heads)] = out
    return whole


def _probe_head(
    replay: Replay, context: Context, sites: list[_Site], layer: int, place: int, measure: errors.ErrorMeasure,
    reference: Tensor,
) -> dict[str, Any]:  # fmt: skip
    """All candidates of one head; `place` is its place among the heads that are looked at."""
    trials = [one for site in sites for one, _ in site.calls]
    count = len(trials[0].spec.points)
    sparsity, cost = (
        torch.stack([getattr(one, name)()[:, place] for one in trials]).mean(0) for name in ("sparsity", "cost")
    )  # [K] each
    firsts = [one.representative() for one in trials]
    groups = [tuple(first[k][place] for first in firsts) for k in range(count)]
    done: dict[tuple, dict[str, Any]] = {}
    for k, group in enumerate(groups):
        if group not in done:
            done[group] = _measure(replay, context, sites, layer, place, k, group, measure, reference)
    table = [done[g] for g in groups]
    return {
        "sparsity": sparsity.tolist(),
        "cost": cost.tolist(),
        **{name: [row[name] for row in table] for name in ("error", "attention", "bands")},
        "runs": sum(any(g != DENSE for g in group) for group in done),
    }


def _measure(
    replay: Replay, context: Context, sites: list[_Site], layer: int, place: int, candidate: int, group: tuple,
    measure: errors.ErrorMeasure, reference: Tensor,
) -> dict[str, Any]:  # fmt: skip
    if all(g == DENSE for g in group):  # nothing left out: dense, by definition without error
        return {"error": 0.0, "attention": 0.0, "bands": [0.0] * 4}
    outputs, local = [], []
    for site in sites:
        answers = []
        for trials, dense in site.calls:
            head, out = trials.numbers[place], trials.run([place], candidate)
            local.append(errors.attention_output(out[:, 0], dense[:, head]))
            answers.append(_with_heads(dense, [head], out))
        outputs.append(answers)
    attention = sum(local) / len(local)
    velocity = _velocity(replay, context, sites, layer, outputs)
    value = measure.measure(velocity, reference) if measure.on == "velocity" else attention
    return {"error": value, "attention": attention, "bands": errors.bands(velocity, reference).tolist()}


def _null(
    replay: Replay, context: Context, sites: list[_Site], layer: int, measure: errors.ErrorMeasure, reference: Tensor
) -> dict[str, Any]:
    outputs = [
        [_with_heads(dense, t.numbers, t.run(range(len(t.numbers)), DENSE)) for t, dense in site.calls]
        for site in sites
    ]
    velocity = _velocity(replay, context, sites, layer, outputs)
    value = measure.measure(velocity, reference) if measure.on == "velocity" else 0.0
    return {"layer": layer, "error": value, "bands": errors.bands(velocity, reference).tolist()}


def velocities(
    replay: Replay, context: Context, wanted: Mapping[int, Sequence[int]], spec: Spec, candidate: int
) -> Iterator[tuple[int, int, Tensor]]:
    """(layer, head, velocity) with only that head sparse, for studies that want more than its error."""
    with torch.no_grad():
        sites = [_Site(b.inputs, b.name) for b in context.branches]
        for layer in sorted(wanted):
            for site in sites:
                _reach(replay, site, layer, spec, wanted[layer])
            for place, head in enumerate(wanted[layer]):
                outputs = [
                    [_with_heads(dense, [head], trials.run([place], candidate)) for trials, dense in site.calls]
                    for site in sites
                ]
                yield layer, head, _velocity(replay, context, sites, layer, outputs)


def full_forward(replay: Replay, context: Context, spec: Spec, choice: Mapping[int, Sequence[int]]) -> Tensor:
    """The velocity of whole forwards with the heads of some layers at their candidates (others dense).

    `choice[layer]` gives a candidate's index, or DENSE, for each head. The plain way of doing what `probe` does.
    """
    outputs = []
    for branch in context.branches:

        def serve(call: Any, q: Tensor, k: Tensor, v: Tensor, dense: Any, name: str = branch.name) -> Tensor:
            picked = choice.get(call.layer)
            if picked is None or all(c == DENSE for c in picked):
                return dense(q, k, v)
            whole = None if all(c != DENSE for c in picked) else dense(q, k, v)
            return Trials(spec, call, name, q, k, v).mixed(picked, whole)

        with torch.no_grad(), replay.handler.serving(serve):
            outputs.append(replay.forward(branch.inputs))
    return context.combine(outputs)
