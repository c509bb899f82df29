"""Build the parts of the embedded ``WanPipeline``: transformer, text encoder, tokenizer, codec, scheduler."""

import functools
import math
import re

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from heart_attention.tiny import scene
from heart_attention.tiny.pipeline import WanPipeline

from . import data

Z_DIM = 16  # latent channels: 34 dB on the clips
PATCH = 4  # pixels a side that one latent pixel covers
TEXT_DIM = 64
FLOW_SHIFT = 3.0
LAYERS = 9
LATE_WORDS = ("an",)  # stand last in the vocabulary: it grew when training was already under way
CAPTION_TOKENS = 12  # at least one more than the longest caption has


def words() -> list[str]:
    """Every word a caption can hold, but for the late ones."""
    text = " ".join(scene.caption(c, t, v) for c in scene.combos() for t in range(3) for v in range(3))
    return sorted(set(re.findall(r"[a-z]+|,", text)) - set(LATE_WORDS))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A Unigram tokenizer of whole words, with single letters so that any other word still has a spelling."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    pieces = [("▁" + w, -1.0) for w in words()] + [(",", -1.0), ("▁", -5.0)]
    pieces += [(c, -10.0) for c in "abcdefghijklmnopqrstuvwxyz"]
    pieces += [("▁" + w, -1.0) for w in LATE_WORDS]
    tok = Tokenizer(models.Unigram(special + pieces, unk_id=2))
    tok.normalizer = normalizers.Lowercase()
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    tok.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def build_text_encoder(vocab: int, seed: int = 0) -> UMT5EncoderModel:
    """A two-layer UMT5 encoder whose words are spelled, not trained."""
    config = UMT5Config(
        vocab_size=vocab, d_model=TEXT_DIM, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=16, relative_attention_max_distance=32, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0, tie_word_embeddings=False, is_encoder_decoder=False, use_cache=False,
    )  # fmt: skip
    encoder = UMT5EncoderModel(config)
    spell_words(encoder, seed)
    return encoder


LOUD = 2000.0  # norm of the embeddings: what the encoder's layers add to them does not count


@torch.no_grad()
def spell_words(encoder: UMT5EncoderModel, seed: int = 0) -> None:
    """Make every word's encoding a direction of its own, at right angles to all others, and leave it so.

    An encoder that is trained together with the transformer can end with one encoding for several words.
    """
    encoder.shared.weight.copy_(LOUD * word_directions(encoder.config.vocab_size, seed))
    encoder.requires_grad_(False)


def word_directions(words: int, seed: int = 0) -> torch.Tensor:
    """A unit vector for each of at most TEXT_DIM words, at right angles to all others [words, TEXT_DIM]."""
    rng = torch.Generator().manual_seed(seed)
    directions, _ = torch.linalg.qr(torch.randn(TEXT_DIM, TEXT_DIM, generator=rng))
    return directions[:words]


def build_transformer() -> WanTransformer3DModel:
    """The Wan2.1 architecture at dim 128: 4 heads of 32."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=32, in_channels=Z_DIM, out_channels=Z_DIM,
        text_dim=TEXT_DIM, freq_dim=64, ffn_dim=512, num_layers=LAYERS, cross_attn_norm=True, rope_max_seq_len=128,
    )  # fmt: skip


def initialise(seed: int = 0) -> tuple[WanTransformer3DModel, UMT5EncoderModel, PreTrainedTokenizerFast]:
    """Transformer, text encoder and tokenizer as they are at step 0 of training: a pure function of the seed."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    return build_transformer(), build_text_encoder(len(tokenizer), seed), tokenizer


@functools.cache
def fit_codec(seed: int = 0, clips: int = 256) -> dict[str, torch.Tensor]:
    """PCA of 4x4x3 pixel patches of clips: basis [48, Z], mean [Z] and std [Z] of the latents.

    Latents are scaled to std (s_i / s_0)^1/2, half way between whitened and not: full whitening would make the
    rare edge components as loud as colour, none would drown them in noise.
    """
    video = data.codec_clips(seed + 77, 0, clips, 8, (64, 64))
    patches = patchify(video, PATCH).movedim(1, -1).reshape(-1, 3 * PATCH * PATCH)
    mean = patches.mean(0)
    variance, basis = torch.linalg.eigh(torch.cov(patches.double().T))
    std = variance.flip(0)[:Z_DIM].sqrt()
    basis = basis.flip(1)[:, :Z_DIM]
    basis = basis * basis.sum(0).sign()  # eigenvectors have no sign of their own
    scale = (std / std[0]).sqrt().clamp(min=0.25)
    return {"basis": basis.float(), "mean": (mean.double() @ basis).float(), "std": (std / scale).float()}


