"""How sparse the heads are: XAttention's predicted block masks, read while the pipeline generates.

Written apart from the package's own XAttention, so that the figures of the model card stand on their own; only the
tile order is the package's.
"""

import math
from contextlib import contextmanager

import torch
from diffusers.models.transformers import transformer_hunyuan_video, transformer_wan

from heart_attention.token_order import tile_order

BLOCK, STRIDE = 64, 8


def block_mass(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Predicted attention mass by block [B, H, M, M], rows summing to one; q, k [B, H, N, D], N divisible by 64."""
    b, h, n, d = q.shape
    flipped = q.unflatten(2, (-1, STRIDE)).flip(3).flatten(3)  # [B, H, N/S, S*D]
    logits = flipped @ k.unflatten(2, (-1, STRIDE)).flatten(3).transpose(-1, -2) / (STRIDE * math.sqrt(d))
    m, g = n // BLOCK, BLOCK // STRIDE
    return logits.softmax(-1).view(b, h, m, g, m, g).mean(3).sum(-1)


def density(mass: torch.Tensor, p: float = 0.9) -> torch.Tensor:
    """Share of blocks [B, H] in the smallest sets that hold a share p of every row's mass, block 0 always among them."""
    ranked, order = mass.sort(dim=-1, descending=True)
    keep_ranked = ranked.cumsum(-1) - ranked < p  # a block is needed while those before it do not reach p
    keep = torch.zeros_like(keep_ranked).scatter(-1, order, keep_ranked)
    keep[..., 0] = True
    return keep.float().mean((-1, -2))


FAMILIES = (transformer_wan, transformer_hunyuan_video)  # modules whose attention is watched


@contextmanager
def wrap_attention(wrap):
    """Put ``wrap(original)`` in the place of the attention function of every family."""
    originals = [module.dispatch_attention_fn for module in FAMILIES]
    try:
        for module, original in zip(FAMILIES, originals, strict=True):
            module.dispatch_attention_fn = wrap(original)
        yield
    finally:
        for module, original in zip(FAMILIES, originals, strict=True):
            module.dispatch_attention_fn = original


def over_video(query: torch.Tensor, key: torch.Tensor, tokens: int) -> bool:
    """Whether an attention call is self-attention over so many video tokens, with text behind them or without."""
    return query.shape[1] == key.shape[1] >= tokens


def watch_attention(see, tokens: int):
    """Call ``see(q, k)`` ([B, N, H, D], after norm and RoPE, video tokens only) for every self-attention over video."""

    def wrap(original):
        def watched(query, key, value, *args, **kwargs):
            if over_video(query, key, tokens):
                see(query[:, :tokens], key[:, :tokens])
            return original(query, key, value, *args, **kwargs)

        return watched

    return wrap_attention(wrap)


class DensityMeter:
    """Collects densities per (prompt, step, layer, head) in both token orders while a pipeline runs."""

    def __init__(self, layers: int, grid: tuple[int, int, int], steps: set[int], branches: int = 2, p: float = 0.9):
        self.layers, self.steps, self.branches, self.p = layers, steps, branches, p
        self.order, self.calls = tile_order(grid, BLOCK), 0
        self.rows: dict[str, list[torch.Tensor]] = {"raster": [], "tiles": []}  # each [H], layer by layer

    def see(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """One self-attention call; calls come layer by layer, branch by branch, step by step."""
        step = self.calls // (self.layers * self.branches)
        self.calls += 1
        if step not in self.steps:
            return
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        self.rows["raster"].append(density(block_mass(q, k), self.p)[0])
        self.rows["tiles"].append(density(block_mass(q[:, :, self.order], k[:, :, self.order]), self.p)[0])

    def table(self, order: str) -> torch.Tensor:
        """Mean density [L, H] over what was seen."""
        return torch.stack(self.rows[order]).unflatten(0, (-1, self.layers)).mean(0)
