"""A small ``HunyuanVideoPipeline`` for the same world, and its training (``python -m tools.train_tiny.hunyuan``).

Joint attention over video and text, double and single blocks, guidance embedding, prompt template and padded text
slots are those of HunyuanVideo. Text features are set, not trained: of each word a direction of its own, of the whole
sentence their sum. The transformer's own refiner makes sentences of them.
"""

import argparse
import logging
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import normalizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from . import model, train
from .plan import HUNYUAN_PLAN

TEMPLATE_TOKEN = "<template>"  # stands for each token of the prompt template, which the pipeline crops by number
GUIDANCE = (1.0, 8.0)  # any value in it means the same: the model is not distilled from a guided one
QUIET = 1e-2  # norm of the second encoder's embeddings: the last word's own counts for little beside what it sees
Codec = dict[str, torch.Tensor]  # of model.fit_codec


class PatchCodec(ModelMixin, ConfigMixin):
    """The PCA codec of 4x4 pixel patches under the names that HunyuanVideo's pipeline reads; latents are normalised."""

    temporal_compression_ratio = 1
    spatial_compression_ratio = model.PATCH

    @register_to_config
    def __init__(self, latent_channels: int = model.Z_DIM, scaling_factor: float = 1.0):
        super().__init__()
        self.basis = torch.nn.Parameter(torch.zeros(3 * model.PATCH**2, latent_channels))
        self.mean = torch.nn.Parameter(torch.zeros(latent_channels))
        self.std = torch.nn.Parameter(torch.ones(latent_channels))

    @torch.no_grad()
    def set(self, codec: Codec) -> "PatchCodec":
        """Take the weights of a fitted codec."""
        for name, value in codec.items():
            getattr(self, name).copy_(value)
        return self.eval()

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """[B, 3, T, H, W] in -1..1 -> latents [B, Z, T, H/4, W/4]."""
        return model.encode(video, {"basis": self.basis, "mean": self.mean, "std": self.std})

    def decode(self, latents: torch.Tensor, return_dict: bool = True) -> tuple[torch.Tensor]:
        """Latents -> (video,); the pipeline asks for no dictionary."""
        shape = (1, -1, 1, 1, 1)
        z = latents * self.std.view(shape) + self.mean.view(shape)
        return (unpatchify(torch.einsum("bzthw,cz->bcthw", z, self.basis), model.PATCH),)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The words of the captions; the template before and after a prompt counts as many tokens as will be cropped."""
    tok = model.build_tokenizer().backend_tokenizer
    tok.add_special_tokens([TEMPLATE_TOKEN])
    before, after = DEFAULT_PROMPT_TEMPLATE["template"].split("{}")
    tok.normalizer = normalizers.Sequence(
        [normalizers.Replace(before, ""), normalizers.Replace(after, ""), normalizers.Lowercase()]
    )
    tok.post_processor = processors.TemplateProcessing(
        f"{TEMPLATE_TOKEN} " * DEFAULT_PROMPT_TEMPLATE["crop_start"] + "$A </s>",
        special_tokens=[(TEMPLATE_TOKEN, tok.token_to_id(TEMPLATE_TOKEN)), ("</s>", 1)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def build_text_encoders(vocab: int) -> tuple[LlamaModel, CLIPTextModel]:
    """A Llama of which the pipeline reads the third state from the end, its embeddings, and a CLIP for the whole sentence."""
    llama = LlamaConfig(
        vocab_size=vocab, hidden_size=model.TEXT_DIM, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    clip = CLIPTextConfig(
        vocab_size=vocab, hidden_size=model.TEXT_DIM, intermediate_size=128, projection_dim=model.TEXT_DIM,
        num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=77, pad_token_id=0, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return LlamaModel(llama), CLIPTextModel(clip)


@torch.no_grad()
def spell_words(llama: LlamaModel, clip: CLIPTextModel, seed: int = 0) -> None:
    """Set both text encoders and leave them so: a direction for every word, and for a sentence the sum of its words'.

    The second one's only layer looks at all words up to the last alike, and hands on what it sees.
    """
    directions = model.word_directions(llama.config.vocab_size, seed)
    llama.embed_tokens.weight.copy_(model.TEXT_DIM**0.5 * directions)
    for p in clip.parameters():
        p.zero_()
    for name, p in clip.named_parameters():
        if "layer_norm" in name and name.endswith("weight"):
            p.fill_(1.0)
        elif name.endswith(("v_proj.weight", "out_proj.weight")):
            p.copy_(torch.eye(len(p)))
        elif name.endswith("token_embedding.weight"):
            p.copy_(QUIET * directions[: len(p)])
    for encoder in (llama, clip):
        encoder.requires_grad_(False)


def build_transformer() -> HunyuanVideoTransformer3DModel:
    """HunyuanVideo's architecture at dim 128: 4 heads of 32, two double and four single blocks."""
    return HunyuanVideoTransformer3DModel(
        in_channels=model.Z_DIM, out_channels=model.Z_DIM, num_attention_heads=4, attention_head_dim=32, num_layers=2,
        num_single_layers=4, num_refiner_layers=1, mlp_ratio=4.0, patch_size=2, patch_size_t=1,
        text_embed_dim=model.TEXT_DIM, pooled_projection_dim=model.TEXT_DIM, rope_axes_dim=(8, 12, 12),
    )  # fmt: skip


