"""Whether sparse attention pays for a layer: asked before a first prediction, and again of the masks it made.

A pure function of config, shapes, densities and a recorded table of costs, the same on all ranks that share the layer.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import kernels
from ..backbones.base import Backbone
from ..config import HeartConfig
from ..errors import HeartError
from . import agreement, cost_model
from .cost_model import CostTable, Share
from .layer_state import LayerState, Request
from .points import ModelPoints
from .stats import Recorder

TOO_FEW = "not worth it: too few tokens"
# A look at masks costs a prediction: it is taken where likely masks would be quicker than dense by this much.
LOOK = 0.25
LONGEST_WAIT = 16  # calls after which a layer that runs dense is looked at again


class Payoff:
    """Decides dense or sparse for an engine.

    Args:
        config, points: what the engine serves.
        recorder: told which table decided.
        steps: how many a generation takes, where a pipeline tells.
        costs: the table; None takes the config's, or the one shipped for the device.
    """

    def __init__(
        self,
        config: HeartConfig,
        points: ModelPoints,
        recorder: Recorder,
        steps: Callable[[], int | None],
        costs: CostTable | None,
    ) -> None:
        self.config, self.points, self.recorder, self.steps = config, points, recorder, steps
        self.costs = costs if costs is not None or config.cost_table is None else cost_model.load(config.cost_table)
        self._too_few: set[tuple] = set()  # layers and shapes at which no mask can pay: nothing more is asked of them

    def forget(self) -> None:
        """Thresholds have changed: ask again."""
        self._too_few.clear()

    def known_hopeless(self, request: Request) -> bool:
        """Whether masks are not worth a look here, as an earlier call found."""
        return self.is_hopeless(self._place(request))

    def is_hopeless(self, place: tuple) -> bool:
        """The same for a transformer, layer, phase and shape [B, H, N, D]."""
        return place in self._too_few

    def cannot_pay(self, request: Request, state: LayerState) -> str:
        """Why likely masks would not be quicker than dense, or not by enough to look at them; asked before anything is predicted.

        It looks at all heads of the layer, on whatever rank they are, so that all ranks answer alike.
        """
        if self.config.force_sparse:
            return ""
        table = self._table(request.q)
        if table is None:
            return ""  # the verdict after prediction says why
        rate = state.refresh_rate(self.config.reuse.expected_refresh)
        likely = self._likely_shares(request)
        sparse, dense = table.seconds(likely, rate)
        if (sparse + table.cold_seconds(likely, rate)) * (1 + LOOK) >= dense:
            if request.call.all_reduce is None:  # ranks ask each time, so that all of them make the same calls
                self._too_few.add(self._place(request))
            return TOO_FEW
        steps = self.steps()
        if steps and not table.first_pays(likely, rate, steps - request.step):
            return "not worth it: the first clustering would not be won back"
        return ""

    def _place(self, request: Request) -> tuple:
        """All that the question depends on whether likely masks would pay."""
        return request.call.transformer, request.call.layer, request.phase, tuple(request.q.shape)

    def _likely_shares(self, request: Request) -> list[Share]:
        """All heads of the layer, with what their masks are likely to cost."""
        call, (batch, _, n, dim) = request.call, request.q.shape
        shares = []
        for group in self.points.groups(call.transformer, request.phase, call.layer):
            backbone = self.fitted(group.backbone, n).for_rest(group.rest)
            cost = sum(1.0 if tau >= 1 else backbone.expected_cost(n, tau) for tau in group.tau) / len(group.tau)
            shares.append(Share((batch, len(group.tau), n, dim), backbone, group.rest, cost))
        return shares

    def verdict(self, request: Request, state: LayerState) -> str:
        """Why this layer runs dense although masks were predicted; empty if sparse pays. The same on all ranks."""
        served = all(group.kernel is not None for group in state.groups if group.packed is not None)
        state.calls += 1
        layer = self.points.groups(request.call.transformer, request.phase, request.call.layer)  # on whatever rank
        if self.config.force_sparse or any(group.backbone.learns for group in layer):  # who learns must compute
            return "" if served else "no kernel serves here"
        reason = "" if served else "no kernel serves here"
        shares, refreshed = self._measured_shares(request, state)
        if state.calls > 1:
            state.refreshed += refreshed
        table = self._table(request.q)
        rate = state.refresh_rate(self.config.reuse.expected_refresh)
        if not reason and table is not None and not self._pays(table, shares, rate):
            reason = "not worth it: the masks keep too much"
        reason = self.for_layer(request, reason)
        if reason:
            return self.postpone(state, reason)
        state.patience = 1
        return ""

    @staticmethod
    def _pays(table: CostTable, shares: list[Share], rate: float) -> bool:
        sparse, dense = table.seconds(shares, rate)
        return table.pays(sparse + table.cold_seconds(shares, rate), dense)

    def _measured_shares(self, request: Request, state: LayerState) -> tuple[list[Share], float]:
        """All heads of the layer as their masks are, and the share of heads refreshed, over all ranks."""
        assert request.refresh is not None
        call, (batch, _, n, dim) = request.call, request.q.shape
        layer = self.points.groups(call.transformer, request.phase, call.layer)
        place = {group.heads[0]: i for i, group in enumerate(layer)}
        owner = {head: place[group.heads[0]] for group in layer for head in group.heads}
        sums = [0.0] * len(layer)
        for head, cost in zip(request.heads, state.per_head("cost").mean(0).tolist()):
            sums[owner[head]] += cost
        refreshed = float(request.refresh.double().mean(0).sum())
        refreshed, heads, *sums = agreement.over_ranks(
            call, request.q.device, [refreshed, float(len(request.heads)), *sums]
        )
        shares = []
        for group, total in zip(layer, sums):
            backbone = self.fitted(group.backbone, n).for_rest(group.rest)
            shares.append(Share((batch, len(group.heads), n, dim), backbone, group.rest, total / len(group.heads)))
        return shares, refreshed / heads

    def fitted(self, backbone: Backbone, n: int) -> Backbone:
        """The backbone with cluster counts for `n` tokens, where the config wants that."""
        return backbone.scaled_to(n) if self.config.scale_clusters else backbone

    def for_layer(self, request: Request, reason: str) -> str:
        """The reason, if any rank has one, why the layer runs dense. Forced, each rank is free: none leaves early."""
        return reason if self.config.force_sparse else agreement.agreed(request.call, request.q.device, reason)

    def postpone(self, state: LayerState, reason: str) -> str:
        """Run dense and look again later, less and less often."""
        state.reason = reason
        state.wait, state.patience = state.patience, min(2 * state.patience, LONGEST_WAIT)
        return reason

    def _table(self, q: Tensor) -> CostTable | None:
        """The table in force; None where no kernel serves at all."""
        if self.costs is None:
            try:
                kernel = kernels.choose(None, q, self.config.kernel)
            except HeartError:
                return None
            self.costs = cost_model.shipped(cost_model.kind_of(q.device, kernel.name))
        if not self.recorder.costs:
            self.recorder.costs = {"kind": self.costs.kind, "origin": self.costs.origin, "digest": self.costs.digest}
        return self.costs
