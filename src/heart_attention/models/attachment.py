"""Attach a handler to a diffusers video transformer: it then answers every video attention call of it.

`attach` swaps the processors of the attention layers, listens to the pipeline (listener.py) and marks the start of
each forward. `detach` leaves nothing behind. The engine, the recorder and calibration all come in by this road.
"""

from __future__ import annotations

import inspect
import logging
import operator
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import HeartError
from ..masks import Text
from ..online.call import CallContext, Handler
from ..online.clock import Clock
from ..online.stats import Timer
from . import compat, custom_ops, family_of, moved_tokens, plain_copy, processors
from .compat import unwrapped
from .families.base import Family, Grid, count
from .head_assignment import Costs, check_costs
from .inspect import layers_and_heads, transformers_of
from .listener import CHILD, Listener
from .regional_compile import CompiledBlocks, compile_blocks
from .ulysses import check_parallel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerInfo:
    """One attention layer: its index, module name and kind ("self" or "joint")."""

    index: int
    name: str
    kind: str
    ref: Callable[[], torch.nn.Module | None]

    @property
    def module(self) -> torch.nn.Module:
        """The attention module."""
        module = self.ref()
        assert module is not None
        return module


class Layer:
    """An attention layer at work: where it belongs and which processor it has at present."""

    def __init__(self, info: LayerInfo, attachment: Attachment) -> None:
        self.info = info
        self.attachment: Attachment | None = attachment
        self.handle = custom_ops.handle(self)
        self.forward = attachment.handle
        self.calls = 0  # in this forward, for models that attend item by item
        self.plain: tuple[int, ...] | None = (
            None  # shape of a query that nothing but the handler had a reason to refuse
        )
        self.refused: Any = None  # a processor of the user's that we cannot serve

    @property
    def tag(self) -> processors.Tag:
        """What the layer's processor passes as its backend."""
        return self.info.module.processor._heart_tag

    @property
    def installed(self) -> bool:
        """Whether the module's present processor is ours."""
        return processors.layer_of(self.info.module.processor) is self

    def install(self) -> str | None:
        """Put our processor in place of the module's present one; a reason if that cannot be."""
        if self.installed:
            return None
        module = self.info.module
        present = processors.original(module.processor)
        reason = processors.reason_not(present)
        if reason is None:
            module.processor = processors.intercept(present, self)
        return reason

    def remove(self) -> None:
        """Put the user's processor back and let ours, wherever it is kept, run plainly."""
        module, self.attachment = self.info.ref(), None
        if module is not None and processors.layer_of(module.processor) is self:
            module.processor = processors.original(module.processor)