def build_pipeline(transformer, text_encoder, text_encoder_2, codec: Codec) -> HunyuanVideoPipeline:
    """Put the parts together."""
    return HunyuanVideoPipeline(
        text_encoder=text_encoder.eval(), tokenizer=build_tokenizer(), transformer=transformer.eval(),
        vae=PatchCodec().set(codec), scheduler=FlowMatchEulerDiscreteScheduler(shift=model.FLOW_SHIFT),
        text_encoder_2=text_encoder_2.eval(), tokenizer_2=model.build_tokenizer(),
    )  # fmt: skip


class HunyuanTrainer(train.Trainer):
    """Flow matching of the same clips for HunyuanVideo's transformer and its two text encoders."""

    gains = (".norm_q.", ".norm_k.")

    def _build(self, seed: int, layers: int) -> dict[str, torch.nn.Module]:
        torch.manual_seed(seed)
        self.tokenizer = model.build_tokenizer()  # the same ids, without the template
        self.transformer = build_transformer()
        self.text_encoder, self.text_encoder_2 = build_text_encoders(len(build_tokenizer()))
        spell_words(self.text_encoder, self.text_encoder_2, seed)
        return {
            "transformer": self.transformer, "text_encoder": self.text_encoder, "text_encoder_2": self.text_encoder_2,
        }  # fmt: skip

    def velocity(self, noisy, sigma, captions, rng, dropout):
        """What the transformer predicts; text slots beyond the captions are masked, so training can do without them."""
        tokens = self._tokens(captions, rng, dropout)
        low, high = GUIDANCE
        guidance = 1000 * (low + (high - low) * torch.rand(len(noisy), generator=rng))
        return self.transformer(
            noisy,
            1000 * sigma,
            encoder_hidden_states=self.text_encoder.embed_tokens(tokens.input_ids),
            encoder_attention_mask=tokens.attention_mask,
            pooled_projections=self.text_encoder_2(tokens.input_ids).pooler_output,
            guidance=guidance,
            return_dict=False,
        )[0]

    def pipeline(self) -> HunyuanVideoPipeline:
        """The pipeline of the present weights."""
        return build_pipeline(self.transformer, self.text_encoder, self.text_encoder_2, self.codec)


def main(argv: list[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/hunyuan"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    trainer = HunyuanTrainer(HUNYUAN_PLAN)
    if args.compile:
        trainer.compile()
    train.run(trainer, args.out)


if __name__ == "__main__":
    main()
