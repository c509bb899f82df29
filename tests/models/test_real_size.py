"""Wan2.1-1.3B at the size that people run, with random weights: two of its layers, 81 frames of 480 × 832."""

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

import heart_attention as heart

HEADS, LAYERS, STEPS = 12, 2, 3
TOKENS = 21 * 30 * 52  # latent frames and patches of 2 × 2


def wan():
    """Layers of Wan2.1-1.3B (its config), only fewer of them; 0.4 GB in fp32."""
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=4096, freq_dim=256,
        ffn_dim=8960, num_layers=LAYERS,
    ).eval()  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_steps_at_480p_and_81_frames():
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = WanPipeline(None, None, None, scheduler, wan())
    pipe.set_progress_bar_config(disable=True)
    backbone = heart.XAttention(stride=16, block=128)
    config = heart.HeartConfig(backbone, 0.1, heart.TMR(relative=0.5), dense_steps=0, force_sparse=True, rest="mean")
    with heart.enabled(pipe, config):
        latents = pipe(
            prompt_embeds=torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(1)),
            height=480, width=832, num_frames=81, num_inference_steps=STEPS, guidance_scale=1.0,
            generator=torch.Generator().manual_seed(2), output_type="latent",
        ).frames  # fmt: skip
        stats = heart.stats(pipe).to_dict()
    assert latents.shape == (1, 16, 21, 60, 104) and latents.isfinite().all()
    assert stats["calls"] == LAYERS * STEPS and 0 < stats["density"] < 0.5
    record = stats["records"][0]
    assert len(record["density"]) == LAYERS and len(record["density"][0]) == STEPS
    assert all(0 < share < 1 for layer in record["rest_mass"] for step in layer for share in step)
    blocks = -(-TOKENS // 128)
    assert stats["memory"]["masks"] == LAYERS * HEADS * blocks * -(-blocks // 8)  # one guidance branch, a bit a block
