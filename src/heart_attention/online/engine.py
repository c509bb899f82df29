"""One attention call: dense or sparse, which heads refresh, predict, plan, run; and the state all that needs.

The engine is a handler of `models.attachment`, but knows nothing of diffusers: `heart.attention` drives it
directly. State lives per (transformer, layer, guidance branch, first batch item) and, inside, per batch item
and head. Whatever decides dense or sparse is a pure function of config, shapes, densities and a recorded table
of costs, and is decided once for the layer over all ranks that share its heads.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..config import HeartConfig
from ..errors import HeartError
from ..kernels.ops.transfer import Reading
from ..masks import Mask, Text
from . import reuse, thresholds, warmup
from .call import CallContext, Dense, Handler
from .cost_model import CostTable
from .layer_state import HeadGroup, LayerState, Request
from .payoff import TOO_FEW, Payoff
from .points import GroupSpec, ModelPoints, restrict
from .predict import predict_some
from .stats import ALL_DENSE, DONE, Recorder, Row, Stats, Timer

log = logging.getLogger(__name__)

NO_NOISE = (
    "nothing tells the noise level here: all steps take the operating points of the first phase, a calibration with one "
    "phase (--phases 1) suits better"
)
PLAN_BYTES = 400 << 20  # of all layers and both branches; larger plans are not kept but made at each call


class Engine(Handler):
    """Serves the attention of one model (or a pair of experts) as its config says.

    Args:
        config: what to do.
        layers, heads: of each transformer.
        transformers: how many share this engine.
        costs: the table to decide dense or sparse by; None takes the config's, or the one shipped for the device.
    """

    def __init__(
        self, config: HeartConfig, layers: int, heads: int, transformers: int = 1, costs: CostTable | None = None
    ) -> None:
        self.config, self.layers, self.heads, self.transformers = config, layers, heads, transformers
        self.points = ModelPoints(config, transformers, layers, heads)
        self.recorder = Recorder(layers, heads)
        config.reuse.check(layers)
        self.points.check_decision(config.reuse)
        if config.kernel != "auto":
            kernels.choose(name=config.kernel)  # raises with the reasons if it cannot serve here at all
        self.steps: Callable[[], int | None] = lambda: None  # steps of a generation, where a pipeline tells
        self.payoff = Payoff(config, self.points, self.recorder, lambda: self.steps(), costs)
        self._states: dict[tuple, LayerState] = {}
        self._last: dict[tuple, int | None] = {}
        self._kernels: dict[tuple, Any] = {}
        self._dense_steps: warmup.DenseSteps | None = None  # of this generation, chosen at its first call
        self._first_forward = True
        self._prepared = False  # whether what kernels need is built: it must not count as a call's time

    def set_thresholds(self, value: Any) -> None:
        """Other thresholds from now on (any form a config takes); masks made with the old ones are dropped."""
        self.points.set_thresholds(value)
        self.payoff.forget()

    # ---------------------------------------- handler

    @property
    def engine(self) -> Engine:
        """Itself."""
        return self

    def start_forward(self, call: CallContext) -> None:
        """A forward of the transformer begins: a calibration made for something else says so, once."""
        if not self._first_forward:
            return
        self._first_forward = False
        config, source = self.config, thresholds.source(self.config.thresholds)
        summary = config.summary()
        backbone = summary["_data"]["backbone"] if summary else None
        for sentence in source.warnings_for(
            steps=self.steps(), grid=call.grid, order=config.order, backbone=backbone, rest=config.rest
        ):
            log.warning("%s", sentence)
            self.recorder.notes.append(sentence)

    def fallback(self, call: CallContext, reason: str) -> None:
        """A call ran dense without coming here."""
        self.recorder.add(Row(call.transformer, call.layer, call.step or 0, call.branch, Timer(), reason))

    def reset(self) -> None:
        """A generation is over: drop its masks, anchors and plans."""
        for state in self._states.values():
            self._settle(state)
        if self._states:
            self.recorder.memory = self.memory()
        self._dense_steps = None
        self.recorder.warn_if_all_warm_up()
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
        if not self._prepared:
            self._prepared = True
            kernels.prepare(q.device)
        timer = Timer(q.is_cuda)
        reason = self._reason_dense(call, q, k)
        if not reason:
            out, reason = self._sparse(call, q, k, v, timer, dense)
            if out is not None:
                return out
        return self._dense(call, q, k, v, timer, dense, reason)

    def stats(self, wait: bool = False) -> Stats:
        """What happened so far; `wait` for GPU times and densities that are not known yet."""
        for state in self._states.values():
            if wait or state.ready:
                self._settle(state)
        return self.recorder.summary(self.config.summary(), self.memory(), wait)

    def memory(self) -> dict[str, int]:
        """Bytes of all caches by kind; after a generation, what they were at its end."""
        if not self._states:
            return self.recorder.memory
        total = dict.fromkeys(("masks", "plans", "anchors", "centroids"), 0)
        for state in self._states.values():
            for kind, size in state.nbytes().items():
                total[kind] = total.get(kind, 0) + size
        return total

    # ---------------------------------------- dense

    def surely_dense(self, call: CallContext, layer: int, shape: torch.Size) -> str:
        """Why the call of a layer will run dense, as far as step, thresholds and the shape [B, N, H, D] tell."""
        chosen = self._dense_steps
        if chosen is None or call.step is None:
            return ""
        if reason := chosen.reason(call.step):
            return "" if call.step == chosen.first - 1 and self.points.warms_up else reason  # masks may be predicted
        phase = self.points.phase(call.sigma)
        if self.points.dense_layer(call.transformer, phase, layer):
            return ALL_DENSE
        batch, n, heads, dim = shape
        return TOO_FEW if self.payoff.is_hopeless((call.transformer, layer, phase, (batch, heads, n, dim))) else ""

    def note_dense(self, call: CallContext, layer: int, timer: Timer | float, reason: str) -> None:
        """Count a call that was surely dense: its timer, or on a CPU the seconds that it took."""
        row = Row(call.transformer, layer, call.step or 0, call.branch, DONE, reason)
        if isinstance(timer, float):
            self.recorder.add_dense(row, timer)
            return
        row.timer = timer
        self.recorder.add(row)

    def _reason_dense(self, call: CallContext, q: Tensor, k: Tensor) -> str:
        """Why this call runs dense, as far as can be said without looking at its values; the same on all ranks."""
        if call.step is not None and (reason := self.dense_steps(call).reason(call.step)):
            return reason
        if self.points.dense_layer(call.transformer, self.points.phase(call.sigma), call.layer):
            return ALL_DENSE
        if call.layer < self.config.dense_layers:
            return "dense layer"
        if q.shape != k.shape:
            return "keys and queries of different shapes"
        if q.requires_grad and torch.is_grad_enabled():
            return self._once("gradients are wanted", "dense attention: gradients are wanted; use torch.no_grad()")
        return ""

    def dense_steps(self, call: CallContext) -> warmup.DenseSteps:
        """Which steps of this generation are dense: chosen once for it, from its schedule."""
        if self._dense_steps is None:
            config = self.config
            self._dense_steps = warmup.choose(config.dense_steps, config.dense_last_steps, self.steps(), call.schedule)
            self.recorder.take_dense_steps(self._dense_steps)
            if call.sigma is None and self.points.has_phases:
                self.recorder.warn(NO_NOISE)
        return self._dense_steps

    def _once(self, reason: str, sentence: str) -> str:
        """Log the sentence the first time this reason comes up."""
        if reason not in self.recorder.reasons:
            log.warning("%s", sentence)
        return reason

    def _dense(
        self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, timer: Timer, dense: Dense, reason: str
    ) -> Tensor:
        out = dense(q, k, v)
        timer.lap("dense")
        if self._warms_up(call, q, k):
            self._warm_up(call, q, k, v, timer)
        self._note_dense(call, timer, reason)
        return out

    def _note_dense(self, call: CallContext, timer: Timer, reason: str) -> None:
        step = call.step if call.step is not None else 0
        self.recorder.add(Row(call.transformer, call.layer, step, call.branch, timer, reason))

    def _warms_up(self, call: CallContext, q: Tensor, k: Tensor) -> bool:
        """Whether masks are predicted at this dense step, the last of the warm-up."""
        if call.step is None or call.step != self.dense_steps(call).first - 1 or call.layer < self.config.dense_layers:
            return False
        groups = self.points.groups(call.transformer, self.points.phase(call.sigma), call.layer)
        able = q.shape == k.shape and not (q.requires_grad and torch.is_grad_enabled())
        return able and all(g.backbone.warms_up for g in groups) and any(min(g.tau) < 1 for g in groups)

    def _warm_up(self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, timer: Timer) -> None:
        """Masks and anchors from a dense step, unless sparse attention cannot pay."""
        texts: list[Any] = call.text or [None]
        alike = all(text == texts[0] for text in texts)
        for i, text in enumerate(texts[:1] if alike else texts):
            one = call if alike else dataclasses.replace(call, item=call.item + i, text=[text])
            item = slice(None) if alike else slice(i, i + 1)
            request = self._request(one, q[item], k[item], v[item], timer, text)
            state = self._state(request)
            if not self.payoff.for_layer(request, self.payoff.cannot_pay(request, state)):
                self._decide(request, state)
                self._refresh(request, state)

    # ---------------------------------------- sparse

    def _sparse(
        self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, timer: Timer, dense: Dense
    ) -> tuple[Tensor | None, str]:
        """The sparse output, or None and why the call had better run dense."""
        texts = call.text
        if not texts or all(text == texts[0] for text in texts):
            return self._sparse_call(self._request(call, q, k, v, timer, texts[0] if texts else None), dense)
        return self._item_by_item(call, q, k, v, dense), ""

    def _item_by_item(self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, dense: Dense) -> Tensor:
        """Prompts of different lengths: one batch item after the other; dense attention runs at most once."""
        outs: list[Tensor] = []
        whole: Tensor | None = None
        for i, text in enumerate(call.text or []):
            one = dataclasses.replace(call, item=call.item + i, text=[text])
            item, timer = slice(i, i + 1), Timer(q.is_cuda)
            alone = lambda q, k, v, item=item: dense(q, k, v, item)  # noqa: E731
            out, reason = self._sparse_call(self._request(one, q[item], k[item], v[item], timer, text), alone)
            if out is None:
                if whole is None:
                    whole = dense(q, k, v)
                    timer.lap("dense")
                self._note_dense(one, timer, reason)
                out = whole[item]
            outs.append(out)
        return torch.cat(outs)

    def _request(self, call: CallContext, q: Tensor, k: Tensor, v: Tensor, timer: Timer, text: Text | None) -> Request:
        heads = call.heads or list(range(call.head_offset, call.head_offset + q.shape[1]))
        text = text if text is not None and text.prompt + text.unused else None
        return Request(call, q, k, v, timer, text, heads, phase=self.points.phase(call.sigma))

    def _sparse_call(self, request: Request, dense: Dense) -> tuple[Tensor | None, str]:
        if self.payoff.known_hopeless(request):
            return None, TOO_FEW
        state = self._state(request)
        if state.wait > 0:
            state.wait -= 1
            return None, state.reason
        if not state.calls:
            reason = self.payoff.for_layer(request, self.payoff.cannot_pay(request, state))
            if reason:
                return None, self.payoff.postpone(state, reason)
        self._decide(request, state)
        self._refresh(request, state)
        reason = self.payoff.verdict(request, state)
        if reason:
            return None, reason
        return self._run(request, state, dense), ""

    def _state(self, request: Request) -> LayerState:
        """The state of this layer and branch; a new one if anything that masks depend on has changed.

        What changes for any head of the layer counts, on whatever rank it is: all ranks begin anew together.
        """
        call, q = request.call, request.q
        key = (call.transformer, call.layer, call.branch, call.item)
        groups = self.points.groups(call.transformer, request.phase, call.layer)
        specs = restrict(groups, request.heads)
        signature = (q.shape, q.dtype, q.device, request.text, call.grid, call.generation, tuple(request.heads), groups)
        state = self._states.get(key)
        if state is not None:
            self._settle(state)
        if state is None or state.signature != signature:
            shape = q.shape[:2]
            cached, at_step = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int64)
            made = [self._group(spec, places, q.shape[2]) for spec, places in specs]
            state = self._states[key] = LayerState(signature, made, cached, at_step)
        request.step = call.step if call.step is not None else self.dense_steps(call).first + state.calls
        return state

    def _group(self, spec: GroupSpec, places: list[int], n: int) -> HeadGroup:
        backbone = self.payoff.fitted(spec.backbone, n).for_rest(spec.rest)
        return HeadGroup(spec, backbone, places, backbone.new_state())

    # ---------------------------------------- which heads refresh

    def _decide(self, request: Request, state: LayerState) -> None:
        """Drift against the anchor and the policy's decision; heads that refresh take the present as anchor."""
        policy = self.config.reuse
        now = None if policy.features is None else self._features(request, state, policy.features)
        if policy.decide == "device" and now is not None and state.anchor is not None:
            self._decide_on_device(request, state, now)
        else:
            self._decide_on_host(request, state, now)
        request.timer.lap("drift")

    def _decide_on_host(self, request: Request, state: LayerState, now: Tensor | None) -> None:
        """The decision is waited for, so that only heads that refresh are predicted."""
        policy, call = self.config.reuse, request.call
        if now is not None:
            known = state.anchor is not None
            request.drift = torch.zeros(state.cached.shape)
            if known and state.norm is None and policy.wants_norm:  # both by one copy: the only one that is waited for
                request.drift, state.norm = torch.stack(
                    [reuse.drift(state.anchor, now), reuse.norm(state.anchor)]
                ).cpu()
            elif known:
                request.drift = reuse.drift(state.anchor, now).cpu()
        age, norm = request.step - state.refreshed_at, request.drift if state.anchor is None else state.norm
        reduce = _reducer(request)
        view = reuse.ReuseState(state.cached, age, call.layer, request.step, norm, call.heads_total, reduce)
        request.refresh = policy.refresh(request.drift, view).cpu() | ~state.cached
        if request.drift is not None:
            request.drift = request.drift.where(state.cached, float("nan"))
        if bool(request.refresh.any()):
            if now is not None:
                state.anchor, state.norm = _renew(state.anchor, now, request.refresh), None
            state.refreshed_at[request.refresh] = request.step

    def _decide_on_device(self, request: Request, state: LayerState, now: Tensor) -> None:
        """The same without a wait: all heads are predicted, and the device chooses which masks are taken."""
        policy, call, anchor = self.config.reuse, request.call, state.anchor
        assert anchor is not None
        drift = reuse.drift(anchor, now)
        norm = reuse.norm(anchor) if policy.wants_norm else None
        cached, at_step = torch.ones_like(drift, dtype=torch.bool), state.refreshed_at.to(drift.device)
        age = request.step - at_step
        view = reuse.ReuseState(cached, age, call.layer, request.step, norm, call.heads_total, call.all_reduce)
        request.chosen = policy.refresh(drift, view)
        request.refresh = torch.ones_like(state.cached)
        state.anchor = _renewed(anchor, now, request.chosen)
        state.refreshed_at = torch.where(request.chosen, request.step, at_step)
        state.decision = Reading(torch.stack([drift, request.chosen.float()]))

    def _features(self, request: Request, state: LayerState, kind: str) -> Tensor:
        """Features of all heads, each over the tokens that its predictor sees."""
        n, device, text = request.q.shape[2], request.q.device, request.text
        if len(state.groups) == 1 or text is None:
            seen = state.groups[0].backbone.seen_tokens(text, n, device)
            return reuse.features(request.q, request.k, kind, seen)
        parts = []
        for group in state.groups:
            seen = group.backbone.seen_tokens(text, n, device)
            parts.append(reuse.features(request.q[:, group.places], request.k[:, group.places], "mean", seen))
        back = torch.tensor([place for group in state.groups for place in group.places]).argsort()
        return torch.cat(parts, 2)[:, :, back.to(device)]

    def _refresh(self, request: Request, state: LayerState) -> None:
        """Predict masks for the heads that refresh and put them beside those that stay."""
        assert request.refresh is not None
        for group in state.groups:
            which = _refreshing(request, group)
            q, k, v = (_take_heads(x, group.places) for x in (request.q, request.k, request.v))
            if group.learnt is not None:
                self._adopt(group, group.learnt.unpack(), q)
                group.learnt = None
            if bool(which.any()):
                fresh = self._fresh_mask if request.chosen is None else self._chosen_mask
                self._adopt(group, fresh(request, group, which, q, k, v), q)
            elif group.packed is not None and group.backbone.remaps:
                self._adopt(group, group.backbone.remap(group.packed.unpack(), q, k, v, group.spec.tau), q)
        state.cached |= request.refresh
        request.timer.lap("prediction")

    def _fresh_mask(self, request: Request, group: HeadGroup, which: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Mask:
        """The group's mask with the heads in `which` predicted anew."""
        call, text = request.call, request.text
        orders = group.spec.orders.of_call(
            call.transformer, call.layer, group.spec.heads, call.grid, q.shape[2], text, q.device
        )
        key = (call.layer, call.branch, call.item)
        numbers = list(group.spec.heads)
        fresh = predict_some(
            group.backbone, q, k, v, group.spec.tau, which, group.memory, text,
            orders=orders, heads=numbers, key=key, grid=call.grid,
        )  # fmt: skip
        batch, heads = q.shape[:2]
        if bool(which.all()):
            return fresh.split_batch(batch)
        if group.packed is None:
            return fresh.full_like(batch, heads, text).put(which, fresh)
        stale = group.packed.unpack()
        if group.backbone.remaps:
            stale = group.backbone.remap(stale, q, k, v, group.spec.tau)
        return stale.put(which, fresh)

    def _chosen_mask(self, request: Request, group: HeadGroup, which: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Mask:
        """The group's mask with those heads predicted anew that the device chose; all of `which` are predicted."""
        assert group.packed is not None and request.chosen is not None
        before = group.memory.copy()
        stale = group.packed.unpack()
        if group.backbone.remaps:
            stale = group.backbone.remap(stale, q, k, v, group.spec.tau)
        chosen = request.chosen[:, group.places]
        mask = stale.where(chosen, self._fresh_mask(request, group, which, q, k, v))
        group.memory.keep(before, chosen, group.spec.heads, request.call.item)
        return mask

    def _adopt(self, group: HeadGroup, mask: Mask, q: Tensor) -> None:
        """From now on the group computes this mask."""
        group.packed, group.plan = mask.packed(), None
        group.reading = Reading(torch.stack(list(mask.shares(group.spec.rest))))
        if not q.is_cuda:  # on a GPU the next call takes them: by then they have arrived, and nobody waits
            group.settle()
        group.kernel = self._kernel(q, mask, group.spec.rest, group.backbone.visits)

    # ---------------------------------------- attention

    def _kernel(self, q: Tensor, mask: Mask, rest: str, visits: bool) -> Any:
        """The kernel for masks of this kind and this rest, None if none serves."""
        key = (mask.kind, rest, visits, q.dtype, q.device, q.shape[-1], q.shape[2])
        if key not in self._kernels:
            try:
                self._kernels[key] = kernels.choose(mask, q, self.config.kernel, rest, visits)
            except HeartError as error:
                if self.config.kernel != "auto":
                    raise
                log.warning("dense attention: %s", error)
                self._kernels[key] = None
        return self._kernels[key]

    def _run(self, request: Request, state: LayerState, dense: Dense) -> Tensor:
        """Compute every group. The output is laid out as diffusers reads it: [B, N, H, D]."""
        batch, heads, n, _ = request.q.shape
        out = request.q.new_empty((batch, n, heads, request.v.shape[-1])).transpose(1, 2)
        for group in state.groups:
            self._run_group(request, group, out, dense)
        self._drop_large_plans(state)
        self._record(request, state)
        return out

    def _drop_large_plans(self, state: LayerState) -> None:
        """Keep none of a layer's plans if those of all layers and both branches would take too much."""
        held = sum(group.plan.nbytes for group in state.groups if group.plan is not None)
        if held * 2 * self.layers * self.transformers > PLAN_BYTES:
            for group in state.groups:
                group.plan = None

    def _run_group(self, request: Request, group: HeadGroup, out: Tensor, dense: Dense) -> None:
        q, k, v, whole = (_take_heads(x, group.places) for x in (request.q, request.k, request.v, out))
        if group.packed is None:  # every head of the group is dense by its threshold
            result = dense(q, k, v)
        else:
            if group.plan is None:
                group.plan = group.kernel.plan(group.packed.unpack(), group.spec.rest)
                request.timer.lap("planning")
            result = self._run_kernel(request, group, q, k, v, whole)
            if group.backbone.remaps:  # the next call makes both anew
                group.packed, group.plan = group.packed.without_bits(), None
        if result is not whole or whole.data_ptr() != out[:, group.places[0] :].data_ptr():
            out[:, group.places] = result
        request.timer.lap("attention")

    def _run_kernel(self, request: Request, group: HeadGroup, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """The group's plan on its heads; its backbone may have a say in how the kernel goes through it."""
        if group.backbone.visits:
            return self._run_visit(request, group, q, k, v, out)
        mass = self._mass(group, q)
        result = group.kernel.run(group.plan, q, k, v, out=out, **({} if mass is None else {"mass": mass}))
        group.rest_mass = None if mass is None else Reading(mass)
        return result

    def _run_visit(self, request: Request, group: HeadGroup, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """As the backbone wants it visited; it is told what the heads that refresh saw, for the mask of the next call."""
        assert group.packed is not None
        call, mask, which = request.call, group.packed.unpack(), _refreshing(request, group)
        names: Any = {"heads": list(group.spec.heads), "key": (call.layer, call.branch, call.item)}
        visit = group.backbone.visit(group.memory, mask, which, **names)
        if visit is None:
            return group.kernel.run(group.plan, q, k, v, out=out)
        result = group.kernel.run_visit(group.plan, q, k, v, visit, out)
        if visit.gains is not None:
            learnt = group.backbone.learn(group.memory, mask, visit.gains, which, group.spec.tau, **names)
            group.learnt = learnt.packed()
        return result

    def _mass(self, group: HeadGroup, q: Tensor) -> Tensor | None:
        """Where the kernel writes each head's share of softmax mass in the approximated part; None if it cannot."""
        wanted = group.spec.rest != "drop" and group.kernel.rest_mass
        return torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device) if wanted else None

    def _record(self, request: Request, state: LayerState) -> None:
        assert request.refresh is not None
        call = request.call
        state.late = Row(
            call.transformer,
            call.layer,
            request.step,
            call.branch,
            request.timer,
            heads=request.heads if len(request.heads) < self.heads or call.heads else None,
            refreshed=None if request.chosen is not None else request.refresh.float().mean(0).tolist(),
            drift=None if request.drift is None else request.drift.nanmean(0).tolist(),
            kernel="+".join(dict.fromkeys(g.kernel.name for g in state.groups if g.kernel is not None)),
        )
        readings = [state.decision, *(group.rest_mass for group in state.groups)]
        under_way = request.q.is_cuda and any(reading is not None for reading in readings)
        if not under_way and all(group.reading is None for group in state.groups):
            self._settle(state)

    def _settle(self, state: LayerState) -> None:
        """Take over figures that were under way from a GPU, and tell the recorder of the call that they belong to."""
        for group in state.groups:
            group.settle()
        if state.late is not None:
            if state.decision is not None:
                state.late.drift, state.late.refreshed = state.decision.values().mean(1).tolist()
                state.decision = None
            state.late.density = state.per_head("density").mean(0).tolist()
            state.late.cost = state.per_head("cost").mean(0).tolist()
            state.late.rest_mass = state.rest_mass()
            self.recorder.add(state.late)
            state.late = None


# ---------------------------------------- helpers


def _refreshing(request: Request, group: HeadGroup) -> Tensor:
    """The group's heads that refresh and are sparse, bool [B, H]."""
    assert request.refresh is not None
    return request.refresh[:, group.places] & torch.tensor([t < 1 for t in group.spec.tau])


def _take_heads(x: Tensor, places: list[int]) -> Tensor:
    """Some heads of x [B, H, N, D]: a view where they are a stretch, else a copy."""
    if len(places) == x.shape[1]:
        return x
    first, last = places[0], places[-1]
    return x[:, first : last + 1] if last - first + 1 == len(places) else x[:, places]


def _reducer(request: Request) -> Callable[[Tensor], Tensor] | None:
    """Sums over ranks where the tensors of the model live, since NCCL knows nothing of the CPU."""
    reduce = request.call.all_reduce
    return None if reduce is None else lambda count: reduce(count.to(request.q.device)).cpu()


def _renew(anchor: Tensor | None, now: Tensor, refresh: Tensor) -> Tensor:
    """The anchor with refreshed heads taken from the present."""
    return now if anchor is None or bool(refresh.all()) else _renewed(anchor, now, refresh.to(now.device))


def _renewed(anchor: Tensor, now: Tensor, chosen: Tensor) -> Tensor:
    """The anchor with the chosen heads, bool [B, H] beside it, taken from the present."""
    return torch.where(chosen.view(1, *chosen.shape, *(1,) * (now.dim() - 3)), now, anchor)
