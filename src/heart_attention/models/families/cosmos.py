"""Cosmos (1.0 and 2): self-attention apart from cross-attention."""

from __future__ import annotations

from .base import Family


class Cosmos(Family):
    """`attn1` is video self-attention."""

    layers = (r"transformer_blocks\.\d+\.attn1",)
