"""Copies of an enabled transformer, by `copy.deepcopy`, pickle or `torch.save`, are plain ones without HEART."""

from __future__ import annotations

import copy
import copyreg
from typing import TYPE_CHECKING, Any

import torch

from . import compat
from .listener import CHILD

if TYPE_CHECKING:
    from .attachment import Attachment

_COPY, _PICKLE = "__deepcopy__", "__reduce_ex__"


def install(attachment: Attachment) -> None:
    """Let copies of the attachment's transformer be plain ones."""
    copier = _Copier(attachment)
    attachment.transformer.__dict__.update({_COPY: copier, _PICKLE: copier.reduce})


def remove(transformer: torch.nn.Module) -> None:
    """Undo `install`."""
    for name in (_COPY, _PICKLE):
        del transformer.__dict__[name]


def attachment_in(transformer: torch.nn.Module) -> Attachment | None:
    """The attachment that was installed, if any."""
    copier = transformer.__dict__.get(_COPY)
    return copier.attachment if isinstance(copier, _Copier) else None


class _Copier:
    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def __call__(self, memo: dict[int, Any]) -> torch.nn.Module:
        model = self.attachment.transformer
        new = type(model).__new__(type(model))
        memo[id(model)] = new
        new.__dict__.update(copy.deepcopy(self._plain_state(), memo))
        return new

    def reduce(self, protocol: int) -> tuple[Any, ...]:
        """What pickle keeps: the class and the plain state (processors give their originals by themselves)."""
        return copyreg.__newobj__, (type(self.attachment.transformer),), self._plain_state()  # type: ignore[attr-defined]

    def _plain_state(self) -> dict[str, Any]:
        model = self.attachment.transformer
        compat.forget_child_registries(model)
        state = {k: v for k, v in model.__dict__.items() if k not in (_COPY, _PICKLE)}
        state["_modules"] = {k: m for k, m in model._modules.items() if k != CHILD}
        for name in compat.PRE_HOOKS:
            state[name] = state[name].copy()
            state[name].pop(self.attachment.hook_id, None)
        return state
