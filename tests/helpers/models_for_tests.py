"""Small random models that calibration's tests run on: real diffusers classes, a second or less a forward."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLWan,
    HunyuanVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from heart_attention.calibration.measure.trajectory import Branch, Context

CALL = {"height": 32, "width": 32, "num_frames": 4, "num_inference_steps": 8, "guidance_scale": 4.0}
CALL |= {"negative_prompt": "", "max_sequence_length": 16}


class Tokenizer:
    """Letters as tokens: enough for a text encoder with random weights."""

    def __call__(self, texts, max_length=16, **_):
        texts = [texts] if isinstance(texts, str) else texts
        ids = torch.zeros(len(texts), max_length, dtype=torch.long)
        for row, text in zip(ids, texts):
            codes = [3 + ord(c) % 60 for c in text][: max_length - 1] + [1]
            row[: len(codes)] = torch.tensor(codes)
        from types import SimpleNamespace

        return SimpleNamespace(input_ids=ids, attention_mask=(ids > 0).long())


def sharpen(transformer: torch.nn.Module, scale: float = 3.0) -> torch.nn.Module:
    """Random attention is flat; larger query and key norms make some heads sharp, as trained ones are."""
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            if name.endswith(("norm_q.weight", "norm_k.weight")):
                p.mul_(torch.linspace(1.0, scale, len(p)))
            if "scale_shift_table" in name:
                p.mul_(2.0)
    return transformer.eval()


def wan_transformer(layers: int = 3, heads: int = 2, seed: int = 0) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=16, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=16, ffn_dim=32, num_layers=layers, cross_attn_norm=True, rope_max_seq_len=64,
    )  # fmt: skip
    return sharpen(model)


def wan_pipe(layers: int = 3, heads: int = 2, seed: int = 0) -> WanPipeline:
    """A WanPipeline of the smallest parts; 4 frames of 32×32 pixels are 4×4×4 = 64 tokens at scale 4."""
    transformer = wan_transformer(layers, heads, seed)
    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
            is_encoder_decoder=False, use_cache=False,
        )
    ).eval()  # fmt: skip
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1], num_res_blocks=1, temperal_downsample=[], in_channels=48, out_channels=48,
        patch_size=4, scale_factor_temporal=1, scale_factor_spatial=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ).eval()  # fmt: skip
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = WanPipeline(tokenizer=None, text_encoder=encoder, vae=vae, scheduler=scheduler, transformer=transformer)
    pipe.tokenizer = Tokenizer()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def wan_context(model: WanTransformer3DModel, prompt: int = 0, guidance: float | None = 4.0) -> Context:
    """A context of noise: two branches when guided."""
    make = torch.Generator().manual_seed(prompt)
    latents = torch.randn(1, 4, 4, 8, 8, generator=make)
    branches = []
    weights = [(1.0,)] if guidance is None else [(guidance,), (1 - guidance,)]
    for name, weight in zip(("cond", "uncond"), weights):
        text = torch.randn(1, 6, 16, generator=make)
        inputs = {"hidden_states": latents, "timestep": torch.tensor([600.0]), "encoder_hidden_states": text}
        with torch.no_grad():
            out = model(**inputs, return_dict=False)[0]
        branches.append(Branch(name, inputs, out, weight))
    return Context(prompt, 3, tuple(branches))


def hunyuan_transformer(seed: int = 0) -> HunyuanVideoTransformer3DModel:
    torch.manual_seed(seed)
    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_single_layers=2, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return sharpen(model)


def hunyuan_context(model: HunyuanVideoTransformer3DModel, prompt: int = 0) -> Context:
    make = torch.Generator().manual_seed(prompt)
    mask = torch.zeros(1, 8, dtype=torch.int64)
    mask[:, :5] = 1
    inputs = {
        "hidden_states": torch.randn(1, 4, 4, 8, 8, generator=make),
        "timestep": torch.tensor([600.0]),
        "encoder_hidden_states": torch.randn(1, 8, 16, generator=make),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(1, 8, generator=make),
        "guidance": torch.tensor([6000.0]),
    }
    with torch.no_grad():
        out = model(**inputs, return_dict=False)[0]
    return Context(prompt, 3, (Branch("cond", inputs, out, (1.0,)),))


def plain_attention(mask, rest: str, q, k, v) -> torch.Tensor:
    """Masked attention with the rest as means, straight from the definition and differentiable; [1, H, N, D]."""
    scale = q.shape[-1] ** -0.5
    logits = (q @ k.mT * scale).masked_fill(~mask.dense_tokens(), -torch.inf)
    if rest == "drop":
        return logits.softmax(-1) @ v
    count = mask.flags.shape[3]
    groups = mask.group_of().expand(*mask.shape, -1)
    member = torch.nn.functional.one_hot(groups, count).mT.to(k.dtype)  # [1, H, C, n_k]
    sizes = member.sum(-1, keepdim=True)
    means = [(member @ x[:, :, : mask.n_k]) / sizes.clamp(min=1) for x in (k, v)]
    rows = mask.row_of().expand(*mask.shape, -1)
    seen = mask.approximated().gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, count))  # [1, H, n_q, C]
    seen = torch.nn.functional.pad(seen, (0, 0, 0, q.shape[2] - mask.n_q))
    more = (q @ means[0].mT * scale + sizes.clamp(min=1).log().mT).masked_fill(~seen, -torch.inf)
    return torch.cat([logits, more], -1).softmax(-1) @ torch.cat([v, means[1]], 2)