class Attachment:
    """A handler in a transformer: `.layers`, `.clock`, `.transformer`, `.detach()`."""

    def __init__(
        self, transformer: torch.nn.Module, handler: Handler, family: Family, clock: Clock, index: int
    ) -> None:
        self._transformer = weakref.ref(transformer)
        self.handler, self.family, self.clock, self.index = handler, family, clock, index
        self.handle = custom_ops.handle(self)
        self.costs: list[tuple[float, ...]] | None = None  # of each layer's heads, where ranks share them by cost
        self.compiled = CompiledBlocks([])
        self._call: CallContext | None = None
        self._tokens = 0
        self._unreadable = ""  # why the family could not read this forward's inputs
        self._warned: set[str] = set()
        self._layers = [
            Layer(LayerInfo(i, name, family.kind, weakref.ref(module)), self)
            for i, (name, module) in enumerate(family.find(transformer))
        ]

    @property
    def transformer(self) -> torch.nn.Module:
        """The transformer this is attached to."""
        transformer = self._transformer()
        assert transformer is not None
        return transformer

    @property
    def layers(self) -> list[LayerInfo]:
        """The attention layers that are served, in order."""
        return [layer.info for layer in self._layers]

    @property
    def sequence(self) -> tuple[int, list[Text] | None]:
        """This forward's video tokens (0 if unknown), and where text lies among them in each batch item."""
        return self._tokens, None if self._call is None else self._call.text

    @property
    def hook_id(self) -> int:
        """The id of the hook that marks the start of a forward."""
        return self._hook.id

    def assign_heads(self, costs: Costs) -> None:
        """Let ranks share heads by these costs [L, H], the same on every rank."""
        self.costs = check_costs(costs, len(self._layers))

    def compile_blocks(self) -> None:
        """Compile the transformer's repeated blocks around attention until `detach`."""
        self.compiled = compile_blocks(self.transformer)

    # ---------------------------------------- at work

    def start(self, timestep: Any, grid: Grid | None, inputs: list[torch.Tensor]) -> None:
        """A forward begins."""
        moment, grid = self.clock.tick(timestep), self._checked(grid)
        before, self._tokens = self._call, count(grid)
        self._call = CallContext(
            transformer=self.index,
            layers=len(self._layers),
            step=moment.step,
            branch=moment.branch,
            generation=moment.generation,
            sigma=self.clock.noise_level(moment.step),
            schedule=self.clock.noise_levels(),
            grid=grid,
            text=self._text(inputs),
        )
        self.handler.start_forward(self._call)
        same = before is not None and (before.grid, before.text) == (grid, self._call.text)
        for layer in self._layers:
            self._reinstall(layer)
            layer.calls, layer.plain = 0, layer.plain if same else None

    def _checked(self, grid: Any) -> Grid | None:
        """The grid, if it is one."""
        if grid is None:
            return None
        try:
            frames, rows, columns = (operator.index(size) for size in grid)
            if min(frames, rows, columns) < 1:
                raise ValueError(f"a grid of {frames}×{rows}×{columns} tokens")
            return frames, rows, columns
        except (TypeError, ValueError) as error:  # a user's family
            self.cannot_read(error)
            return None

    def _text(self, inputs: list[torch.Tensor]) -> list[Text] | None:
        try:
            text = self.family.text(inputs, self._tokens)
            if text is not None and not (isinstance(text, list) and all(isinstance(one, Text) for one in text)):
                raise TypeError(f"text is {str(text)[:40]}, a list of Text is wanted")
            return text or None
        except Exception as error:  # a user's family, or inputs of another form: the model itself can go on
            self.cannot_read(error)
            return None

    def cannot_read(self, error: Exception) -> None:
        """The family failed on this forward's inputs: its layers run dense, and say so."""
        name, what = type(self.family).__name__, f"{type(error).__name__}: {error}"
        self._unreadable = (
            f"the family {name} cannot read the inputs of {type(self.transformer).__name__} ({what[:120]})"
        )

    def _reinstall(self, layer: Layer) -> None:
        """The user may have set other processors since: serve those."""
        if layer.installed:
            return
        present = layer.info.module.processor
        reason = None if present is layer.refused else layer.install()
        if reason is not None:
            layer.refused = present
        if present is layer.refused:
            self.fallback(layer, f"a processor HEART cannot serve: {reason or 'as before'}")

    def surely_dense(self, layer: Layer, query: torch.Tensor, key: torch.Tensor) -> str:
        """Why a call with this query and key [B, N, H, D] runs dense, where that is known without a look at it; else nothing.

        Small models make thousands of such calls, in which every view costs a share of the attention itself.
        """
        if self._call is None or self._unreadable or query.requires_grad:
            return ""
        if query.shape != layer.plain or key.shape != layer.plain:
            return ""
        return self.handler.surely_dense(self._call, layer.info.index, query.shape)

    def attend_densely(
        self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dense: Any, reason: str
    ) -> torch.Tensor:
        """A call that runs dense for this reason, [B, N, H, D] as the model laid it out."""
        assert self._call is not None
        timer = Timer(True) if query.is_cuda else None
        start = time.perf_counter()
        out = dense.raw(query, key, value)
        seconds = time.perf_counter() - start
        if timer is not None:
            timer.lap("dense")
        self.handler.note_dense(self._call, layer.info.index, timer or seconds, reason)
        return out

    def attend(
        self, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: processors.Dense, **at: Any
    ) -> torch.Tensor:
        """One call of a layer; q, k, v [B, H, N, D]."""
        call = self._call_at(layer)
        for name, value in at.items():  # empty but under context parallelism
            setattr(call, name, value)
        front, reason = self._front_or_reason(call, q, k, dense)
        if reason is not None:
            self._note_fallback(call, reason)
            return dense(q, k, v)
        layer.plain = (
            None if front or self.family.item_by_item or at else (q.shape[0], q.shape[2], q.shape[1], q.shape[3])
        )
        if front:
            return moved_tokens.attend(self.handler, call, q, k, v, dense, front, self._tokens)
        return self.handler.attend(call, q, k, v, dense)

    def _call_at(self, layer: Layer) -> CallContext:
        call = CallContext(layer=layer.info.index) if self._call is None else self._call.at_layer(layer.info.index)
        if self.family.item_by_item:
            call.item, layer.calls = layer.calls, layer.calls + 1
            call.text = call.text and call.text[call.item : call.item + 1]
        return call

    def _front_or_reason(
        self, call: CallContext, q: torch.Tensor, k: torch.Tensor, dense: processors.Dense
    ) -> tuple[int, str | None]:
        """How many exact tokens lie before the video, and why this call must run dense if it must; `call.text` is placed."""
        try:
            front = self.family.front(call.text, self._tokens, q)
            call.text = self.family.locate(call.text, self._tokens, q)
            return front, self._reason_not(call, q, k, dense)
        except Exception as error:  # as in `_text`
            self.cannot_read(error)
            return 0, self._unreadable

    def _reason_not(self, call: CallContext, q: torch.Tensor, k: torch.Tensor, dense: processors.Dense) -> str | None:
        if self._call is None:
            return "attention outside a forward of the transformer"
        if self._unreadable:
            return self._unreadable
        if dense.extra:
            return f"attention with {', '.join(k for k, v in dense.extra.items() if v)}"
        if q.shape != k.shape:
            return f"keys of shape {tuple(k.shape)} for queries of {tuple(q.shape)}"
        return self.family.reason_not(self._tokens, call.text, q, dense.mask)

    def fallback(self, layer: Layer, reason: str) -> None:
        """A layer runs dense without the handler: say why."""
        self._note_fallback(self._call_at(layer), reason)

    def _note_fallback(self, call: CallContext, reason: str) -> None:
        self.handler.fallback(call, reason)
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("Layer %d runs dense: %s.", call.layer, reason)

    def reset(self) -> None:
        """End the generation by hand (pipelines do it by themselves)."""
        self.clock.reset()

    # ---------------------------------------- coming and going

    def _enter(self) -> None:
        transformer = self.transformer
        for layer in self._layers:
            reason = layer.install()
            if reason is not None:
                self._remove_layers()
                raise HeartError(
                    f"HEART cannot serve the attention processor {type(layer.info.module.processor).__name__} of "
                    f"{layer.info.name} because {reason}; set the model's own attention processors first."
                )
        transformer.add_module(CHILD, Listener(self.clock))
        compat.forget_child_registries(transformer)
        self._hook = transformer.register_forward_pre_hook(_begin(self, transformer), with_kwargs=True)
        plain_copy.install(self)
        self.clock.listeners.append(self.handler.reset)

    def detach(self) -> None:
        """Leave the transformer as it would be without HEART. Detaching twice does nothing."""
        self.pause()
        self.compiled.undo()
        self._layers = []

    def pause(self) -> None:
        """Leave the transformer for a while: `resume` goes on with the same layers, clock and handler."""
        transformer = self._transformer()
        if transformer is None or attachment_of(transformer) is not self:
            return
        self._remove_layers()
        self._hook.remove()
        plain_copy.remove(transformer)
        delattr(transformer, CHILD)
        compat.forget_child_registries(transformer)
        if self.handler.reset in self.clock.listeners:
            self.clock.listeners.remove(self.handler.reset)

    def resume(self) -> None:
        """Come back after `pause`."""
        for layer in self._layers:
            layer.attachment = self
        self._enter()

    def _remove_layers(self) -> None:
        for layer in self._layers:
            layer.remove()


