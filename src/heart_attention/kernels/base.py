"""What a kernel offers: reasons why it cannot serve, a plan made once, runs of it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import HeartError
from .capability import Call
from .plan import Plan, make_plan


@dataclass(frozen=True)
class Visit:
    """How a run goes through the groups that a row keeps, and what it is to say of them.

    A group gains the most, over the queries of its row, by which its largest logit exceeds those of the groups visited
    before, in units of log2; the first visited gains infinity.

    Args:
        descending: bool [B, H], heads that visit their groups from the last; None: none does.
        gains: fp32 [B, H, Mq, Mk], takes the gains; None if nobody asks. Groups that are not kept gain infinity.
        skip: fp32 [B, H]: exponentials and values of a group that gains no more than minus this are left out
            (SpargeAttn's pvthreshd, 0 or more); None leaves nothing out.
        untested: so many groups at the end of a row are never left out.
        whole_rows: rows from this one on leave nothing out.
    """

    descending: Tensor | None = None
    gains: Tensor | None = None
    skip: Tensor | None = None
    untested: int = 0
    whole_rows: int = 1 << 40


class Kernel:
    """Base of all kernels: a subclass gives `name` and `run`, and overrides what it does in its own way.

    `rest` says what becomes of the groups of keys that a mask leaves out: "drop", "mean" (each counts as one key with
    its mean key, its mean value and the weight of its size), or "first-order" (that, and PISA's linear term).
    """

    name: str
    rests: tuple[str, ...] = ("drop", "mean")  # those it knows
    log_sums: bool = False  # whether `run_part` works
    visits: bool = False  # whether `run_visit` works
    rest_mass: bool = False  # whether `run` can say how much softmax mass the approximated part held

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """Why it cannot serve here, or not for this mask, these queries and this rest; empty if it can."""
        return []

    def reasons_on(self, call: Call) -> list[str]:
        """Why it would not serve such a call on such a GPU, whether or not one is here; empty if it would."""
        return ["it runs on a CPU"]

    def reasons_not_auto(self, mask: Any = None, q: Tensor | None = None) -> list[str]:
        """Why "auto" passes it over although it could serve; empty if it does not."""
        return []

    def plan(self, mask: Any, rest: str = "drop") -> Plan:
        """Prepare a mask once."""
        return make_plan(mask, self.name, rest=rest, rests=self.rests)

    def run(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        scale: float | None = None,
        mass: Tensor | None = None,
    ) -> Tensor:
        """Compute it as often as wanted, [B, H, N, D].

        `mass`, fp32 [B, H], takes each head's share of softmax mass in the approximated part, the mean over queries;
        only kernels with `rest_mass` are given one.
        """
        raise NotImplementedError

    def run_visit(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visit: Visit,
        out: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """As `run`, the rest dropped, going through the kept groups as `visit` says."""
        raise HeartError(f"kernel {self.name!r} does not say which tiles could be skipped: choose eager or cpu")

    def run_part(self, mask: Any, q: Tensor, k: Tensor, v: Tensor, rest: str = "drop") -> tuple[Tensor, Tensor]:
        """Attention over a part of each query's keys, possibly none: outputs [B, H, N, D] and log-sums [B, H, N].

        Parts over disjoint keys add up: weigh their outputs with the softmax of their log-sums. `rest` may also be "only":
        nothing but the approximated groups of this mask.
        """
        raise HeartError(f"kernel {self.name!r} does not give log-sums: choose one whose `log_sums` is true")


class Missing(Kernel):
    """Stands for a kernel whose module cannot be imported."""

    def __init__(self, name: str, reason: str):
        self.name, self.reason = name, reason

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """That it cannot be imported."""
        return [self.reason]

    def plan(self, mask: Any, rest: str = "drop") -> Plan:
        """Refuse."""
        raise HeartError(f"kernel {self.name!r} cannot serve: {self.reason}")

    def run(self, plan: Plan, *tensors: Any, **options: Any) -> Tensor:
        """Refuse."""
        raise HeartError(f"kernel {self.name!r} cannot serve: {self.reason}")


class Adapted(Kernel):
    """A user's kernel that is no `Kernel`, or whose `reasons_not` and `plan` do not take `rest`: it then only drops."""

    def __init__(self, kernel: Any, takes_rest: bool):
        self.kernel, self.name, self.takes_rest = kernel, kernel.name, takes_rest

    def reasons_not(self, mask: Any = None, q: Tensor | None = None, rest: str = "drop") -> list[str]:
        """Its own reasons, and perhaps that it cannot approximate the rest."""
        if self.takes_rest:
            return self.kernel.reasons_not(mask, q, rest)
        more = [] if rest == "drop" else ["it has no parameter `rest`, so it only drops what a mask leaves out"]
        return [*self.kernel.reasons_not(mask, q), *more]

    def plan(self, mask: Any, rest: str = "drop") -> Plan:
        """Its own plan."""
        if self.takes_rest:
            return self.kernel.plan(mask, rest)
        if rest != "drop":
            raise HeartError(f"kernel {self.name!r} cannot plan rest={rest!r}: it has no parameter `rest`")
        return self.kernel.plan(mask)

    def run(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        scale: float | None = None,
        mass: Tensor | None = None,
    ) -> Tensor:
        """Its own run."""
        return self.kernel.run(plan, q, k, v, out=out, scale=scale)


def adapted(kernel: Any) -> Kernel:
    """A user's kernel as the engine calls kernels; looked at once, when it is registered."""
    takes_rest = all("rest" in inspect.signature(f).parameters for f in (kernel.reasons_not, kernel.plan))
    return kernel if takes_rest and isinstance(kernel, Kernel) else Adapted(kernel, takes_rest)
