"""The smallest Wan transformer that HEART serves, with random weights: for benchmarks of what happens around it."""

import torch
from diffusers import WanTransformer3DModel


def small_wan() -> WanTransformer3DModel:
    """Two layers of two heads of 16; the same weights every time."""
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=16,
        num_layers=2,
        rope_max_seq_len=32,
    ).eval()
