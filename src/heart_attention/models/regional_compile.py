"""Regional compilation: the repeated blocks of a transformer, compiled around the opaque attention op, and undone again.

Norms, RoPE, modulation and residuals fuse by themselves; attention stays what it is, dense or ours. All blocks are alike,
so one compilation serves the whole depth. Compiled code is kept in HEART's cache folder and found by the next process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from .. import files
from ..errors import HeartError
from .compat import compiled_call, compiler_cache, is_compiled, repeated_blocks, set_compiled_call, uncompile
from .inspect import transformers_of

log = logging.getLogger(__name__)

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # where torch keeps compiled code; a user's own choice stays


class CompiledBlocks:
    """What `compile_blocks` compiled; `undo` gives the plain blocks back."""

    def __init__(self, blocks: list[torch.nn.Module], cache: str | None = None):
        self.blocks = blocks
        self.cache = cache  # the folder that we named to torch, None if the user had named one

    def undo(self) -> None:
        """Run the blocks uncompiled again; those that the user compiled were never touched. Twice does nothing."""
        for block in self.blocks:
            uncompile(block)
        if self.cache is not None and os.environ.get(CACHE) == self.cache:
            del os.environ[CACHE]
        self.blocks, self.cache = [], None


def blocks_of(transformer: Any) -> list[torch.nn.Module]:
    """The blocks that a transformer repeats; one that does not name them is refused."""
    blocks = repeated_blocks(transformer)
    if not blocks:
        name = type(transformer).__name__
        raise HeartError(
            f"{name} does not say which blocks it repeats, so they cannot be compiled: leave compile_blocks off"
        )
    return blocks


def compile_blocks(transformer: Any, **options: Any) -> CompiledBlocks:
    """Compile the repeated blocks of a transformer; the first step then takes about half a minute more.

    Args:
        transformer: a diffusers transformer that names its repeated blocks.
        options: for `torch.nn.Module.compile`, such as `mode` or `backend`.
    """
    plain = [block for block in blocks_of(transformer) if not is_compiled(block)]
    cache = None
    if plain and os.environ.get(CACHE) in (None, compiler_cache()):
        cache = _own_cache()
    if cache is not None:
        os.environ[CACHE] = cache
    for block in plain:
        block.compile(**options)
    if plain:
        _announce(plain[0], f"{len(plain)} blocks of {type(transformer).__name__}")
    return CompiledBlocks(plain, cache)


def _own_cache() -> str | None:
    """Where compiled code survives the process, a folder that nobody else may write to; None: PyTorch's own place serves."""
    try:
        return str(files.own_folder(files.cache_dir() / "inductor"))
    except (HeartError, OSError) as error:
        log.warning("compiled blocks are not kept for later: %s", error)
        return None


@contextlib.contextmanager
def compiled(model: Any, wanted: bool = True) -> Iterator[None]:
    """The blocks of a pipeline's transformers, or of one transformer, compiled for the length of a `with` block."""
    done = [compile_blocks(transformer) for transformer in transformers_of(model)] if wanted else []
    try:
        yield
    finally:
        for one in done:
            one.undo()


def _announce(block: torch.nn.Module, what: str) -> None:
    """Say when the compiler starts, which is at the block's first call, and how long it took."""
    call = compiled_call(block)

    def first(*args: Any, **kwargs: Any) -> Any:
        if compiled_call(block) is first:
            set_compiled_call(block, call)
        log.info("compiling %s: the first step takes up to a minute, less when it is in the cache", what)
        began = time.perf_counter()
        out = call(*args, **kwargs)
        log.info("compiled %s in %.0f s", what, time.perf_counter() - began)
        return out

    set_compiled_call(block, first)
