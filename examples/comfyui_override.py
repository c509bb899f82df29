"""HEART in ComfyUI: an `optimized_attention_override` for a model's transformer options.

    model.model_options["transformer_options"]["optimized_attention_override"] = heart_override(layers=30,
    heads=12)

ComfyUI calls the override as `override(func, q, k, v, heads, mask=..., transformer_options=..., ...)` for
every attention of the model; `func` is the attention it would have run. Cross-attention and masked calls go
to it.
"""

import heart_attention as heart


def heart_override(layers, heads, config="wan2.1-1.3b-480p-xattention"):
    """An override that keeps its own masks; make one for each model."""
    state = heart.Engine(heart.PRESETS[config].config if isinstance(config, str) else config, layers, heads)

    def override(func, q, k, v, heads, mask=None, **kw):
        options = kw.get("transformer_options") or {}
        if mask is not None or q.shape != k.shape or "block_index" not in options:
            return func(q, k, v, heads, mask=mask, **kw)
        if not kw.get("skip_reshape"):  # [B, N, H * D] -> [B, H, N, D]
            q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        layout = {**kw, "skip_reshape": True, "skip_output_reshape": True}
        gap = (options["sample_sigmas"] - options["sigmas"].flatten()[0]).abs()  # the schedule has no step number
        branch = ",".join(map(str, options.get("cond_or_uncond", "")))
        call = {"layer": options["block_index"], "step": int(gap.argmin()), "branch": branch}
        call["grid"] = options.get("grid_sizes")
        out = heart.attention(q, k, v, call, state, dense=lambda q, k, v: func(q, k, v, heads, **layout))
        return out if kw.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)

    override.state = state  # print(heart.stats(override.state))
    return override
