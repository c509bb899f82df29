"""Choosing δ from one dense generation: how alike reused masks would be to fresh ones, against how many are reused.

A `MaskProbe` rides along with a dense generation and keeps, for every layer, branch, step and head, the features that
anchors hold and the mask the backbone would predict. Temporal mask reuse is then replayed on paper for any δ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import HeartError
from ..masks import Mask, pack_bits, unpack_bits
from ..online import reuse
from ..online.call import CallContext, Handler
from ..online.predict import predict
from ..online.reuse import TMR, ReuseState

SAMPLE = (128, 512)  # query and key tokens on which two clusterings are compared
CURVE = 24  # values of δ on the curve


@dataclass
class Track:
    """What one (transformer, layer, branch, batch item) showed over the steps."""

    layer: int
    steps: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)  # [2, 1, H, D] each
    masks: list[Tensor] = field(default_factory=list)  # packed bits [H, m] each
    entries: int = 0  # mask entries a head
    memory: Any = None  # the backbone's warm start

    def iou(self) -> Tensor:
        """Intersection over union of the masks of any two steps, [H, S, S]."""
        packed = torch.stack(self.masks, 1)  # [H, S, m]
        ratios = []
        for head in packed:
            flags = unpack_bits(head, self.entries).float()  # [S, entries]
            both, size = flags @ flags.T, flags.sum(1)
            ratios.append(both / (size[:, None] + size[None, :] - both).clamp(min=1))
        return torch.stack(ratios)


class MaskProbe(Handler):
    """A handler that answers every call densely and notes what the backbone would have done."""

    def __init__(self, backbone: Any, thresholds: list[list[tuple[float, ...]]], dense_steps: int, scale: bool) -> None:
        self.backbone, self.thresholds, self.dense_steps, self.scale = backbone, thresholds, dense_steps, scale
        self.tracks: dict[tuple, Track] = {}

    @torch.no_grad()
    def attend(self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, dense: Any) -> Tensor:
        """Dense attention, with a look at features and masks."""
        if call.step is None or call.step >= self.dense_steps:
            for b in range(q.shape[0]):
                self._note(call, b, q[b : b + 1], k[b : b + 1], v[b : b + 1])
        return dense(q, k, v)

    def _note(self, call: CallContext, b: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        item = call.item + b
        track = self.tracks.setdefault((call.transformer, call.layer, call.branch, item), Track(call.layer))
        backbone = self.backbone.scaled_to(q.shape[2]) if self.scale else self.backbone
        if track.memory is None:
            track.memory = backbone.new_state()
        text = call.text[b] if call.text else None
        tau = list(self.thresholds[call.transformer][call.layer])
        key = (call.layer, call.branch, item)
        mask = predict(backbone, q, k, v, tau, track.memory, text, key=key, grid=call.grid)
        flags = _flags(mask)  # [H, entries]
        track.entries = flags.shape[-1]
        track.masks.append(pack_bits(flags).cpu())
        track.steps.append(call.step if call.step is not None else len(track.steps))
        seen = backbone.seen_tokens(text, q.shape[2], q.device)
        track.features.append(reuse.features(q, k, "mean", seen).cpu())


def _flags(mask: Mask) -> Tensor:
    """A mask as bool [H, entries] that can be compared from step to step: blocks, or pairs of sampled tokens."""
    if mask.block_shape is not None:  # the same groups of tokens at every step
        return mask.flags[0].flatten(1)
    generator = torch.Generator().manual_seed(0)  # the same tokens at every step
    queries, keys = (torch.randint(n, (m,), generator=generator) for n, m in zip((mask.n_q, mask.n_k), SAMPLE))
    return mask.rows(queries, keys)[0].flatten(1)


# ---------------------------------------- replay


@dataclass(frozen=True)
class CurvePoint:
    """What one δ gives: share of masks reused, and how alike they are to fresh ones."""

    delta: float
    reuse: float  # share of (head, step) after the first that reuse
    iou: float  # mean over those that reuse; 1 if none does
    iou_all: float  # mean over all, refreshed ones counting 1


def replay(track: Track, iou: Tensor, policy: TMR) -> tuple[int, int, float]:
    """Temporal mask reuse on a track: (masks reused, masks in all after the first step, sum of the reused's IoU)."""
    heads = iou.shape[0]
    anchor, used = track.features[0].clone(), torch.zeros(heads, dtype=torch.long)
    cached = torch.ones(1, heads, dtype=torch.bool)
    reused, total = 0, 0.0
    for step in range(1, len(track.steps)):
        now = track.features[step]
        view = ReuseState(cached, cached.long(), track.layer, track.steps[step], reuse.norm(anchor))
        refresh = policy.refresh(reuse.drift(anchor, now), view)[0]  # [H]
        anchor = torch.where(refresh.view(1, 1, -1, 1), now, anchor)
        used = torch.where(refresh, step, used)
        kept = (~refresh).nonzero().flatten()
        reused += len(kept)
        total += float(iou[kept, used[kept], step].sum())
    return reused, heads * (len(track.steps) - 1), total


def curve(tracks: list[Track], relative: bool, gate: tuple[float, float], points: int = CURVE) -> list[CurvePoint]:
    """The IoU–reuse curve over δ from the smallest to the largest drift that was seen."""
    ious = [track.iou() for track in tracks]
    return [evaluate(tracks, ious, delta, relative, gate) for delta in _candidates(tracks, relative, points)]


def evaluate(tracks: list[Track], ious: list[Tensor], delta: float, relative: bool, gate: tuple) -> CurvePoint:
    """One point of the curve."""
    policy = TMR(relative=delta, gate=gate) if relative else TMR(delta=delta, gate=gate)
    counts = [replay(track, iou, policy) for track, iou in zip(tracks, ious)]
    reused, total, alike = (sum(c[i] for c in counts) for i in range(3))
    return CurvePoint(delta, reused / total, alike / reused if reused else 1.0, (alike + total - reused) / total)


def _candidates(tracks: list[Track], relative: bool, points: int) -> list[float]:
    """δ at even quantiles of the drift over 1, 2, 4, … steps."""
    seen = []
    for track in tracks:
        for gap in (1, 2, 4, 8, 16):
            for a, b in zip(track.features, track.features[gap:]):
                moved = reuse.drift(a, b)
                seen.append((moved / reuse.norm(a).clamp(min=1e-30) if relative else moved).flatten())
    quantiles = torch.quantile(torch.cat(seen).double(), torch.linspace(0.01, 0.99, points, dtype=torch.float64))
    return sorted({float(f"{x:.3g}") for x in quantiles.tolist()})


def choose(points: list[CurvePoint], target: float) -> CurvePoint:
    """The most reuse among those whose reused masks are at least as alike as wanted; δ=0 if none is."""
    good = [p for p in points if p.iou >= target]
    return max(good, key=lambda p: (p.reuse, p.delta)) if good else CurvePoint(0.0, 0.0, 1.0, 1.0)


@dataclass
class Tuned:
    """A choice of δ with the curve it was read from."""

    delta: float | list[float]
    relative: bool
    point: CurvePoint
    points: list[CurvePoint]
    layers: list[CurvePoint] | None = None  # one choice a layer, where that was asked for

    def policy(self, gate: tuple[float, float] = (0.4, 0.8)) -> TMR:
        """The policy to use."""
        delta = self.delta if isinstance(self.delta, float) else tuple(self.delta)
        return TMR(relative=delta, gate=gate) if self.relative else TMR(delta=delta, gate=gate)


def tune(
    probe: MaskProbe, target: float, relative: bool = False, per_layer: bool = False, gate: tuple = (0.4, 0.8)
) -> Tuned:
    """Choose δ, one for all or one a layer, such that reused masks keep an IoU of `target` with fresh ones."""
    tracks = [t for t in probe.tracks.values() if len(t.steps) > 1]
    if not tracks:
        raise HeartError("the recording has fewer than two sparse steps: record more steps, or fewer dense ones")
    if not 0 < target <= 1:
        raise HeartError(f"the target IoU is {target}: give a number above 0, at most 1")
    points = curve(tracks, relative, gate)
    chosen = choose(points, target)
    if not per_layer:
        return Tuned(chosen.delta, relative, chosen, points)
    layers = [
        choose(curve([t for t in tracks if t.layer == layer], relative, gate), target)
        for layer in sorted({t.layer for t in tracks})
    ]
    limits = tuple(p.delta for p in layers)
    ious = [t.iou() for t in tracks]
    policy = TMR(relative=limits, gate=gate) if relative else TMR(delta=limits, gate=gate)
    counts = [replay(t, iou, policy) for t, iou in zip(tracks, ious)]
    reused, total, alike = (sum(c[i] for c in counts) for i in range(3))
    whole = CurvePoint(
        float("nan"), reused / total, alike / reused if reused else 1.0, (alike + total - reused) / total
    )
    return Tuned(list(limits), relative, whole, points, layers)