def attach(
    transformer: torch.nn.Module,
    handler: Handler,
    scheduler: Any = None,
    *,
    clock: Clock | None = None,
    index: int = 0,
) -> Attachment:
    """Let `handler` answer the video attention of a transformer until `.detach()`.

    Args:
        transformer: a diffusers video transformer of a known family, compiled or not.
        handler: see `Handler`.
        scheduler: the pipeline's scheduler, or a function that returns it, to know true step numbers.
        clock: another attachment's clock, for the second transformer of one pipeline.
        index: 0, or 1 for that second transformer.
    """
    transformer = unwrapped(transformer)
    if attachment_of(transformer) is not None:
        raise HeartError("HEART is already enabled on this transformer; call heart.disable(...) first.")
    family = family_of(transformer)
    layers_and_heads(transformer)  # refuses a transformer without layers, or with layers of different kinds
    check_parallel(transformer)
    attachment = Attachment(transformer, handler, family, clock or Clock(scheduler, family.rising), index)
    attachment._enter()
    return attachment


def attach_pipeline(pipe: Any, handler: Handler) -> list[Attachment]:
    """Attach to the transformer of a pipeline, and to `transformer_2` with the same clock."""
    ref = weakref.ref(pipe)
    done: list[Attachment] = []
    try:
        for i, model in enumerate(transformers_of(pipe)):
            clock = done[0].clock if done else None
            done.append(attach(model, handler, lambda: getattr(ref(), "scheduler", None), clock=clock, index=i))
    except HeartError:
        for attachment in done:
            attachment.detach()
        raise
    return done


def attachment_of(transformer: torch.nn.Module) -> Attachment | None:
    """The attachment of a transformer, if it has one."""
    return plain_copy.attachment_in(unwrapped(transformer))


def _begin(attachment: Attachment, transformer: torch.nn.Module) -> Callable[..., None]:
    """The hook that marks the start of a forward.

    torch.compile calls hooks outside its graphs, or, when a caller's graph holds the whole model, inside.
    """
    names = [name for name in inspect.signature(type(transformer).forward).parameters if name != "self"]
    family, handle = attachment.family, attachment.handle

    def read(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(names, args))
        given.update(kwargs)
        return given.get("timestep"), family.grid(module.config, given), family.inputs(given)

    @torch.compiler.disable
    def outside(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        attachment._unreadable = ""
        try:
            timestep, grid, inputs = read(module, args, kwargs)
        except Exception as error:  # see `Attachment.cannot_read`
            attachment.cannot_read(error)
            timestep, grid, inputs = kwargs.get("timestep"), None, []
        attachment.start(timestep, grid, inputs)

    def begin(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            return outside(module, args, kwargs)
        timestep, grid, inputs = read(module, args, kwargs)
        if not isinstance(timestep, torch.Tensor):
            timestep = torch.tensor(float("nan") if timestep is None else float(timestep))
        torch.ops.heart.start(handle, timestep, list(grid or ()), inputs)

    return compat.outside_graphs(begin)
