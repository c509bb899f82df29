"""What is calibrated and how: the one object that decides, with the model, every byte of a calibration.

A setting is defined here and nowhere else. Its field says what it defaults to, what the command line calls it, how text
becomes its value and whether the file records it; the plan's hash takes every field.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ...errors import HeartError
from ...online import warmup
from ..solve.budget import Budget

if TYPE_CHECKING:  # heavy imports: the command line reads the options of this module at every start
    from ...online.points import Point
    from ..measure.candidates import Spec
    from .tasks import Job

METHODS = ("joint", "isolated", "probes")
PAPER_CANDIDATES = (0.85, 0.9, 0.95)
CANDIDATES = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)  # what backbones try unless they say otherwise


def paper_candidates(backbone: Any, shared: float) -> tuple[float, ...]:
    """The paper's three thresholds; where τ = 0.9 is not a backbone's default, the shared one and its neighbours.

    The neighbours are those among the backbone's own candidates, as 0.85 and 0.95 are of 0.9.
    """
    if backbone.default_threshold == PAPER_CANDIDATES[1]:
        return PAPER_CANDIDATES
    below = [t for t in backbone.candidates if t < shared][-1:]
    above = [t for t in backbone.candidates if t > shared][:1]
    return (*below, float(shared), *above)


@dataclass(frozen=True)
class Option:
    """How the command line sets a field of `Settings`.

    Args:
        help: one line.
        parse: from the text that a user writes to the value.
        choices: all allowed values, where there are few.
        least: the least allowed number.
        group: heading that it stands under.
        metavar: what stands for its value in the help.
    """

    help: str
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    least: float | None = None
    group: str = "method"
    metavar: str | None = None


def numbers(text: str | Sequence[float]) -> tuple[float, ...]:
    """Numbers separated by commas, at least one; a sequence as it is."""
    if not isinstance(text, str):
        return tuple(text)
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = ()
    if not values:
        raise HeartError(f"candidates are {text!r}: write numbers separated by commas")
    return values


def _about(option: Option | None = None, saved: bool = False) -> dict[str, Any]:
    """What the command line and the file make of a field."""
    return {"option": option, "saved": saved}


_GENERATION = "generations that are measured"


@dataclass(frozen=True)
class Settings:
    """What is calibrated and how.

    Args:
        backbone: `XAttention(...)`, `SVG2(...)` or any other, with the settings that inference will use.
        prompts: texts of the calibration prompts; `held_out`: of prompts used for nothing but verification.
        call: what the pipeline is called with: height, width, num_frames, num_inference_steps, guidance_scale ...
        method: "joint", "isolated" or "probes".
        candidates: thresholds to choose from; None: the paper's three for probes (see `paper_candidates`), the backbone's
            own for the others.
        rest: what becomes of what masks leave out: "drop", "mean", or PISA's "first-order", which has no gradients. None:
            "mean" for backbones whose original approximates it.
        points: operating points to choose from, in place of backbone, candidates, rest and order.
        phases: how many intervals of steps have points of their own.
        budget: what the assignment keeps to: "shared=τ", "sparsity=S", "threshold=τ", or "time=T" (of a whole
            generation's dense attention, by a table of costs).
        refresh: share of masks that is expected to be predicted anew, for a budget of time.
        cost_table: file of `heart tune-costs`, for a budget of time; None: what ships for this kind of device.
        shared: the shared threshold that is the start and the comparison, and with the budget "shared" the budget.
        strata: "paper" or "sparse" step intervals; None: paper for probes, sparse for the others.
        velocity: "guided" (what the sampler uses) or "cond" (the conditional branch alone).
        mean: how contexts are averaged: "plain" or "relative", each by its error in relation to the shared
            threshold's there; None: plain (the paper's) for probes, relative for the others.
        error: a name that `velocity_error.by_name` knows, with `error_settings`.
        contexts, held_out_contexts: how many (prompt, step) pairs for gradients and for verification.
        rounds, gamma, start: of the joint method; gamma is where the line search starts, `start` is "shared" or
            "isolated" (one backward pass a context more, a better place to begin).
        realised: match the sparsity that the shared threshold really has with all heads sparse, checked by forwards,
            rather than the mean of the table. None: so for joint and isolated, the table (the paper's way) for probes.
        dense_steps: first steps that stay dense at inference, a number or "auto".
        order, kernel, scale_clusters: as in `HeartConfig`.
        transformer: which of a pipeline's two transformers (Wan2.2); None for a pipeline with one.
    """

    backbone: Any
    prompts: tuple[str, ...]
    call: dict[str, Any]
    method: str = field(default="joint", metadata=_about(Option("probes: the paper's", choices=METHODS)))
    candidates: tuple[float, ...] | None = field(
        default=None,
        metadata=_about(Option("thresholds to choose from (default: by the method)", numbers, metavar="τ,τ,…")),
    )
    rest: str | None = field(
        default=None,
        metadata=_about(
            Option(
                "what becomes of what masks leave out (default: by the backbone)",
                choices=("drop", "mean", "first-order"),
            )
        ),
    )
    points: Any = field(
        default=None,
        metadata=_about(
            Option("operating points to choose from, in place of --backbone's", metavar="default|paper|FILE.json")
        ),
    )
    phases: int = field(
        default=1, metadata=_about(Option("intervals of steps with points of their own (default 1)", int, least=1))
    )
    budget: Any = field(  # a Budget once it is read
        default=None,
        metadata=_about(
            Option("shared=τ, sparsity=S, threshold=τ or time=T (default shared=0.9)", Budget.parse, metavar="B")
        ),
    )
    refresh: float = field(
        default=0.25,
        metadata=_about(Option("expected share of masks predicted anew, for time=T (default 0.25)", float), saved=True),
    )
    cost_table: str | None = field(
        default=None,
        metadata=_about(Option("file of heart tune-costs, for time=T (default: what ships)", metavar="FILE.json")),
    )
    shared: Any = field(default=None, metadata=_about(saved=True))  # a number once it is read
    strata: str | None = field(
        default=None,
        metadata=_about(Option("steps to draw from (default: by the method)", choices=("paper", "sparse")), saved=True),
    )
    velocity: str = field(
        default="guided",
        metadata=_about(
            Option("error of the guided or of the conditional velocity", choices=("guided", "cond")), saved=True
        ),
    )
    mean: str | None = field(
        default=None,
        metadata=_about(
            Option(
                "of errors over contexts: relative to the shared threshold's in each, or plain (default: by the method)",
                choices=("plain", "relative"),
            ),
            saved=True,
        ),
    )
    error: str = field(
        default="spectral",
        metadata=_about(Option("spectral (default), mse, attention, or one that a plugin registers")),
    )
    error_settings: dict[str, Any] = field(default_factory=dict, metadata=_about())
    held_out: tuple[str, ...] = field(default=(), metadata=_about())
    seed: int = field(default=0, metadata=_about(Option("of all draws", int, least=0)))
    dense_steps: int | str = field(
        default=warmup.AUTO,
        metadata=_about(
            Option("first steps that stay dense at inference (default auto)", warmup.read, group=_GENERATION),
            saved=True,
        ),
    )
    order: Any = field(
        default="raster",
        metadata=_about(
            Option(
                "token order, or a config of heart tune-order", group=_GENERATION, metavar="raster|tiles|CONFIG.json"
            ),
            saved=True,
        ),
    )
    contexts: int = field(
        default=6, metadata=_about(Option("prompt-step pairs for gradients and verification", int, least=1), saved=True)
    )
    held_out_contexts: int = field(
        default=6, metadata=_about(Option("prompt-step pairs of held-out prompts", int, least=0))
    )
    rounds: int = field(default=1, metadata=_about(Option("rounds of the joint method", int, least=1), saved=True))
    gamma: float = field(default=2.0, metadata=_about(saved=True))
    start: str = field(
        default="isolated",
        metadata=_about(Option("where the joint method starts", choices=("shared", "isolated")), saved=True),
    )
    realised: bool | None = field(default=None, metadata=_about(saved=True))
    kernel: str = field(default="auto", metadata=_about(Option("kernel that runs the trials", group="where it runs")))
    scale_clusters: bool = field(default=False, metadata=_about(saved=True))
    transformer: str | None = field(
        default=None,
        metadata=_about(Option("of a pipeline with two (Wan2.2)", choices=("transformer", "transformer_2"))),
    )

    def __post_init__(self) -> None:
        from ... import token_order

        self._check_options()
        warmup.check(self.dense_steps)
        if not (isinstance(self.refresh, int | float) and 0 <= self.refresh <= 1):
            raise HeartError(f"refresh is {str(self.refresh)[:40]}: it must be a share from 0 to 1")
        if not self.prompts:
            raise HeartError("there are no prompts to calibrate on: give at least one")
        probes = self.method == "probes"
        usual = f"shared={self.backbone.default_threshold if self.shared is None else self.shared!r}"
        self._put("budget", Budget.parse(usual if self.budget is None else self.budget))
        self._put("rest", self.rest or ("drop" if self.backbone.default_rest == "drop" else "mean"))
        self._put("shared", self._shared())
        self._put("order", token_order.read(self.order))
        self._put("candidates", self._candidates())
        self._put("points", None if self.points is None else self._read_points())
        if self.method == "joint" and any(point.rest == "first-order" for point in self.points or ()):
            raise HeartError("gradients do not go through the rest 'first-order': use the method isolated or probes")
        self._put("strata", self.strata or ("paper" if probes else "sparse"))
        self._put("mean", self.mean or ("plain" if probes else "relative"))
        self._put("realised", not probes if self.realised is None else self.realised)
        self._put("prompts", tuple(self.prompts))
        self._put("held_out", tuple(self.held_out))

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_options(self) -> None:
        for name, option in options().items():
            value = getattr(self, name)
            if value is None:
                continue
            if option.choices and value not in option.choices:
                raise HeartError(f"{name} is {str(value)[:40]!r}: it must be one of {', '.join(option.choices)}")
            if option.least is not None and not (isinstance(value, int) and value >= option.least):
                raise HeartError(f"{name} is {str(value)[:40]}: it must be a whole number, {option.least:g} or more")

    def _shared(self) -> float:
        usual = self.backbone.default_threshold if self.shared is None else self.shared
        shared = self.budget.value if self.budget.kind == "shared" else usual
        if not 0 < shared <= 1:
            raise HeartError(f"the shared threshold lies in 0 … 1, not {shared}")
        return float(shared)

    def _candidates(self) -> tuple[float, ...]:
        paper = self.method == "probes"
        given = self.candidates or (paper_candidates(self.backbone, self.shared) if paper else self.backbone.candidates)
        taus = tuple(sorted({*(float(t) for t in given), self.shared}))
        if not all(0 < t <= 1 for t in taus):
            raise HeartError(f"candidate thresholds lie in 0 … 1, not {taus}")
        return taus

    def _read_points(self) -> tuple[Point, ...]:
        from ...online.points import Point
        from ..points import distinct

        if isinstance(self.points, str) or not all(isinstance(point, Point) for point in self.points):
            raise HeartError(f"points are {str(self.points)[:60]!r}: give a list of Point(...)")
        return distinct(self.points)

    @functools.cached_property
    def candidate_points(self) -> tuple[Point, ...]:
        """The operating points to choose from."""
        from ..points import points_of

        if self.points is not None:
            return self.points
        order = self.order if isinstance(self.order, str) else "raster"
        return points_of(self.backbone, self.candidates or (), self.rest or "drop", order)

    @property
    def reference(self) -> int:
        """The point that every head has at the start and in the comparison: the first with the shared threshold."""
        if self.shared in self.taus:
            return self.taus.index(self.shared)
        return max(range(len(self.taus)), key=lambda k: self.taus[k])

    @property
    def steps(self) -> int:
        """The denoising steps of a generation."""
        return int(self.call.get("num_inference_steps", 50))

    @property
    def first_dense_steps(self) -> int:
        """The first steps that stay dense in a generation as it is measured."""
        return warmup.first_steps(self.dense_steps, self.steps)

    @property
    def taus(self) -> tuple[float, ...]:
        """The points' thresholds."""
        return tuple(point.threshold for point in self.candidate_points)

    def planned(self) -> dict[str, Any]:
        """Every field as plain JSON: what the plan's hash is taken of."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        points = [point.to_dict() for point in self.candidate_points]
        plain["dense_steps"] = self.first_dense_steps  # what is measured does not depend on who chose the number
        return plain | {"backbone": self.backbone.to_dict(), "budget": str(self.budget), "points": points}

    def saved(self) -> dict[str, Any]:
        """The fields that a calibration file records among its settings."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata.get("saved")}

    def spec(self) -> Spec:
        """What heads are run with."""
        from ..measure.candidates import Spec

        by_head = None if isinstance(self.order, str) else self.order
        return Spec(self.candidate_points, by_head, self.kernel, self.scale_clusters)

    def job(self) -> Job:
        """What workers must know."""
        from .tasks import Job

        return Job(
            self.spec(), dict(self.call), self.seed, self.velocity, self.error, dict(self.error_settings),
            self.transformer,
        )  # fmt: skip


def options() -> dict[str, Option]:
    """The settings that the command line offers, by field name."""
    return {f.name: f.metadata["option"] for f in fields(Settings) if f.metadata.get("option")}


def default_of(name: str) -> Any:
    """The default of a setting."""
    (setting,) = (f for f in fields(Settings) if f.name == name)
    return _default(setting)


def _default(one: Field) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default
