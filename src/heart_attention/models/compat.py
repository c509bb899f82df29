"""Every private name of diffusers and torch that HEART uses, in one place.

Checked with diffusers 0.36.0 to 0.42.1 and torch 2.5 to 2.13. A release that moves one of them shows up in
tests/models/test_compat.py, and is mended here.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.hooks.hooks import HookRegistry, ModelHook, StateManager
from torch._dynamo.eval_frame import skip_code

__all__ = ["HookRegistry", "ModelHook", "StateManager"]

DISPATCH = "dispatch_attention_fn"  # the function that most attention processors call, a global of their modules
SDPA = "scaled_dot_product_attention"  # what the others call, through a global `F`
BACKEND = "_attention_backend"  # a processor's attribute: the user's choice, None for the active one
PARALLEL = "_parallel_config"  # the same of a processor and of a transformer: context parallelism
PRE_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")  # of a module, by the id of a hook's handle


def unwrapped(model: Any) -> Any:
    """The module behind what torch.compile returns, or the model itself."""
    return getattr(model, "_orig_mod", model)


def outside_graphs(function: Any) -> Any:
    """Let torch.compile run this function as it is, without a graph of its own."""
    skip_code(function.__code__)
    return function


def backend_name(backend: Any) -> str:
    """The name of an attention backend; of diffusers' active one for None."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    if backend is None:
        backend = _AttentionBackendRegistry.get_active_backend()[0]
    return getattr(backend, "value", backend)


def forget_child_registries(transformer: Any) -> None:
    """Make diffusers look again which children have hooks: it remembers them from 0.38 on."""
    registry = getattr(transformer, "_diffusers_hook", None)
    if registry is not None and getattr(registry, "_child_registries_cache", None) is not None:
        registry._child_registries_cache = None


def context_parallel(config: Any) -> Any:
    """The context-parallel part of a parallel config (of a transformer's, for a module), or None."""
    if isinstance(config, torch.nn.Module):
        config = getattr(config, PARALLEL, None)
    return getattr(config, "context_parallel_config", None)


def ulysses_group(context: Any) -> Any:
    """The process group over which a context-parallel config exchanges heads."""
    return context._ulysses_mesh.get_group()


def ulysses_anything(context: Any) -> bool:
    """Whether ranks may hold different numbers of tokens (diffusers from 0.37 on)."""
    return getattr(context, "ulysses_anything", False)


def repeated_blocks(transformer: Any) -> list[torch.nn.Module]:
    """The blocks that diffusers says a transformer repeats, the whole of its depth; empty if it says nothing."""
    names = getattr(unwrapped(transformer), "_repeated_blocks", None) or []
    return [module for module in unwrapped(transformer).modules() if type(module).__name__ in names]


def compiler_cache() -> str:
    """Where torch keeps compiled code when nobody names a folder; once asked, it names that folder in the environment."""
    try:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    except ImportError:  # before torch 2.7
        from torch._inductor.runtime.runtime_utils import default_cache_dir
    return default_cache_dir()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def uncompile(module: torch.nn.Module) -> None:
    """Undo `module.compile()`; torch has no public way."""
    module._compiled_call_impl = None


def compiled_call(module: torch.nn.Module) -> Any:
    """What a module that was compiled runs when it is called."""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Any) -> None:
    """Let a compiled module run this when it is called."""
    module._compiled_call_impl = call
