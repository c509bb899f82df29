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
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import normalizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from heart_attention.tiny.patch_codec import PatchCodec

from . import attention, model, train
from .plan import HUNYUAN_PLAN

TEMPLATE_TOKEN = "<template>"  # stands for each token of the prompt template, which the pipeline crops by number
GUIDANCE = (-1.0, 8.0)  # drawn evenly in phases with guidance; what is below 1 counts as 1, which is none
STRENGTH = 0.4  # of a guided step at guidance 2: the pipeline's default of 6 is as strong as 3 is to the Wan model
QUIET = 1e-2  # norm of the second encoder's embeddings: the last word's own counts for little beside what it sees
Codec = dict[str, torch.Tensor]  # of model.fit_codec


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
    """HunyuanVideo's architecture at dim 128: 4 heads of 32, three double and six single blocks."""
    return HunyuanVideoTransformer3DModel(
        in_channels=model.Z_DIM, out_channels=model.Z_DIM, num_attention_heads=4, attention_head_dim=32, num_layers=3,
        num_single_layers=6, num_refiner_layers=1, mlp_ratio=4.0, patch_size=2, patch_size_t=1,
        text_embed_dim=model.TEXT_DIM, pooled_projection_dim=model.TEXT_DIM, rope_axes_dim=(8, 12, 12),
    )  # fmt: skip


def build_parts(seed: int = 0) -> dict[str, torch.nn.Module]:
    """What has weights of its own, by its name in the pipeline, as it is at step 0: a pure function of the seed."""
    torch.manual_seed(seed)
    transformer = build_transformer()
    llama, clip = build_text_encoders(len(build_tokenizer()))
    spell_words(llama, clip, seed)
    return {"transformer": transformer, "text_encoder": llama, "text_encoder_2": clip}


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

    def _build(self, seed: int) -> dict[str, torch.nn.Module]:
        parts = build_parts(seed)
        self.tokenizer = model.build_tokenizer()  # the same ids, without the template
        self.transformer, self.text_encoder, self.text_encoder_2 = parts.values()
        if self.quick:
            attention.quicken(self.transformer)
        return parts

    def predict(self, noisy, target, sigma, captions, rng, dropout):
        """The transformer's velocity at some guidance, and what it ought to be there.

        In phases with guidance that is what a guided step would take: flow matching's target and, as often as guidance
        says, the difference that the caption makes to the model's own velocity.
        """
        captions = [c if torch.rand((), generator=rng) >= dropout else "" for c in captions]
        guidance = torch.ones(len(noisy))
        if self.phase().guided:
            low, high = GUIDANCE
            drawn = (low + (high - low) * torch.rand(len(noisy), generator=rng)).clamp(min=1.0)
            with torch.no_grad():
                difference = self.velocity(noisy, sigma, captions, guidance)
                difference -= self.velocity(noisy, sigma, [""] * len(captions), guidance)
            guidance = drawn
            target = target + (STRENGTH * (guidance - 1)).view(-1, 1, 1, 1, 1) * difference
        return self.velocity(noisy, sigma, captions, guidance), target

    def velocity(self, noisy, sigma, captions: list[str], guidance: torch.Tensor) -> torch.Tensor:
        """Text slots beyond the captions are masked, so training can do without them."""
        tokens = self._tokens(captions)
        return self.transformer(
            noisy,
            1000 * sigma,
            encoder_hidden_states=self.text_encoder.embed_tokens(tokens.input_ids),
            encoder_attention_mask=tokens.attention_mask,
            pooled_projections=self.text_encoder_2(tokens.input_ids).pooler_output,
            guidance=1000 * guidance,
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
    parser.add_argument("--quick", action="store_true", help="bfloat16, see train.py")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    trainer = HunyuanTrainer(HUNYUAN_PLAN, quick=args.quick)
    if args.compile:
        trainer.compile()
    train.run(trainer, args.out)


if __name__ == "__main__":
    main()
