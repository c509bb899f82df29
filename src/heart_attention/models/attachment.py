"""Attach a handler to a diffusers video transformer: it then answers every video attention call of it.

`attach` swaps the processors of the attention layers, listens to the pipeline's `cache_context` and resets
through a hook on a child module that is never called, and marks the start of each forward. `detach` leaves
nothing behind. The engine, the recorder and calibration all come in by this road.
"""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook, StateManager
from torch._dynamo.eval_frame import skip_code

from ..errors import HeartError
from ..masks import Text
from ..online.call import CallContext, Handler
from ..online.clock import Clock
from . import custom_ops, family_of, processors
from .families.base import Family, Grid, count
from .inspect import transformers_of, unwrapped
from .ulysses import check_parallel

logger = logging.getLogger(__name__)
CHILD = "_heart_clock"  # the child module that carries our hook


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
        self.refused: Any = None  # a processor of the user's that we cannot serve

    @property
    def tag(self) -> processors.Tag:
        """What the layer's processor passes as its backend."""
        return self.info.module.processor._heart_tag

    def take(self) -> str | None:
        """Put our processor in place of the module's present one; a reason if that cannot be."""
        module = self.info.module
        present = module.processor
        if getattr(present, "_heart_layer", None) is self:
            return None
        present = processors.original(present)
        reason = processors.reason_not(present)
        if reason is None:
            module.processor = processors.intercept(present, self)
        return reason

    def give_back(self) -> None:
        """Put the user's processor back and let ours, wherever it is kept, run plainly."""
        module, self.attachment = self.info.ref(), None
        if module is not None and getattr(module.processor, "_heart_layer", None) is self:
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
        self._call: CallContext | None = None
        self._tokens = 0
        self._said: set[str] = set()
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

    # -- at work ----------------------------------------------------------------------------------------
    def start(self, timestep: Any, grid: Grid | None, inputs: list[torch.Tensor]) -> None:
        """A forward begins."""
        moment = self.clock.tick(timestep)
        self._tokens = count(grid)
        self._call = CallContext(
            transformer=self.index,
            layers=len(self._layers),
            step=moment.step,
            branch=moment.branch,
            generation=moment.generation,
            grid=grid,
            text=self.family.text(inputs, self._tokens),
        )
        self.handler.start_forward(self._call)
        for layer in self._layers:
            self._keep(layer)
            layer.calls = 0

    def _keep(self, layer: Layer) -> None:
        """The user may have set other processors since: serve those."""
        present = layer.info.module.processor
        if getattr(present, "_heart_layer", None) is layer:
            return
        reason = None if present is layer.refused else layer.take()
        if reason is not None:
            layer.refused = present
        if present is layer.refused:
            self.fallback(layer, f"a processor HEART cannot serve: {reason or 'as before'}")

    def attend(
        self, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: processors.Dense, **at: Any
    ) -> torch.Tensor:
        """One call of a layer; q, k, v [B, H, N, D]."""
        call = self._at(layer)
        for name, value in at.items():  # empty but under context parallelism
            setattr(call, name, value)
        reason = self._reason_not(call, q, k, dense)
        if reason is not None:
            self._pass(call, reason)
            return dense(q, k, v)
        return self.handler.attend(call, q, k, v, dense)

    def _at(self, layer: Layer) -> CallContext:
        call = CallContext(layer=layer.info.index) if self._call is None else self._call.at_layer(layer.info.index)
        if self.family.item_by_item:
            call.item, layer.calls = layer.calls, layer.calls + 1
            call.text = call.text and call.text[call.item : call.item + 1]
        return call

    def _reason_not(self, call: CallContext, q: torch.Tensor, k: torch.Tensor, dense: processors.Dense) -> str | None:
        if self._call is None:
            return "attention outside a forward of the transformer"
        if dense.extra:
            return f"attention with {', '.join(k for k, v in dense.extra.items() if v)}"
        if q.shape != k.shape:
            return f"keys of shape {tuple(k.shape)} for queries of {tuple(q.shape)}"
        return self.family.reason_not(self._tokens, call.text, q, dense.mask)

    def fallback(self, layer: Layer, reason: str) -> None:
        """A layer runs dense without the handler: say why."""
        self._pass(self._at(layer), reason)

    def _pass(self, call: CallContext, reason: str) -> None:
        self.handler.fallback(call, reason)
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("Layer %d runs dense: %s.", call.layer, reason)

    def reset(self) -> None:
        """End the generation by hand (pipelines do it by themselves)."""
        self.clock.reset()

    # -- coming and going -------------------------------------------------------------------------------
    def _enter(self) -> None:
        transformer = self.transformer
        for layer in self._layers:
            reason = layer.take()
            if reason is not None:
                self._leave()
                raise HeartError(
                    f"HEART cannot serve the attention processor {type(layer.info.module.processor).__name__} of "
                    f"{layer.info.name} because {reason}; set the model's own attention processors first."
                )
        transformer.add_module(CHILD, _Listener(self.clock))
        _forget_children(transformer)
        self._hook = transformer.register_forward_pre_hook(_begin(self, transformer), with_kwargs=True)
        transformer.__dict__["__deepcopy__"] = _PlainCopy(self)
        self.clock.listeners.append(self.handler.reset)

    def detach(self) -> None:
        """Leave the transformer as it would be without HEART. Detaching twice does nothing."""
        transformer = self._transformer()
        if transformer is None or getattr(transformer, CHILD, None) is None or not self._layers:
            return
        self._leave()
        self._hook.remove()
        del transformer.__dict__["__deepcopy__"]
        delattr(transformer, CHILD)
        _forget_children(transformer)
        if self.handler.reset in self.clock.listeners:
            self.clock.listeners.remove(self.handler.reset)

    def _leave(self) -> None:
        for layer in self._layers:
            layer.give_back()
        self._layers = []


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
    if getattr(transformer, CHILD, None) is not None:
        raise HeartError("HEART is already enabled on this transformer; call heart.disable(...) first.")
    family = family_of(transformer)
    check_parallel(getattr(transformer, "_parallel_config", None))
    attachment = Attachment(transformer, handler, family, clock or Clock(scheduler, family.rising), index)
    if not attachment.layers:
        raise HeartError(f"This {type(transformer).__name__} has no attention layer that HEART knows; is it complete?")
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
    transformer = unwrapped(transformer)
    plain_copy = transformer.__dict__.get("__deepcopy__")
    return plain_copy.attachment if isinstance(plain_copy, _PlainCopy) else None


