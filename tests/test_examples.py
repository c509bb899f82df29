"""The examples against small stand-ins of their hosts' call contracts."""

import functools
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import heart_attention as heart

H, N, D, LAYERS, STEPS = 2, 96, 8, 2, 5
CONFIG = heart.HeartConfig(
    heart.XAttention(stride=4, block=16), 0.5, heart.TMR(delta=1e9), dense_steps=2, force_sparse=True
)


def example(name):
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(seed=0):
    return torch.randn(3, 1, H, N, D, generator=torch.Generator().manual_seed(seed)).unbind(0)


def expected(q, k, v, sparse):
    if not sparse:
        return F.scaled_dot_product_attention(q, k, v)
    from heart_attention import kernels

    return kernels.run(kernels.plan("eager", CONFIG.backbone.predict(q, k, 0.5)), q, k, v)


# ---------------------------------------------------------------- ComfyUI


def comfy_attention(calls):
    """What ComfyUI's models call: an attention function that lets an override in, once."""

    def pytorch(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **kw):
        calls.append(q.shape)
        if not skip_reshape:
            q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    @functools.wraps(pytorch)
    def optimized(*args, **kw):
        if "_inside_attn_wrapper" not in kw:
            kw["_inside_attn_wrapper"] = True
            override = (kw.get("transformer_options") or {}).get("optimized_attention_override")
            if override is not None:
                return override(optimized, *args, **kw)
        return pytorch(*args, **kw)

    return optimized


@pytest.mark.parametrize("flat", [True, False], ids=["B N HD", "B H N D"])
@pytest.mark.parametrize("keep", [True, False], ids=["heads kept", "heads joined"])
def test_comfyui_override(flat, keep):
    calls = []
    attention = comfy_attention(calls)
    override = example("comfyui_override").heart_override(LAYERS, H, CONFIG)
    sigmas = torch.linspace(1, 0, STEPS + 1)
    for _ in range(2):
        for step in range(STEPS):
            for branch in ([0], [1]):
                for layer in range(LAYERS):
                    q, k, v = tensors(layer)
                    given = (x.transpose(1, 2).flatten(2) if flat else x for x in (q, k, v))
                    options = {
                        "optimized_attention_override": override, "block_index": layer, "sigmas": sigmas[step : step + 1],
                        "sample_sigmas": sigmas, "cond_or_uncond": branch,
                    }  # fmt: skip
                    out = attention(
                        *given, H, skip_reshape=not flat, skip_output_reshape=keep, transformer_options=options
                    )
                    want = expected(q, k, v, step >= 2)
                    torch.testing.assert_close(
                        out, want if keep else want.transpose(1, 2).flatten(2), rtol=0, atol=2e-6
                    )
    stats = heart.stats(override.state)
    assert stats["generations"] == 2
    assert [row[0] for row in stats["records"][0]["refreshed"][0]] == [0, 0, 1, 0, 0]
    assert len(calls) == 2 * 2 * 2 * LAYERS  # only the warm-up reached ComfyUI's own attention


def test_comfyui_cross_attention_and_masks_pass_through():
    calls = []
    attention = comfy_attention(calls)
    override = example("comfyui_override").heart_override(LAYERS, H, CONFIG)
    q, k, v = (x.transpose(1, 2).flatten(2) for x in tensors())
    options = {"optimized_attention_override": override, "block_index": 0}
    attention(q, k[:, :7], v[:, :7], H, transformer_options=options)
    attention(q, k, v, H, mask=torch.ones(N, N, dtype=torch.bool), transformer_options=options)
    attention(q, k, v, H, transformer_options={"optimized_attention_override": override})  # outside the blocks
    assert len(calls) == 3 and heart.stats(override.state)["calls"] == 0


def test_comfyui_presets_by_name():
    override = example("comfyui_override").heart_override(30, 12)
    assert override.state.config == heart.PRESETS["wan2.1-1.3b-480p-xattention"].config


# ---------------------------------------------------------------- vLLM-Omni


class SDPAImpl:
    """vLLM-Omni's plain implementation: [B, N, H, D] in and out."""

    def __init__(self, num_heads, head_size, softmax_scale, causal=False, num_kv_heads=None, prefix="", **extra):
        self.causal, self.scale = causal, softmax_scale

    def forward(self, query, key, value, attn_metadata=None):
        q, k, v = (x.permute(0, 2, 1, 3) for x in (query, key, value))
        mask = attn_metadata.attn_mask if attn_metadata else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).permute(0, 2, 1, 3)


def test_vllm_omni_implementation():
    impl = example("vllm_omni").HeartImpl
    impl.state = heart.Engine(CONFIG, LAYERS, H)
    make = lambda name: impl(H, D, D**-0.5, prefix=name, dense=SDPAImpl)  # noqa: E731
    layers, cross = [make(f"blocks.{i}.attn1") for i in range(LAYERS)], make("blocks.0.attn2")
    for step in range(STEPS):
        for branch in ("cond", "uncond"):
            impl.now = (step, branch)
            for i, layer in enumerate(layers):
                q, k, v = tensors(i)
                out = layer.forward(*(x.transpose(1, 2) for x in (q, k, v)))
                torch.testing.assert_close(out.transpose(1, 2), expected(q, k, v, step >= 2), rtol=0, atol=2e-6)
                cross.forward(out, out[:, :5], out[:, :5])
    q, k, v = (x.transpose(1, 2) for x in tensors())
    layers[0].forward(q, k, v, SimpleNamespace(attn_mask=torch.ones(N, N, dtype=torch.bool)))
    assert heart.stats(impl.state)["calls"] == STEPS * 2 * LAYERS


def test_vllm_omni_unusual_layers_stay_dense():
    impl = example("vllm_omni").HeartImpl
    assert impl(H, D, 1.0, prefix="blocks.0.attn1", dense=SDPAImpl).layer is None  # another scale
    assert impl(H, D, D**-0.5, causal=True, prefix="blocks.0.attn1", dense=SDPAImpl).layer is None
    assert impl(H, D, D**-0.5, num_kv_heads=1, prefix="blocks.0.attn1", dense=SDPAImpl).layer is None
