"""The recipe of the embedded HunyuanVideo: a genuine pipeline, its template, its padding, a few steps of training."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/ is not installed

from diffusers import HunyuanVideoPipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tools.train_tiny import data, hunyuan, model, plan


@pytest.fixture(scope="module")
def trainer():
    torch.set_num_threads(1)
    return hunyuan.HunyuanTrainer(plan.SMOKE_PLAN)


def test_the_template_is_cropped_to_the_prompts_words():
    prompt = "a red circle moves left on a gray background"
    template, crop = DEFAULT_PROMPT_TEMPLATE["template"], DEFAULT_PROMPT_TEMPLATE["crop_start"]
    ids = hunyuan.build_tokenizer()(template.format(prompt)).input_ids
    assert ids[crop:] == model.build_tokenizer()(prompt).input_ids


def test_the_pipeline_generates_with_its_defaults(trainer):
    pipe = trainer.pipeline()
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(pipe, HunyuanVideoPipeline)
    frames = pipe("a red circle moves left", height=32, width=32, num_frames=3, num_inference_steps=2, output_type="np")
    assert frames.frames[0].shape == (3, 32, 32, 3)


def test_training_sees_what_the_pipeline_sees(trainer):
    pipe = trainer.pipeline()
    caption, sigma = "a red circle moves left on a gray background", torch.tensor([0.7])
    noisy = torch.randn(1, model.Z_DIM, 2, 4, 4)
    with torch.no_grad():
        text, pooled, mask = pipe.encode_prompt(caption)
        guidance = torch.tensor([1000 * (1 + 7 * torch.rand(1, generator=after_dropout()).item())])
        wanted = trainer.transformer(noisy, 1000 * sigma, text, mask, pooled, guidance, return_dict=False)[0]
        found = trainer.velocity(noisy, sigma, [caption], torch.Generator().manual_seed(3), dropout=0.0)
    assert torch.allclose(found, wanted, atol=1e-4)


def after_dropout() -> torch.Generator:
    """A generator that has drawn for one caption's dropout."""
    rng = torch.Generator().manual_seed(3)
    torch.rand((), generator=rng)
    return rng


def test_the_codec_gives_back_what_it_was_given():
    codec = hunyuan.PatchCodec().set(model.fit_codec())
    video = data.batch(3, 0, 2, 3, (64, 64), data.CALM).video
    with torch.no_grad():
        latents = codec.encode(video)
        back = codec.decode(latents, return_dict=False)[0]
    assert latents.shape == (2, model.Z_DIM, 3, 16, 16)
    assert 10 * torch.log10(4 / (back - video).square().mean()) >= 33


def test_a_few_steps_change_every_trained_part(trainer):
    before = {n: p.detach().clone() for n, p in trainer.named}
    losses = [trainer.train_step()[0] for _ in range(3)]
    assert all(loss == loss for loss in losses)
    changed = {n for n, p in trainer.named if not torch.equal(p, before[n])}
    assert any("single_transformer_blocks" in n for n in changed)
    assert "transformer.proj_out.weight" in changed
    assert all(n.startswith("transformer.") for n in changed)  # words stay as they are spelled


def test_sentences_that_differ_in_a_word_differ_as_much_whatever_the_word(trainer):
    first = "a red circle moves left on a gray background"
    others = [first.replace("circle", "square"), first.replace("circle", "ring"), first.replace("left", "up")]
    ids = trainer.tokenizer([first, *others], padding=True, return_tensors="pt").input_ids
    with torch.no_grad():
        pooled = trainer.text_encoder_2(ids).pooler_output
        words = trainer.text_encoder.embed_tokens(ids).flatten(1)
    for features in (pooled, words):
        off = (features[1:] - features[0]).norm(dim=1)
        assert off.min() > 0.2 * features[0].norm() / ids.shape[1] ** 0.5
        assert off.max() < 1.5 * off.min()
