"""One attention call as everybody sees it: its context, and the base class of those who answer calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..masks import Text

Dense = Callable[..., torch.Tensor]  # (q, k, v[, batch items]) -> out, all [B, H, N, D]


@dataclass(slots=True)
class CallContext:
    """Where in a generation one attention call, or one forward, stands.

    Args:
        transformer: 0, or 1 for the second expert of Wan2.2.
        layer, layers: index of the attention layer and how many the transformer has; layer is -1 for a forward.
        step: the denoising step in this generation, None when nothing tells.
        branch: the guidance branch ("cond", "uncond", ...), or "0", "1", ... by order of calls at a timestep.
        generation: counts up with every generation this clock has seen.
        sigma: the noise level, 1 at the start of denoising; None when nothing tells.
        grid: video tokens as (frames, rows, columns).
        text: for joint attention, where text lies in the sequence of each batch item.
        item: the first batch item of this call (Mochi attends item by item).
        head_offset, heads_total: with Ulysses, this rank has the heads `head_offset ...` out of `heads_total`.
        heads: the true indices of this call's heads, when they were assigned to ranks in another order.
        all_reduce: sums a tensor over the ranks that share this layer's heads; None on one process.
        schedule: the noise level of every step of this generation, where a scheduler tells.
    """

    transformer: int = 0
    layer: int = -1
    layers: int = 0
    step: int | None = None
    branch: str = "0"
    generation: int = 0
    sigma: float | None = None
    grid: tuple[int, int, int] | None = None
    text: list[Text] | None = None
    item: int = 0
    head_offset: int = 0
    heads_total: int | None = None
    heads: list[int] | None = None
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    schedule: Sequence[float] | None = None

    def at_layer(self, layer: int) -> CallContext:
        """The same context, at a layer of this forward (`copy.copy` takes eight times as long)."""
        return CallContext(
            self.transformer,
            layer,
            self.layers,
            self.step,
            self.branch,
            self.generation,
            self.sigma,
            self.grid,
            self.text,
            self.item,
            self.head_offset,
            self.heads_total,
            self.heads,
            self.all_reduce,
            self.schedule,
        )


class Handler:
    """Answers the attention calls of a transformer; every call runs dense unless a subclass does otherwise.

    The engine, the recorder, calibration's replay and the tuning probes are handlers.
    """

    @property
    def engine(self) -> Any:
        """The engine behind this handler, None if there is none."""
        return None

    def start_forward(self, call: CallContext) -> None:
        """A forward of the transformer begins."""

    def attend(self, call: CallContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: Any) -> torch.Tensor:
        """Answer one call: q, k, v [B, H, N, D] (views) -> [B, H, N, D]; `dense(q, k, v)` is the user's own."""
        return dense(q, k, v)

    def surely_dense(self, call: CallContext, layer: int, shape: torch.Size) -> str:
        """Why the call of a layer in this forward will run dense, if its shape [B, N, H, D] tells; nothing if it may not."""
        return ""

    def note_dense(self, call: CallContext, layer: int, timer: Any, reason: str) -> None:
        """The call of a layer was surely dense, and ran; `timer` is a timer, or on a CPU the seconds that it took."""

    def fallback(self, call: CallContext, reason: str) -> None:
        """A call ran dense without coming here."""

    def reset(self) -> None:
        """A generation is over: drop what belongs to it."""
