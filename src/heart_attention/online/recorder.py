"""Record q, k, v of attention calls by (generation, step, branch, layer), for studies and for tuning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..models.attachment import Attachment, attach, attach_pipeline, attachment_of
from ..models.inspect import is_pipeline, transformers_of
from .call import CallContext, Handler

Key = tuple  # (generation, step, branch, layer), and the batch item after it where a model attends item by item


@dataclass(frozen=True)
class Recorded:
    """One attention call: q, k, v [B, H, N, D] after norm and RoPE, and where it stood."""

    call: CallContext
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor | None = None

    @property
    def where(self) -> CallContext:
        """The old name of `call`."""
        warnings.warn("Recorded.where is called Recorded.call now", DeprecationWarning, stacklevel=2)
        return self.call


class Recorder(Mapping, Handler):
    """A handler that keeps what passes; the answers come from `inner`, or densely. See `record`."""

    def __init__(
        self, wanted: Callable[[CallContext], bool], device: Any, dtype: torch.dtype | None, outputs: bool
    ) -> None:
        self.calls: dict[Key, Recorded] = {}
        self.inner: Handler | None = None
        self._wanted, self._device, self._dtype, self._outputs = wanted, device, dtype, outputs

    # -- the record -------------------------------------------------------------------------------------
    def __getitem__(self, key: Key) -> Recorded:
        return self.calls[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors kept."""
        kept = [x for c in self.calls.values() for x in (c.q, c.k, c.v, c.out) if x is not None]
        return sum(x.nbytes for x in kept)

    # -- the handler ------------------------------------------------------------------------------------
    @property
    def engine(self) -> Any:
        """That of the handler behind the recorder."""
        return None if self.inner is None else self.inner.engine

    def start_forward(self, call: CallContext) -> None:
        """Nothing to record yet."""
        if self.inner is not None:
            self.inner.start_forward(call)

    def attend(self, call: CallContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: Any) -> torch.Tensor:
        """Answer and keep one call."""
        out = dense(q, k, v) if self.inner is None else self.inner.attend(call, q, k, v, dense)
        if self._wanted(call):
            key: Key = (call.generation, call.step, call.branch, call.layer)
            last = self._copy(out) if self._outputs else None
            kept = Recorded(call, self._copy(q), self._copy(k), self._copy(v), last)
            self.calls[key if not call.item else (*key, call.item)] = kept
        return out

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        new = torch.empty(x.shape, dtype=self._dtype or x.dtype, device=self._device)
        return new.copy_(x.detach())

    def fallback(self, call: CallContext, reason: str) -> None:
        """A call HEART does not serve is not recorded."""
        if self.inner is not None:
            self.inner.fallback(call, reason)

    def reset(self) -> None:
        """A generation is over; its records stay (an inner handler is told by the clock itself)."""


@contextmanager
def record(
    model: Any,
    *,
    layers: Collection[int] | None = None,
    steps: Collection[int] | None = None,
    branches: Collection[str] | None = None,
    device: Any = "cpu",
    dtype: torch.dtype | None = None,
    outputs: bool = False,
) -> Iterator[Recorder]:
    """Keep copies of q, k, v of a pipeline's or transformer's attention while the block runs.

    Args:
        model: a pipeline or a transformer, with HEART enabled or not.
        layers, steps, branches: keep only these (all by default; a full-size model fills memory quickly).
        device, dtype: where and how copies are kept.
        outputs: keep the attention's output too.
    """
    given: dict[str, Collection[Any] | None] = {"layer": layers, "step": steps, "branch": branches}
    limits = [(name, set(allowed)) for name, allowed in given.items() if allowed is not None]

    def wanted(call: CallContext) -> bool:
        return all(getattr(call, name) in allowed for name, allowed in limits)

    recorder = Recorder(wanted, device, dtype, outputs)
    present = [a for a in map(attachment_of, transformers_of(model)) if a is not None]
    if present:
        with _in_front(present, recorder):
            yield recorder
        return
    attached = attach_pipeline(model, recorder) if is_pipeline(model) else [attach(model, recorder)]
    try:
        yield recorder
    finally:
        for attachment in attached:
            attachment.detach()


@contextmanager
def _in_front(attachments: list[Attachment], recorder: Recorder) -> Iterator[None]:
    """Put the recorder before the handler that is there (both experts of Wan2.2 share one)."""
    recorder.inner = attachments[0].handler
    for attachment in attachments:
        attachment.handler = recorder
    try:
        yield
    finally:
        for attachment in attachments:
            attachment.handler = recorder.inner
