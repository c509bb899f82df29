"""Attention processors that hand q, k, v to HEART: generated subclasses of the model's own.

The generated `__call__` is the original's code object with one global replaced, so nothing of diffusers is
copied and nothing process-wide is patched. Which layer is calling travels in the `backend` argument that most
processors pass anyway; those that do not (CogVideoX, Mochi, Cosmos) announce their layer before they run.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from . import compat
from .compat import BACKEND, DISPATCH, SDPA
from .ulysses import attend_in_parallel

if TYPE_CHECKING:
    from .attachment import Layer


class Tag(str):
    """Names a layer: a string equal to the user's attention backend, with the layer and its handle on it."""

    __slots__ = ("default", "forward", "handle", "layer", "scope", "values")

    layer: Layer
    handle: torch.Tensor  # 0-dim, the layer's number: what compiled graphs see of it
    forward: torch.Tensor  # 0-dim, the transformer's number, "written" by the start of each forward
    scope: dict[str, Any]  # globals of the processor's own module
    values: dict[str, Any]  # the processor's attributes
    default: Any  # the backend of its class

    @property
    def backend(self) -> Any:
        """The backend the user chose: None for diffusers' active one."""
        return self.values.get(BACKEND, self.default)


class _Announced(threading.local):
    tag: Tag | None = None


class _Traced:
    tag: Tag | None = None


_announced = _Announced()
_traced = _Traced()  # thread-locals cannot be traced by torch.compile; tracing itself is serial


def reason_not(processor: Any) -> str | None:
    """Why this processor cannot be intercepted, or None."""
    call = inspect.getattr_static(type(processor), "__call__", None)
    if isinstance(processor, torch.nn.Module) or not hasattr(processor, "__dict__"):
        return "it is not a plain object"
    if not isinstance(call, types.FunctionType) or hasattr(call, "__wrapped__"):
        return "its __call__ is decorated or not Python code"
    names = call.__code__.co_names
    if "AttentionBackendName" in names:
        return "it chooses an attention backend by itself, for masks that others do not know"
    if DISPATCH in names or (SDPA in names and call.__globals__.get("F") is F):
        return None
    return f"its __call__ uses neither {DISPATCH} nor F.{SDPA}"


def intercept(processor: Any, layer: Layer) -> Any:
    """A processor that behaves as this one and hands its attention to the layer; it shares its attributes."""
    own: Any = type(processor)
    cls: Any = _intercepted_class(own)
    new = object.__new__(cls)
    new.__dict__ = processor.__dict__  # whatever is set on one shows on the other
    new._heart_original = processor
    new._heart_layer = layer
    new._heart_tag = _tag(new)
    return new


def layer_of(processor: Any) -> Layer | None:
    """The layer an intercepted processor hands its attention to, None for any other."""
    return getattr(processor, "_heart_layer", None)


def original(processor: Any) -> Any:
    """The user's own processor behind an intercepted one (or itself)."""
    return getattr(processor, "_heart_original", processor)


def _tag(processor: Any) -> Tag:
    own = processor._heart_original
    layer, values = processor._heart_layer, own.__dict__
    default = getattr(type(own), BACKEND, None)
    tag = Tag(compat.backend_name(values.get(BACKEND, default)))
    tag.layer, tag.handle, tag.forward = layer, layer.handle, layer.forward
    tag.scope, tag.values, tag.default = type(own).__call__.__globals__, values, default
    return tag


def _set_backend(self: Any, value: Any) -> None:
    self.__dict__[BACKEND] = value.backend if isinstance(value, Tag) else value
    self._heart_tag = _tag(self)


def _reduce(self: Any, protocol: int) -> Any:
    """Copies and pickles are the user's own processor; whoever loads them needs no HEART."""
    return operator.getitem, ([self._heart_original], 0)


def _copy(self: Any) -> Any:
    return copy.copy(self._heart_original)


@functools.cache
def _intercepted_class(cls: Any) -> type:
    call: Any = cls.__call__
    names = call.__code__.co_names
    space: dict[str, Any] = {
        "__slots__": ("_heart_layer", "_heart_original", "_heart_tag"),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__copy__": _copy,
        "__reduce_ex__": _reduce,
    }
    if DISPATCH in names and BACKEND in names:
        space["__call__"] = _with_globals(call, {DISPATCH: dispatch})
        space[BACKEND] = property(lambda self: self._heart_tag, _set_backend)
    elif DISPATCH in names:
        space["__call__"] = _announcing(call, {DISPATCH: _announced_dispatch})
    else:
        space["__call__"] = _announcing(call, {"F": _functional()})
    return type(cls.__name__, (cls,), space)


def _with_globals(function: types.FunctionType, replace: dict[str, Any]) -> types.FunctionType:
    """The same code over a copy of its globals. Without `__name__` torch.compile guards that copy itself."""
    scope = {**function.__globals__, **replace}
    del scope["__name__"]
    new = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    new.__kwdefaults__, new.__annotations__ = function.__kwdefaults__, function.__annotations__
    new.__doc__, new.__module__ = function.__doc__, function.__module__
    return new