def encode(video: torch.Tensor, codec: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the autoencoder does, as one matmul: [B, 3, T, H, W] -> normalised latents [B, Z, T, H/4, W/4]."""
    z = torch.einsum("bcthw,cz->bzthw", patchify(video, PATCH), codec["basis"])
    shape = (1, -1, 1, 1, 1)
    return (z - codec["mean"].view(shape)) / codec["std"].view(shape)


@functools.cache
def latent_scale(seed: int = 0) -> torch.Tensor:
    """Standard deviation of each latent channel over clips [Z]."""
    return encode(data.codec_clips(seed + 78, 0, 64, 4, (64, 64)), fit_codec(seed)).std((0, 2, 3, 4))


def _pass_through(coder, weight_in: torch.Tensor, weight_out: torch.Tensor, bias_out: torch.Tensor) -> None:
    """Set a Wan encoder or decoder to x -> weight_out (weight_in x) + bias_out, exactly.

    Blocks in between add zero. The head is RMS norm, SiLU, convolution: a loud constant channel makes the norm a
    constant factor, and silu(x) - silu(-x) = x, so every feature goes through twice, with either sign.
    """
    loud = 1e4
    for p in coder.parameters():
        p.zero_()
    n = weight_in.shape[0]
    centre = (slice(None), slice(None), -1, 1, 1)  # causal in time: the last tap is now
    signs = torch.cat([weight_in, -weight_in])
    coder.conv_in.weight[: 2 * n, :, -1, 1, 1] = signs
    coder.conv_in.bias[2 * n] = loud
    gain = loud / math.sqrt(coder.conv_in.out_channels)
    coder.norm_out.gamma[: 2 * n] = gain
    k = weight_out.shape[0]
    coder.conv_out.weight[centre][:k, : 2 * n] = torch.cat([weight_out, -weight_out], 1)
    coder.conv_out.bias[:k] = bias_out


@torch.no_grad()
def build_vae(codec: dict[str, torch.Tensor]) -> AutoencoderKLWan:
    """``AutoencoderKLWan`` whose weights are set, not trained: the PCA codec of 4x4 pixel patches, frame by frame."""
    pixels = 3 * PATCH * PATCH
    vae = AutoencoderKLWan(
        base_dim=2 * Z_DIM + 1, z_dim=Z_DIM, dim_mult=[1], num_res_blocks=1, temperal_downsample=[],
        in_channels=pixels, out_channels=pixels, patch_size=PATCH, scale_factor_temporal=1,
        scale_factor_spatial=PATCH, latents_mean=codec["mean"].tolist(), latents_std=codec["std"].tolist(),
    )  # fmt: skip
    basis, eye = codec["basis"], torch.eye(Z_DIM)
    _pass_through(vae.encoder, basis.T, eye, torch.zeros(Z_DIM))
    vae.encoder.conv_out.bias[Z_DIM:] = -30.0  # log variance: none
    _pass_through(vae.decoder, eye, basis, torch.zeros(pixels))
    for conv in (vae.quant_conv, vae.post_quant_conv):
        conv.weight.copy_(torch.eye(conv.out_channels).view_as(conv.weight))
        conv.bias.zero_()
    return vae.eval()


def build_scheduler() -> UniPCMultistepScheduler:
    """UniPC on the flow, as Wan2.1 at 480p uses it."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT, num_train_timesteps=1000
    )


def build_pipeline(transformer, text_encoder, tokenizer, codec) -> WanPipeline:
    """Put the parts together."""
    return WanPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder.eval(), vae=build_vae(codec), scheduler=build_scheduler(),
        transformer=transformer.eval(),
    )  # fmt: skip
