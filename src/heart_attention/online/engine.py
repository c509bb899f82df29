"""One attention call: dense or sparse, which heads refresh, predict, plan, run; and the state all that needs.

The engine is a handler of `models.intercept`, but knows nothing of diffusers: `heart.attention` drives it
directly. State lives per (transformer, layer, guidance branch, first batch item) and, inside, per batch item
and head.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import kernels, token_order
from ..config import HeartConfig, threshold_table
from ..errors import HeartError
from ..masks import Mask, Packed, Text
from . import agreement, cost_model, reuse
from .call import CallContext, Dense, Handler
from .stats import Recorder, Row, Stats, Timer

log = logging.getLogger(__name__)

EXPECTED_REFRESH = 0.3  # share of masks predicted anew, as long as a layer has shown nothing of its own
EXPECTED_DENSITY = 0.5  # what a mask keeps, for the question whether to make a first one


@dataclass
class LayerState:
    """What one (transformer, layer, branch) remembers of a generation; bool and integer tensors are on the CPU."""

    signature: tuple
    backbone: Any
    memory: Any  # the backbone's own: SVG2's centroids
    cached: Tensor  # bool [B, H]: this head has a mask
    refreshed_at: Tensor  # int64 [B, H]: step of its last refresh
    anchor: Tensor | None = None  # features of that step, [2, B, H, (n,) D]
    norm: Tensor | None = None  # L1 norm of the anchor, fp32 [B, H], where the policy wants it
    packed: Packed | None = None
    plan: Any = None
    density: Tensor | None = None  # float64 [B, H]
    layer_density: float = 1.0  # mean over the heads of all ranks
    calls: int = 0
    refreshed: float = 0.0  # heads refreshed after the first call, as shares of all
    reason: str = ""  # why this layer runs dense at present
    wait: int = 0  # calls until it is looked at again
    patience: int = 1  # how long the next wait is

    def nbytes(self) -> dict[str, int]:
        """Bytes held, by kind."""
        return {
            "masks": self.packed.nbytes if self.packed is not None else 0,
            "plans": self.plan.nbytes if self.plan is not None else 0,
            "anchors": self.anchor.nbytes if self.anchor is not None else 0,
            "centroids": getattr(self.memory, "nbytes", 0),
        }


@dataclass
class Request:
    """One call on its way through the engine."""

    call: CallContext
    q: Tensor
    k: Tensor
    v: Tensor
    timer: Timer
    text: Text | None
    heads: list[int]  # the model's numbers of the heads at hand
    tau: tuple[float, ...]  # their thresholds
    step: int = 0
    drift: Tensor | None = None
    refresh: Tensor | None = field(default=None, repr=False)


class Engine(Handler):
    """Serves the attention of one model (or a pair of experts) as its config says.

    Args:
        config: what to do.
        layers, heads: of each transformer.
        transformers: how many share this engine.
        overheads: measured costs to decide dense or sparse by; None measures them at first use.
    """

    def __init__(
        self,
        config: HeartConfig,
        layers: int,
        heads: int,
        transformers: int = 1,
        overheads: cost_model.Overheads | None = None,
    ) -> None:
        self.config, self.layers, self.heads, self.transformers = config, layers, heads, transformers
        self.overheads = overheads
        self.recorder = Recorder(layers, heads)
        self.set_thresholds(config.thresholds)
        if hasattr(config.reuse, "check"):
            config.reuse.check(layers)
        if config.kernel != "auto":
            kernels.choose(name=config.kernel)  # raises with the reasons if it cannot serve here at all
        self._states: dict[tuple, LayerState] = {}
        self._last: dict[tuple, int | None] = {}
        self._kernels: dict[tuple, Any] = {}
        self._orders = token_order.Cache()
        block = getattr(config.backbone, "block", None)
        self._head_orders = token_order.for_heads(config.order, transformers, layers, heads, block)
        self.steps: Callable[[], int | None] = lambda: None  # steps of a generation, where a pipeline tells
        self._told = not hasattr(config.thresholds, "warnings_for")

    def set_thresholds(self, thresholds: Any) -> None:
        """Other thresholds from now on (any form a config takes); masks made with the old ones are dropped."""
        self._tau = threshold_table(thresholds, self.transformers, self.layers, self.heads)
        self._all_dense = [[min(row) >= 1 for row in table] for table in self._tau]

    # ---------------------------------------- the handler

    def start_forward(self, call: CallContext) -> None:
        """A forward of the transformer begins: a calibration made for something else says so, once."""
        if self._told:
            return
        self._told = True
        config = self.config
        made = {
            "order": config.order,
            "backbone": config.backbone.to_dict() if hasattr(config.backbone, "to_dict") else None,
        }
        for sentence in config.thresholds.warnings_for(steps=self.steps(), grid=call.grid, **made):
            log.warning("%s", sentence)
            self.recorder.notes.append(sentence)

    def fallback(self, call: CallContext, reason: str) -> None:
        """A call ran dense without coming here."""
        self.recorder.add(Row(call.transformer, call.layer, call.step or 0, call.branch, Timer(), reason))

    def reset(self) -> None:
        """A generation is over: drop its masks, anchors and plans."""
        if self._states:
            self.recorder.memory = self.memory()
        self._states.clear()
        self._last.clear()
        self.recorder.end_generation()

    def turn(self, call: CallContext) -> None:
        """For callers without a clock: a step not later than a layer's and branch's last begins a generation."""
        key = (call.transformer, call.layer, call.branch, call.item)
        last = self._last.get(key)
        if call.step is not None and last is not None and call.step <= last:
            self.reset()
        self._last[key] = call.step

    def attend(self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, dense: Dense) -> Tensor:
        """Answer one attention call: q, k, v [B, H, N, D] -> [B, H, N, D]."""
        timer = Timer(q.is_cuda)
        reason = self._reason_dense(call, q, k)
        if not reason:
            out, reason = self._sparse(call, q, k, v, timer, dense)
            if out is not None:
                return out
        return self._dense(call, q, k, v, timer, dense, reason)

    def stats(self, wait: bool = False) -> Stats:
        """What happened so far; `wait` for GPU times that are not known yet."""
        return self.recorder.summary(self.config.to_dict() if _has_json(self.config) else None, self.memory(), wait)

    def memory(self) -> dict[str, int]:
        """Bytes of all caches by kind; after a generation, what they were at its end."""
        if not self._states:
            return self.recorder.memory
        total = dict.fromkeys(("masks", "plans", "anchors", "centroids"), 0)
        for state in self._states.values():
            for kind, size in state.nbytes().items():
                total[kind] += size
        return total

    # ---------------------------------------- dense

    def _reason_at(self, call: CallContext, layer: int) -> str:
        """Why this layer runs dense at this step, whatever q and k are."""
        if call.step is not None and call.step < self.config.dense_steps:
            return "warm-up step"
        if self._all_dense[call.transformer][layer]:
            return "every threshold is 1"
        return "dense layer" if layer < self.config.dense_layers else ""

    def _reason_dense(self, call: CallContext, q: Tensor, k: Tensor) -> str:
        """Why this call runs dense, as far as can be said without looking at its values."""
        reason = self._reason_at(call, call.layer)
        if reason:
            return reason
        if q.shape != k.shape:
            return "keys and queries of different shapes"
        if q.requires_grad and torch.is_grad_enabled():
            return self._once("gradients are wanted", "dense attention: gradients are wanted; use torch.no_grad()")
        return ""

    def _once(self, reason: str, sentence: str) -> str:
        """Log the sentence the first time this reason comes up."""
        if reason not in self.recorder.reasons:
            log.warning("%s", sentence)
        return reason

    def _dense(
        self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, timer: Timer, dense: Dense, reason: str
    ) -> Tensor:
        out = dense(q, k, v)
        self._note_dense(call, timer, reason)
        return out

    def _note_dense(self, call: CallContext, timer: Timer, reason: str) -> None:
        timer.lap("dense")
        step = call.step if call.step is not None else 0
        self.recorder.add(Row(call.transformer, call.layer, step, call.branch, timer, reason))

    # ---------------------------------------- sparse

    def _sparse(
        self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, timer: Timer, dense: Dense
    ) -> tuple[Tensor | None, str]:
        """The sparse output, or None and why the call had better run dense."""
        texts = call.text
        if not texts or all(text == texts[0] for text in texts):
            return self._sparse_call(self._call(call, q, k, v, timer, texts[0] if texts else None))
        outs: list[Tensor] = []  # prompts of different lengths: one batch item after the other
        whole: Tensor | None = None  # dense attention of the batch, computed once for all items that want it
        for i, text in enumerate(texts):
            at = dataclasses.replace(call, item=call.item + i, text=[text])
            part = self._call(at, q[i : i + 1], k[i : i + 1], v[i : i + 1], Timer(q.is_cuda), text)
            out, reason = self._sparse_call(part)
            if out is None:
                whole = dense(q, k, v) if whole is None else whole
                out = whole[i : i + 1]
                self._note_dense(at, part.timer, reason)
            outs.append(out)
        return torch.cat(outs), ""

    def _call(self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, timer: Timer, text: Text | None) -> Request:
        heads = call.heads or list(range(call.head_offset, call.head_offset + q.shape[1]))
        row = self._tau[call.transformer][call.layer]
        text = text if text is not None and text.prompt + text.unused else None
        return Request(call, q, k, v, timer, text, heads, tuple(row[h] for h in heads))

    def _sparse_call(self, request: Request) -> tuple[Tensor | None, str]:
        state = self._state(request)
        if state.wait > 0:
            state.wait -= 1
            return None, state.reason
        if not state.calls:
            reason = self._for_layer(request, self._cannot_pay(request, state))
            if reason:
                return None, self._postpone(state, reason)
        self._decide(request, state)
        if bool(request.refresh.any()):  # type: ignore[union-attr]
            self._refresh(request, state)
        self._count(request, state)
        reason = self._for_layer(request, self._verdict(request, state))
        if reason:
            return None, self._postpone(state, reason)
        state.patience = 1
        if state.packed is None:
            return None, "every threshold is 1"  # of the heads on this rank
        return self._run(request, state), ""

    def _state(self, request: Request) -> LayerState:
        """The state of this layer and branch; a new one if anything that masks depend on has changed."""
        at, q = request.call, request.q
        key = (at.transformer, at.layer, at.branch, at.item)
        signature = (
            q.shape,
            q.dtype,
            q.device,
            request.text,
            at.grid,
            request.tau,
            tuple(request.heads),
            at.generation,
        )
        state = self._states.get(key)
        if state is None or state.signature != signature:
            backbone = self.config.backbone
            if self.config.scale_clusters:
                backbone = backbone.scaled_to(q.shape[2])
            shape = q.shape[:2]
            cached, at_step = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int64)
            state = self._states[key] = LayerState(signature, backbone, backbone.new_state(), cached, at_step)
        request.step = at.step if at.step is not None else self.config.dense_steps + state.calls
        return state

    def _decide(self, request: Request, state: LayerState) -> None:
        """Drift against the anchor and the policy's decision; heads that refresh take the present as anchor."""
        policy, at, now = self.config.reuse, request.call, None
        if policy.features is not None:
            seen = seen_tokens(request.text, request.q.shape[2], state.backbone, request.q.device)
            now = reuse.features(request.q, request.k, policy.features, seen)
            known = state.anchor is not None
            request.drift = reuse.drift(state.anchor, now).cpu() if known else torch.zeros(state.cached.shape)
            if known and state.norm is None and getattr(policy, "relative", 1) is not None:
                state.norm = reuse.norm(state.anchor).cpu()
        age, norm = request.step - state.refreshed_at, request.drift if state.anchor is None else state.norm
        view = reuse.ReuseState(state.cached, age, at.layer, request.step, norm, at.heads_total, _reducer(request))
        request.refresh = policy.refresh(request.drift, view).cpu() | ~state.cached
        if request.drift is not None:
            request.drift = request.drift.where(state.cached, float("nan"))
        if bool(request.refresh.any()):
            if now is not None:
                state.anchor, state.norm = _renew(state.anchor, now, request.refresh), None
            state.refreshed_at[request.refresh] = request.step
        request.timer.lap("drift")

    def _refresh(self, request: Request, state: LayerState) -> None:
        """Predict masks for the heads that refresh and put them beside those that stay."""
        assert request.refresh is not None
        parts, index = self._predict(request, state)
        state.cached |= request.refresh
        if parts is not None:
            batch, heads = request.q.shape[:2]
            whole = state.packed.unpack() if state.packed is not None else parts.full_like(batch, heads, request.text)
            mask = whole.put(index, parts) if not bool(index.all()) else parts.split_batch(batch)
            state.packed, state.plan = mask.packed(), None
            state.density = mask.density().cpu()
            self._choose_kernel(request, mask)
        request.timer.lap("prediction")

    def _predict(self, request: Request, state: LayerState) -> tuple[Any, Tensor]:
        """Masks of the refreshing heads with τ < 1, [1, n] in row-major order, and which they are, bool [B, H]."""
        assert request.refresh is not None
        at = request.call
        order, own = self._order(request, state.backbone)
        index = request.refresh & torch.tensor([t < 1 for t in request.tau])
        found = []
        for b in range(request.q.shape[0]):
            alike = [int(flag) * (1 + own[h] if own else 1) for h, flag in enumerate(index[b].tolist())]
            for start, stop in _runs(alike):  # whole stretches of heads, so that q and k stay views
                mask = state.backbone.predict(
                    request.q[b : b + 1, start:stop],
                    request.k[b : b + 1, start:stop],
                    list(request.tau[start:stop]),
                    state.memory,
                    request.text,
                    order=order[own[start]] if own else order,  # type: ignore[index]
                    heads=request.heads[start:stop],
                    key=(at.layer, at.branch, at.item + b),
                )
                found.append(token_order.with_own(mask, order, own[start]) if own else mask)  # type: ignore[arg-type]
        return (Mask.join(found) if found else None), index

    def _count(self, request: Request, state: LayerState) -> None:
        """What the cost model asks of a layer: densities and refreshes over the heads of all ranks."""
        state.calls += 1
        if self.config.force_sparse:
            return
        assert request.refresh is not None
        heads = request.refresh.numel()
        own = [heads if state.density is None else float(state.density.sum()), int(request.refresh.sum()), heads]
        kept, refreshed, heads = agreement.over_ranks(request.call, request.q.device, own)
        state.layer_density = kept / heads
        if state.calls > 1:
            state.refreshed += refreshed / heads

    def _run(self, request: Request, state: LayerState) -> Tensor:
        """Plan if the mask is new, and compute. The output is laid out as diffusers reads it: [B, N, H, D]."""
        assert state.packed is not None and request.refresh is not None and state.density is not None
        kernel = self._kernels[_kind(request.q, state.packed)]
        if state.plan is None:
            state.plan = kernel.plan(state.packed.unpack())
            request.timer.lap("planning")
        batch, heads, n, _ = request.q.shape
        out = request.q.new_empty((batch, n, heads, request.v.shape[-1])).transpose(1, 2)
        out = kernel.run(state.plan, request.q, request.k, request.v, out=out)
        request.timer.lap("attention")
        at = request.call
        self.recorder.add(
            Row(
                at.transformer,
                at.layer,
                request.step,
                at.branch,
                request.timer,
                heads=request.heads if len(request.heads) < self.heads or at.heads else None,
                density=state.density.mean(0).tolist(),
                refreshed=request.refresh.float().mean(0).tolist(),
                drift=None if request.drift is None else request.drift.nanmean(0).tolist(),
            )
        )
        return out

    # ---------------------------------------- dense or sparse

    def _for_layer(self, request: Request, reason: str) -> str:
        """The reason, if any rank has one, why the layer runs dense. Forced, each rank is free: none leaves early."""
        return reason if self.config.force_sparse else agreement.agreed(request.call, request.q.device, reason)

    def _verdict(self, request: Request, state: LayerState) -> str:
        """Why this layer runs dense although a mask was asked for; empty if sparse pays."""
        kernel = self._kernel(request, state)
        if kernel is None:
            return "no kernel serves here"
        if self.config.force_sparse:
            return ""
        costs = self.overheads or cost_model.overheads(request.q, state.backbone, kernel)
        shape, rate = agreement.layer_shape(request.call, request.q.shape), self._refresh_rate(state)
        if costs.pays(shape, state.layer_density, rate, state.backbone):
            return ""
        return "not worth it: the masks keep too much"

    def _kernel(self, request: Request, state: LayerState) -> Any:
        """The kernel for this layer's masks, or for any where all heads of this rank are dense; None if none serves."""
        if state.packed is not None:
            return self._kernels[_kind(request.q, state.packed)]
        try:
            return kernels.choose(None, request.q, self.config.kernel)
        except HeartError:
            return None

    def _cannot_pay(self, request: Request, state: LayerState) -> str:
        """Why not even a good mask would be quicker than dense; asked before anything is predicted."""
        if self.config.force_sparse:
            return ""
        try:
            kernel = kernels.choose(None, request.q, self.config.kernel)
        except HeartError:
            return ""  # the verdict after prediction says why
        costs = self.overheads or cost_model.overheads(request.q, state.backbone, kernel)
        shape, rate = agreement.layer_shape(request.call, request.q.shape), self._refresh_rate(state)
        least = cost_model.least_density(state.backbone, request.q.shape[2])
        if not costs.pays(shape, least, rate, state.backbone):
            return "not worth it: too few tokens"
        steps, likely = self.steps(), max(least, EXPECTED_DENSITY)
        if steps and not costs.start_pays(shape, likely, rate, state.backbone, steps - request.step):
            return "not worth it: the first clustering would not be won back"
        return ""

    def _refresh_rate(self, state: LayerState) -> float:
        """Share of masks to be predicted at a coming step: what was seen, leaning on an expectation at first."""
        if isinstance(self.config.reuse, reuse.Always):
            return 1.0
        seen = max(state.calls - 1, 0)
        return (state.refreshed + 2 * EXPECTED_REFRESH) / (seen + 2)

    def _postpone(self, state: LayerState, reason: str) -> str:
        """Run dense and look again later, less and less often (all ranks alike, since they agreed)."""
        state.reason = reason
        state.wait, state.patience = state.patience, min(2 * state.patience, 16)
        return reason

    # ---------------------------------------- kernel and token order

    def _choose_kernel(self, request: Request, mask: Any) -> None:
        kind = _kind(request.q, mask)
        if kind not in self._kernels:
            try:
                self._kernels[kind] = kernels.choose(mask, request.q, self.config.kernel)
            except HeartError as error:
                if self.config.kernel != "auto":
                    raise
                log.warning("dense attention: %s", error)
                self._kernels[kind] = None

    def _order(self, request: Request, backbone: Any) -> tuple[Tensor | None, list[int] | None]:
        """The permutation of the tokens, None for raster; or several, and which of them each head takes."""
        at, order = request.call, self.config.order
        if order == token_order.RASTER or at.grid is None or not hasattr(backbone, "block"):
            return None, None
        call = (tuple(at.grid), request.q.shape[2], request.text, backbone.block, request.q.device)
        if self._head_orders is None:
            return self._orders.get((order,), *call), None
        row = self._head_orders[at.transformer][at.layer]
        names = [row[h] for h in request.heads]
        if len(set(names)) == 1:
            return None if names[0] == token_order.RASTER else self._orders.get((names[0],), *call), None
        every = token_order.names_in(self._head_orders)  # one table serves all layers
        table = self._orders.get(every, *call)
        return table, None if table is None else [every.index(name) for name in names]


