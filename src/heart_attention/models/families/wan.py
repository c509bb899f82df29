"""Wan 2.1 and 2.2 (T2V, I2V, TI2V, VACE) and SkyReels-V2: self-attention apart from cross-attention."""

from __future__ import annotations

from .base import Family


class Wan(Family):
    """`attn1` is video self-attention; `attn2` (text and image) is never touched."""


class WanVACE(Family):
    """The control branch's blocks attend over the same tokens and count as further layers."""

    layers = (r"blocks\.\d+\.attn1", r"vace_blocks\.\d+\.attn1")
