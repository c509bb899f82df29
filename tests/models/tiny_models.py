"""Tiny transformers with random weights, one of each family, and inputs for them. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

HEADS, DIM, GRID, TEXT = 2, 16, (2, 4, 4), 6  # attention heads, their size, video tokens, text tokens


def _seeded(build: Any, seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().eval()


def wan(layers: int = 2, seed: int = 0, **config: Any) -> torch.nn.Module:
    """A WanTransformer3DModel (T2V unless the config says otherwise)."""
    from diffusers import WanTransformer3DModel

    return _seeded(lambda: WanTransformer3DModel(**{**_wan_config(layers), **config}), seed)


def _wan_config(layers: int) -> dict[str, Any]:
    return dict(
        num_attention_heads=HEADS,
        attention_head_dim=DIM,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=32,
        num_layers=layers,
        rope_max_seq_len=32,
    )


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wan_inputs(t: float = 500.0, batch: int = 1, seed: int = 0, channels: int = 4) -> dict[str, Any]:
    """Arguments for one forward of `wan()`."""
    return dict(
        hidden_states=noise(batch, channels, GRID[0], 2 * GRID[1], 2 * GRID[2], seed=seed),
        timestep=torch.full((batch,), t),
        encoder_hidden_states=noise(batch, TEXT, 8, seed=seed + 1),
        return_dict=False,
    )
