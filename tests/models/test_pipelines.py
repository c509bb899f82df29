"""diffusers' own pipelines of other families: true steps, branches and generations, nothing passed by."""

import diffusers
import pytest
import tiny_models as tiny
import torch

from heart_attention.models.attachment import attach, attach_pipeline

MODELS = tiny.every_model()
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


# ---------------------------------------- pipelines that tell less: no contexts, some without a reset at the end


def allegro():
    scheduler = diffusers.EulerAncestralDiscreteScheduler()
    pipe = diffusers.AllegroPipeline(
        scheduler=scheduler, transformer=MODELS["allegro"].build(attention_head_dim=24, cross_attention_dim=48), **NONE
    )
    return pipe, {"num_frames": 8, "clean_caption": False, "negative_prompt": None, **embeddings(*PROMPT, *MASK)}, ["0"]


def latte():
    pipe = diffusers.LattePipeline(
        scheduler=diffusers.DDIMScheduler(), transformer=MODELS["latte"].build(out_channels=8), **NONE
    )
    return pipe, {"video_length": 2, "clean_caption": False, "negative_prompt": None, **embeddings(*PROMPT)}, ["0"]


def kandinsky5():
    names = ("prompt_embeds_qwen", "negative_prompt_embeds_qwen")
    given = {
        **embeddings(*names),
        "prompt_embeds_clip": tiny.noise(1, 8),
        "negative_prompt_embeds_clip": tiny.noise(1, 8),
    }
    lengths = torch.tensor([0, tiny.TEXT], dtype=torch.int32)
    pipe = diffusers.Kandinsky5T2VPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=MODELS["kandinsky-5"].build(),
        text_encoder_2=None,
        tokenizer_2=None,
        **NONE,
    )
    given |= {"prompt_cu_seqlens": lengths, "negative_prompt_cu_seqlens": lengths}
    return pipe, {"num_frames": 5, **given}, ["0", "1"]


@pytest.mark.parametrize("make", [allegro, latte, kandinsky5])
def test_steps_and_generations_where_pipelines_tell_less(make):
    pipe, given, branches = make()
    pipe.set_progress_bar_config(disable=True)
    attach_pipeline(pipe, seen := tiny.Seen())
    for _ in range(2):
        pipe(**given, **SIZE)
    places = [(call.generation, call.step, call.branch) for call in seen.forwards]
    assert places == [(g, step, branch) for g in range(2) for step in range(STEPS) for branch in branches]
    assert seen.passed == [] and seen.resets in (1, 2)
    assert {call.layer for call, _ in seen.calls} == {0, 1}


def test_minimax_h3_denoises_upwards_beside_clean_conditions():
    """Its modular pipeline gives the distinct timesteps of all rows; conditions are clean (1) at every step."""
    case = tiny.every_model()["minimax-h3"]
    attach(model := case.build(), seen := tiny.Seen())
    for _ in range(2):
        for step in range(STEPS):
            for _ in range(2):  # guidance
                given = case.inputs(seed=step)
                given["timestep"] = torch.tensor([step / STEPS, 1.0])
                tiny.run(model, given)
    places = [(call.generation, call.step, call.branch) for call in seen.forwards]
    assert places == [(g, step, b) for g in range(2) for step in range(STEPS) for b in ("0", "1")]
    assert seen.passed == []
