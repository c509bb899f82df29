"""HEART in vLLM-Omni: an attention implementation for its diffusion engine.

The engine makes one `AttentionImpl` for each layer, with the layer's name as `prefix`, and calls
`forward(query, key, value, attn_metadata)` with tensors [B, N, H, D]. What it does not tell is the denoising
step and
the guidance branch: the pipeline sets `HeartImpl.now = (step, branch)` before each transformer forward.
"""

import re

import heart_attention as heart


class HeartImpl:
    """One layer's attention; `state` is shared by all layers of a model."""

    state = None  # heart.Engine(config, layers, heads), set once
    now = (0, "cond")  # (step, branch), set before each forward

    def __init__(self, num_heads, head_size, softmax_scale, causal=False, num_kv_heads=None, prefix="", **extra):
        found = re.search(r"(\d+)\.(attn1|self_attn)$", prefix)
        usual = not causal and num_kv_heads in (None, num_heads) and abs(softmax_scale * head_size**0.5 - 1) < 1e-6
        self.layer = int(found.group(1)) if found and usual else None  # cross-attention has no layer here
        self.dense = extra["dense"](num_heads, head_size, softmax_scale, causal, num_kv_heads, prefix)

    def forward(self, query, key, value, attn_metadata=None):
        """[B, N, H, D] -> [B, N, H, D]."""
        masked = attn_metadata is not None and getattr(attn_metadata, "attn_mask", None) is not None
        if self.layer is None or masked or query.shape != key.shape:
            return self.dense.forward(query, key, value, attn_metadata)
        dense = lambda *qkv: self.dense.forward(*(x.transpose(1, 2) for x in qkv), attn_metadata).transpose(1, 2)  # noqa: E731
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return heart.attention(q, k, v, (self.layer, *self.now), self.state, dense).transpose(1, 2)