# ---------------------------------------- helpers


def seen_tokens(text: Text | None, n: int, backbone: Any, device: Any = None) -> slice | Tensor | None:
    """The tokens the predictor sees: no unused slots, and for SVG2, which clusters video alone, no prompt."""
    if text is None:
        return None
    if not hasattr(backbone, "q_clusters"):
        return slice(0, n - text.unused) if text.end == n else None
    return slice(0, text.start) if text.end == n else text.video_index(n, device)


def _reducer(request: Request) -> Callable[[Tensor], Tensor] | None:
    """Sums over ranks where the tensors of the model live, since NCCL knows nothing of the CPU."""
    reduce = request.call.all_reduce
    return None if reduce is None else lambda count: reduce(count.to(request.q.device)).cpu()


def _renew(anchor: Tensor | None, now: Tensor, refresh: Tensor) -> Tensor:
    """The anchor with refreshed heads taken from the present."""
    if anchor is None or bool(refresh.all()):
        return now
    chosen = refresh.to(now.device).view(1, *refresh.shape, *(1,) * (now.dim() - 3))
    return torch.where(chosen, now, anchor)


def _runs(values: list[int]) -> list[tuple[int, int]]:
    """Stretches of equal entries other than 0, as (start, stop)."""
    edges = [i for i in range(len(values) + 1) if i in (0, len(values)) or values[i - 1] != values[i]]
    return [(start, stop) for start, stop in itertools.pairwise(edges) if values[start]]


def _kind(q: Tensor, mask: Any) -> tuple:
    """What the choice of a kernel depends on."""
    mask = mask.mask if isinstance(mask, Packed) else mask
    return type(mask), q.dtype, q.device, q.shape[-1], q.shape[2]


def _has_json(config: HeartConfig) -> bool:
    return type(config.reuse).__name__ in reuse.POLICIES and hasattr(config.backbone, "to_dict")
