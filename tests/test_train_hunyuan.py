"""The recipe of the embedded HunyuanVideo: a genuine pipeline, its template, its padding, a few steps of training."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/ is not installed

from diffusers import HunyuanVideoPipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tools.train_tiny import data, export, hunyuan, model, plan, train

from heart_attention import HeartError, presets, tiny
from heart_attention.evaluation import pipelines


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
    noisy, guidance = torch.randn(1, model.Z_DIM, 2, 4, 4), torch.tensor([4.5])
    with torch.no_grad():
        text, pooled, mask = pipe.encode_prompt(caption)
        wanted = trainer.transformer(noisy, 1000 * sigma, text, mask, pooled, 1000 * guidance, return_dict=False)[0]
        found = trainer.velocity(noisy, sigma, [caption], guidance)
    assert torch.allclose(found, wanted, atol=1e-4)


def test_guidance_is_learned_as_more_of_what_the_caption_changes(trainer):
    captions, sigma = ["a red circle moves left on a gray background"] * 2, torch.tensor([0.7, 0.5])
    noisy, target = torch.randn(2, model.Z_DIM, 2, 4, 4), torch.randn(2, model.Z_DIM, 2, 4, 4)
    one = torch.ones(2)

    def predict(dropout):
        return trainer.predict(noisy, target, sigma, captions, torch.Generator().manual_seed(3), dropout)

    with torch.no_grad():
        velocity, same = predict(0.0)
        assert torch.equal(same, target) and torch.equal(velocity, trainer.velocity(noisy, sigma, captions, one))
        trainer.plan = tuple(replace(phase, guided=True) for phase in plan.SMOKE_PLAN)
        try:
            _, guided = predict(0.0)
            _, without_a_caption = predict(1.0)
        finally:
            trainer.plan = plan.SMOKE_PLAN
        difference = trainer.velocity(noisy, sigma, captions, one) - trainer.velocity(noisy, sigma, ["", ""], one)
    strengths = ((guided - target) / difference).flatten(1)
    assert torch.allclose(strengths, strengths[:, :1], rtol=1e-2, atol=1e-2)  # one number for each clip
    assert (strengths >= 0).all() and strengths.max() <= hunyuan.STRENGTH * (hunyuan.GUIDANCE[1] - 1) + 1e-2
    assert torch.equal(without_a_caption, target)  # nothing to strengthen


def test_what_is_exported_is_loaded_by_its_name(trainer, tmp_path, monkeypatch):
    train.save(trainer, tmp_path)
    export.export(tmp_path, tmp_path / "weights")
    monkeypatch.setitem(tiny.FOLDERS, "hunyuan", str(tmp_path / "weights"))
    pipe = pipelines.load("tiny-hunyuan", device="cpu")
    assert isinstance(pipe, HunyuanVideoPipeline) and pipelines.name_of(pipe) == "tiny-hunyuan"
    assert presets.identify(pipe.transformer) == "tiny-hunyuan"
    call = {**pipelines.call_arguments("tiny-hunyuan", pipe), "num_frames": 3, "num_inference_steps": 2}
    checkpoint = export.load_run(tmp_path)
    checkpoint.transformer.bfloat16().float()  # as it is stored
    clips = [
        p("a red circle", **{**call, "height": 32, "width": 32}, generator=torch.Generator().manual_seed(1)).frames[0]
        for p in (checkpoint, pipe)
    ]
    assert np.array_equal(*clips)
    control = pipelines.load("tiny-hunyuan-random", device="cpu")
    own = trainer.transformer.state_dict()
    assert {n: p.shape for n, p in control.transformer.state_dict().items()} == {n: p.shape for n, p in own.items()}
    assert pipelines.control_of(pipe) == "tiny-hunyuan-random"


def test_missing_weights_are_said(monkeypatch, tmp_path):
    monkeypatch.setitem(tiny.FOLDERS, "hunyuan", str(tmp_path / "none"))
    with pytest.raises(HeartError, match="'hunyuan' has no weights in this version"):
        tiny.load("hunyuan")


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
