"""Regional compilation: the repeated blocks of a transformer, compiled around the opaque attention op, and undone again.

Norms, RoPE, modulation and residuals fuse by themselves; attention stays what it is, dense or ours. All blocks are alike,
so one compilation serves the whole depth. Compiled code is kept in HEART's cache folder and found by the next process.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from .. import files
from ..errors import HeartError
from .compat import is_compiled, repeated_blocks, uncompile

log = logging.getLogger(__name__)


class CompiledBlocks:
    """What `compile_blocks` compiled; `undo` gives the plain blocks back."""

    def __init__(self, blocks: list[torch.nn.Module]):
        self.blocks = blocks

    def undo(self) -> None:
        """Run the blocks uncompiled again; those that the user compiled were never touched."""
        for block in self.blocks:
            uncompile(block)
        self.blocks = []


def compile_blocks(transformer: Any, **options: Any) -> CompiledBlocks:
    """Compile the repeated blocks of a transformer; the first step then takes about half a minute more.

    Args:
        transformer: a diffusers transformer that names its repeated blocks.
        options: for `torch.nn.Module.compile`, such as `mode` or `backend`.
    """
    blocks = repeated_blocks(transformer)
    if not blocks:
        name = type(transformer).__name__
        raise HeartError(
            f"{name} does not say which blocks it repeats, so they cannot be compiled: leave compile_blocks off"
        )
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(files.cache_dir() / "inductor"))
    plain = [block for block in blocks if not is_compiled(block)]
    for block in plain:
        block.compile(**options)
    log.info("%d blocks of %s will be compiled at their first call", len(plain), type(transformer).__name__)
    return CompiledBlocks(plain)