def _announcing(call: types.FunctionType, replace: dict[str, Any]) -> Callable[..., Any]:
    inner = _with_globals(call, replace)

    @functools.wraps(call)  # Attention.forward drops keyword arguments that the signature does not name
    def announcing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _traced.tag = self._heart_tag
            result = inner(self, *args, **kwargs)
            _traced.tag = None
            return result
        before, _announced.tag = _announced.tag, self._heart_tag
        try:
            return inner(self, *args, **kwargs)
        finally:
            _announced.tag = before

    return announcing


def _functional() -> types.ModuleType:
    shim = types.ModuleType("torch.nn.functional")
    shim.__dict__.update(F.__dict__)
    shim.__dict__[SDPA] = _announced_sdpa
    return shim


# ---------------------------------------- the calls that replace the model's


def dispatch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> torch.Tensor:
    """Stands for diffusers' `dispatch_attention_fn`; q, k, v [B, N, H, D]."""
    odd = dropout_p or is_causal or scale is not None or enable_gqa or attention_kwargs
    if torch.compiler.is_compiling() and not odd:
        return torch.ops.heart.attend(query, key, value, attn_mask, backend.handle, backend.forward)
    extra: dict[str, Any] | None = None
    if odd:
        extra = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        extra["attention_kwargs"] = attention_kwargs
    return attend(backend, query, key, value, attn_mask, parallel_config, extra)


def _announced_dispatch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any):
    tag = _traced.tag if torch.compiler.is_compiling() else _announced.tag
    return dispatch(query, key, value, *args, backend=tag, **kwargs)


def _announced_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stands for `F.scaled_dot_product_attention`; q, k, v [B, H, N, D]."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = _announced_dispatch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.transpose(1, 2)


def attend(
    tag: Tag,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    parallel_config: Any = None,
    extra: dict[str, Any] | None = None,
) -> torch.Tensor:
    """One attention call in eager mode; q, k, v [B, N, H, D]."""
    attachment = tag.layer.attachment
    if attachment is None:  # a processor that outlived its attachment
        dense = Dense(tag, mask, extra)
        dense.parallel = parallel_config
        return dense.raw(query, key, value)
    if parallel_config is not None and compat.context_parallel(parallel_config) is not None:
        return attend_in_parallel(attachment, tag.layer, Dense(tag, mask, extra), query, key, value, parallel_config)
    if mask is None and extra is None and (reason := attachment.surely_dense(tag.layer, query, key)):
        return attachment.attend_densely(tag.layer, query, key, value, Dense(tag, None), reason)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    dense = Dense(tag, mask, extra, (q, k, v), (query, key, value))
    out = attachment.attend(tag.layer, q, k, v, dense)
    return dense.answer[1] if out is dense.answer[0] else out.transpose(1, 2)


class Dense:
    """The attention this call would have had without HEART, for q, k, v [B, H, N, D] (any heads of it).

    `items` says which batch items q, k, v are, where they are not all of the call's: a mask is cut to them.
    """

    # `given` are the call's own q, k, v and `theirs` the same as the model laid them out: views cost microseconds
    __slots__ = ("answer", "extra", "given", "mask", "parallel", "tag", "theirs")

    def __init__(
        self,
        tag: Tag,
        mask: torch.Tensor | None,
        extra: dict[str, Any] | None = None,
        given: tuple[Any, ...] = (None,),
        theirs: tuple[Any, ...] = (),
    ) -> None:
        self.tag, self.mask, self.extra, self.parallel = tag, mask, extra, None
        self.given, self.theirs = given, theirs
        self.answer: tuple[Any, Any] = (None, None)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, items: Any = None) -> torch.Tensor:
        """The model's own attention of q, k, v [B, H, N, D]; `items` if they are only some of the batch's."""
        given = self.given
        if q is given[0] and k is given[1] and v is given[2]:
            query, key, value = self.theirs
            raw = self.raw(query, key, value, items)
        else:
            raw = self.raw(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), items)
        out = raw.transpose(1, 2)
        self.answer = (out, raw)
        return out

    def raw(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, items: Any = None) -> torch.Tensor:
        """The same for the layout of diffusers, [B, N, H, D]."""
        tag, mask = self.tag, self.mask
        if items is not None and mask is not None and mask.shape[0] > 1:
            mask = mask[items]
        real = tag.scope.get(DISPATCH)
        if real is None:
            extra = {k: v for k, v in (self.extra or {}).items() if k != "attention_kwargs"}
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            return tag.scope["F"].scaled_dot_product_attention(q, k, v, attn_mask=mask, **extra).transpose(1, 2)
        extra = self.extra or {}
        return real(query, key, value, attn_mask=mask, backend=tag.backend, parallel_config=self.parallel, **extra)
