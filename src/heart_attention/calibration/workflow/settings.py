"""What is calibrated and how: the one object that decides, with the model, every byte of a calibration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ... import token_order
from ...errors import HeartError
from ..measure.candidates import Spec
from .tasks import Job

METHODS = ("joint", "isolated", "probes")
PAPER_CANDIDATES = (0.85, 0.9, 0.95)
CANDIDATES = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


@dataclass(frozen=True)
class Settings:
    """What is calibrated and how.

    Args:
        backbone: `XAttention(...)` or `SVG2(...)` with the settings that inference will use.
        prompts: texts of the calibration prompts; `held_out`: of prompts used for nothing but verification.
        call: what the pipeline is called with: height, width, num_frames, num_inference_steps, guidance_scale ...
        method: "joint", "isolated" or "probes".
        candidates: thresholds to choose from; None: the paper's three for probes, seven for the others.
        shared: the shared threshold that is the start, the comparison and, without another budget, the budget.
        strata: "paper" or "sparse" step intervals; None: paper for probes, sparse for the others.
        velocity: "guided" (what the sampler uses) or "cond" (the conditional branch alone).
        mean: how contexts are averaged: "plain" or "relative", each by its error in relation to the shared
            threshold's there; None: plain (the paper's) for probes, relative for the others.
        error: a name that `error.by_name` knows, with `error_settings`.
        contexts, held_out_contexts: how many (prompt, step) pairs for gradients and for verification.
        rounds, gamma, start: of the joint method; gamma is where the line search starts, `start` is "shared" or
            "isolated" (one backward pass a context more, a better place to begin).
        min_sparsity, max_mean_threshold: a budget other than the shared threshold's sparsity.
        realised: match the sparsity that the shared threshold really has with all heads sparse, checked by forwards,
            rather than the mean of the table. None: so for joint and isolated, the table (the paper's way) for probes.
        dense_steps: steps that stay dense at inference.
        order, kernel, scale_clusters: as in `HeartConfig`.
        transformer: which of a pipeline's two transformers (Wan2.2); None for a pipeline with one.
    """

    backbone: Any
    prompts: tuple[str, ...]
    call: dict[str, Any]
    method: str = "joint"
    candidates: tuple[float, ...] | None = None
    shared: float = 0.9
    strata: str | None = None
    velocity: str = "guided"
    mean: str | None = None
    error: str = "spectral"
    error_settings: dict[str, Any] = field(default_factory=dict)
    held_out: tuple[str, ...] = ()
    seed: int = 0
    dense_steps: int = 5
    order: Any = "raster"
    contexts: int = 6
    held_out_contexts: int = 6
    rounds: int = 1
    gamma: float = 2.0
    start: str = "isolated"
    min_sparsity: float | None = None
    max_mean_threshold: float | None = None
    realised: bool | None = None
    kernel: str = "auto"
    scale_clusters: bool = False
    transformer: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise HeartError(f"the method is one of {', '.join(METHODS)}, not {self.method!r}")
        if self.velocity not in ("guided", "cond"):
            raise HeartError(f"the velocity is 'guided' or 'cond', not {self.velocity!r}")
        if self.mean not in (None, "plain", "relative"):
            raise HeartError(f"the mean over contexts is 'plain' or 'relative', not {self.mean!r}")
        if self.start not in ("shared", "isolated"):
            raise HeartError(f"the joint method starts from 'shared' or 'isolated', not {self.start!r}")
        if not self.prompts:
            raise HeartError("there are no prompts to calibrate on: give at least one")
        if self.min_sparsity is not None and self.max_mean_threshold is not None:
            raise HeartError("give one budget only: min_sparsity or max_mean_threshold")
        given = self.candidates or (PAPER_CANDIDATES if self.method == "probes" else CANDIDATES)
        taus = tuple(sorted({float(t) for t in given}))
        if not all(0 < t <= 1 for t in taus):
            raise HeartError(f"candidate thresholds lie in 0 … 1, not {taus}")
        if not 0 < self.shared <= 1:
            raise HeartError(f"the shared threshold lies in 0 … 1, not {self.shared}")
        object.__setattr__(self, "candidates", tuple(sorted({*taus, float(self.shared)})))
        object.__setattr__(self, "strata", self.strata or ("paper" if self.method == "probes" else "sparse"))
        object.__setattr__(self, "mean", self.mean or ("plain" if self.method == "probes" else "relative"))
        if self.realised is None:
            object.__setattr__(self, "realised", self.method != "probes")
        object.__setattr__(self, "order", token_order.read(self.order))
        object.__setattr__(self, "prompts", tuple(self.prompts))
        object.__setattr__(self, "held_out", tuple(self.held_out))

    @property
    def steps(self) -> int:
        """Denoising steps of a generation."""
        return int(self.call.get("num_inference_steps", 50))

    @property
    def taus(self) -> tuple[float, ...]:
        """The candidates, ascending, the shared threshold among them."""
        assert self.candidates is not None
        return self.candidates

    def spec(self) -> Spec:
        """What heads are run with."""
        return Spec(self.backbone, self.taus, self.order, self.kernel, self.scale_clusters)

    def job(self) -> Job:
        """What workers must know."""
        return Job(
            self.spec(), dict(self.call), self.seed, self.velocity, self.error, dict(self.error_settings),
            self.transformer,
        )  # fmt: skip