# -- listening to the pipeline -------------------------------------------------------------------------
class _Contexts(StateManager):
    """Receives every `cache_context` of the transformer."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(None)
        self.clock = clock

    def set_context(self, context: Any) -> None:
        self.clock.set_context(context)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        self.clock.set_context(None)


class _ClockHook(ModelHook):
    _is_stateful = True

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.contexts = _Contexts(clock)

    def _set_context(self, module: torch.nn.Module, context: Any) -> None:
        self.contexts.set_context(context)  # diffusers before 0.41

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self.contexts.reset()
        self.contexts.clock.reset()
        return module


class _Listener(torch.nn.Module):
    """A module without parameters that is never called, so that no offload or compile meets its hook."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        HookRegistry.check_if_exists_or_initialize(self).register_hook(_ClockHook(clock), "heart_clock")


def _forget_children(transformer: torch.nn.Module) -> None:
    """diffusers remembers which children have hooks: make it look again."""
    registry = getattr(transformer, "_diffusers_hook", None)
    if registry is not None and getattr(registry, "_child_registries_cache", None) is not None:
        registry._child_registries_cache = None


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
        attachment.start(*read(module, args, kwargs))

    def begin(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            return outside(module, args, kwargs)
        timestep, grid, inputs = read(module, args, kwargs)
        if not isinstance(timestep, torch.Tensor):
            timestep = torch.tensor(float("nan") if timestep is None else float(timestep))
        torch.ops.heart.start(handle, timestep, list(grid or ()), inputs)

    skip_code(begin.__code__)  # no graph of its own
    return begin


class _PlainCopy:
    """`copy.deepcopy` of an enabled transformer gives a plain one, without HEART."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def __call__(self, memo: dict[int, Any]) -> torch.nn.Module:
        model = self.attachment.transformer
        _forget_children(model)
        state = dict(model.__dict__)
        del state["__deepcopy__"]
        state["_modules"] = {k: m for k, m in model._modules.items() if k != CHILD}
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            kept = state[name].copy()
            kept.pop(self.attachment._hook.id, None)
            state[name] = kept
        new = type(model).__new__(type(model))
        memo[id(model)] = new
        new.__dict__.update(copy.deepcopy(state, memo))
        return new
