"""What a head takes at an operating point, in units of its dense attention: from a recorded table of costs.

Kept and approximated keys, planning and prediction at the expected refresh rate, and the first prediction of a
generation spread over its sparse steps. A budget of time is on the attention of a whole generation, dense steps included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ... import backbones
from ...backbones.base import Backbone
from ...errors import HeartError, shown
from ...online import cost_model
from ...online.cost_model import CostTable


@dataclass(frozen=True)
class TimeModel:
    """Times of one model's attention at one size.

    Args:
        kind: of device that the table is for.  digest: names its numbers.
        tokens, heads, head_dim: of an attention call.
        refresh: share of masks that is expected to be predicted anew.
        steps: denoising steps that the transformer serves.  dense_steps: of them, those that stay dense.
        scale_clusters: whether cluster counts are fitted to the number of tokens.
    """

    kind: str
    digest: str
    tokens: int
    heads: int
    head_dim: int
    refresh: float
    steps: int
    dense_steps: int
    scale_clusters: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The model as plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TimeModel:
        """The model that `to_dict` described; anything odd is refused."""
        kinds: dict[str, type] = {"kind": str, "digest": str, "refresh": float, "scale_clusters": bool}
        names, least = list(cls.__dataclass_fields__), dict.fromkeys(("tokens", "heads", "head_dim", "steps"), 1)
        if not isinstance(data, dict) or set(data) != set(names):
            raise HeartError(f"times need {', '.join(names)}: calibrate again")
        for name in names:
            kind = kinds.get(name, int)
            odd = type(data[name]) is not kind or (
                kind in (int, float) and not least.get(name, 0) <= data[name] < 1 << 40
            )
            if odd or (name == "refresh" and data[name] > 1) or (name == "dense_steps" and data[name] >= data["steps"]):
                raise HeartError(f"the time model's {name} is {shown(data[name])}: calibrate again")
        return cls(**data)

    def lines(self, points: Sequence[dict[str, Any]], table: CostTable) -> np.ndarray:
        """Time of each point as a line in the computed share, [K, 2]: fixed part and rate; τ ≥ 1 is dense attention."""
        return np.array(
            [
                (1.0, 0.0)
                if point["threshold"] >= 1
                else self._line(backbones.from_dict(point["backbone"]), point["rest"], table)
                for point in points
            ]
        )

    def _line(self, backbone: Backbone, rest: str, table: CostTable) -> tuple[float, float]:
        """The time as a straight line in the computed share."""
        scaled = backbone.scaled_to(self.tokens) if self.scale_clusters else backbone
        shape = (1, self.heads, self.tokens, self.head_dim)
        costs = table.costs(scaled, self.head_dim)
        nothing, everything = (costs.sparse_seconds(shape, c, self.refresh, scaled, rest) for c in (0.0, 1.0))
        first = costs.first_extra(shape, scaled) / max(1, self.steps - self.dense_steps)
        dense = costs.dense_seconds(shape)
        return (nothing + first) / dense, (everything - nothing) / dense

    def limit(self, budget: float) -> float:
        """The mean time of sparse steps that keeps a whole generation at this share of dense attention."""
        sparse = self.steps - self.dense_steps
        limit = (budget * self.steps - self.dense_steps) / sparse
        if limit <= 0:
            raise HeartError(
                f"{self.dense_steps} dense steps of {self.steps} take more than {budget:g} of a dense generation's "
                "attention: give a larger budget of time, or fewer dense steps"
            )
        return limit

    def refuse_too_quick(self, budget: float, mean: float) -> None:
        """Raise if a generation takes more than the budget even with every head at its quickest, `mean` at sparse steps."""
        least = self.whole(mean)
        if least > budget:
            raise HeartError(
                f"no assignment takes as little as {budget:g} of a dense generation's attention time: the least that these "
                f"points reach with {self.dense_steps} dense steps of {self.steps} is {math.ceil(least * 1e4) / 1e4:g}"
            )

    def whole(self, mean: float) -> float:
        """The share of a dense generation's attention that a mean time of the sparse steps comes to."""
        return (mean * (self.steps - self.dense_steps) + self.dense_steps) / self.steps


def table_for(kind: str, path: str | None = None) -> CostTable:
    """The table in a file of `heart tune-costs`, or the one that ships for this kind of device."""
    return cost_model.shipped(kind) if path is None else cost_model.load(path)
