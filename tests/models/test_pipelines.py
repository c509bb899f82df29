"""diffusers' own pipelines of other families: true steps, branches and generations, nothing passed by."""

import diffusers
import pytest
import tiny_models as tiny
import torch

from heart_attention.models.attachment import attach_pipeline

STEPS = 3
SIZE = {"num_inference_steps": STEPS, "height": 64, "width": 64, "output_type": "latent"}
NONE = {"vae": None, "text_encoder": None, "tokenizer": None}  # prompts come as embeddings, latents stay latents


def embeddings(*names):
    given = {}
    for name in names:
        shape = (1, 8) if "pooled" in name else (1, tiny.TEXT, 8)
        given[name] = torch.ones(1, tiny.TEXT).bool() if name.endswith("mask") else tiny.noise(*shape)
    return given


PROMPT, MASK = ("prompt_embeds", "negative_prompt_embeds"), ("prompt_attention_mask", "negative_prompt_attention_mask")


def mochi():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)  # its timesteps grow
    model = tiny.MODELS["mochi"].build(in_channels=12, out_channels=12)
    pipe = diffusers.MochiPipeline(scheduler=scheduler, transformer=model, **NONE)
    return pipe, {"num_frames": 7, **embeddings(*PROMPT, *MASK)}, "cond_uncond"


def hunyuan():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    more = {"text_encoder_2": None, "tokenizer_2": None}
    pipe = diffusers.HunyuanVideoPipeline(
        scheduler=scheduler, transformer=tiny.MODELS["hunyuan"].build(), **NONE, **more
    )
    given = embeddings("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")
    return pipe, {"num_frames": 5, **given}, "cond"


def ltx():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.LTXPipeline(scheduler=scheduler, transformer=tiny.MODELS["ltx"].build(), **NONE)
    return pipe, {"num_frames": 9, **embeddings(*PROMPT, *MASK)}, "cond_uncond"


def cogvideox():
    scheduler = diffusers.CogVideoXDDIMScheduler()  # keeps no step counter
    pipe = diffusers.CogVideoXPipeline(scheduler=scheduler, transformer=tiny.MODELS["cogvideox"].build(), **NONE)
    return pipe, {"num_frames": 5, **embeddings(*PROMPT)}, "cond_uncond"


@pytest.mark.parametrize("make", [mochi, hunyuan, ltx, cogvideox])
def test_steps_branches_and_generations(make):
    pipe, given, branch = make()
    pipe.set_progress_bar_config(disable=True)
    attach_pipeline(pipe, seen := tiny.Seen())
    for _ in range(2):
        pipe(**given, **SIZE)
    places = [(call.generation, call.step, call.branch) for call in seen.forwards]
    assert places == [(g, step, branch) for g in range(2) for step in range(STEPS)]
    assert seen.passed == [] and seen.resets == 2
    assert {call.layer for call, _ in seen.calls} == {0, 1}
