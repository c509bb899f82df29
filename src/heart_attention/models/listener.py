"""What a pipeline tells a transformer about where it stands, passed on to the clock.

diffusers announces guidance branches and steps by `cache_context(...)`, and the end of a generation by a reset, to
the hooks of a transformer and of its children. Ours sits on a child without parameters that is never called, so that
no offload or compile meets it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..online.clock import Clock
from .compat import HookRegistry, ModelHook, StateManager

CHILD = "_heart_clock"  # the child's name in the transformer


class Listener(torch.nn.Module):
    """The child module that carries our hook."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        HookRegistry.check_if_exists_or_initialize(self).register_hook(_ClockHook(clock), "heart_clock")


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
