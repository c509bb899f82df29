"""Few steps as users run them: without guidance, guidance-distilled, two experts with two steps each."""

import diffusers
import models_for_tests
import pytest
import tiny_models
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline

import heart_attention as heart
from heart_attention.online.warmup import FIRST

NONE = {"vae": None, "text_encoder": None, "tokenizer": None}
SIZE = {"height": 64, "width": 64, "num_frames": 5, "output_type": "latent"}
X = heart.XAttention(stride=4, block=8)


def config(**changes):
    return heart.HeartConfig(X, 0.5, heart.TMR(relative=0.5), force_sparse=True, **changes)


def wan(experts=1):
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    models = [models_for_tests.wan_transformer(layers=2, seed=seed) for seed in range(experts)]
    more = {"transformer_2": models[1], "boundary_ratio": 0.8} if experts == 2 else {}
    pipe = WanPipeline(scheduler=scheduler, transformer=models[0], **NONE, **more)
    pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial = 4, 8
    pipe.set_progress_bar_config(disable=True)
    return pipe, {"prompt_embeds": tiny_models.noise(1, 6, models[0].config.text_dim), "guidance_scale": 1.0}


def hunyuan():
    pipe = diffusers.HunyuanVideoPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        transformer=tiny_models.MODELS["hunyuan"].build(guidance_embeds=True),
        text_encoder_2=None,
        tokenizer_2=None,
        **NONE,
    )
    pipe.set_progress_bar_config(disable=True)
    given = {
        "prompt_embeds": tiny_models.noise(1, tiny_models.TEXT, 8),
        "pooled_prompt_embeds": tiny_models.noise(1, 8),
        "prompt_attention_mask": torch.ones(1, tiny_models.TEXT).bool(),
    }
    return pipe, {**given, "guidance_scale": 6.0}


def generate(pipe, given, steps):
    return pipe(**given, **SIZE, num_inference_steps=steps, generator=torch.Generator().manual_seed(0)).frames


@pytest.mark.parametrize("make", [wan, hunyuan])
@pytest.mark.parametrize("steps", [4, 8])
def test_one_branch_and_one_dense_step(make, steps):
    pipe, given = make()
    plain = generate(pipe, given, steps)
    with heart.enabled(pipe, config()):
        sparse = generate(pipe, given, steps)
        stats = heart.stats(pipe)
    assert stats["dense_steps"] == {"asked": "auto", "first": 1, "last": 0, "steps": steps}
    assert stats["dense_reasons"] == {FIRST: 2} and stats["calls"] == 2 * steps  # two layers, one branch
    assert len(stats["records"]) == 1 and not torch.equal(plain, sparse)
    assert torch.equal(generate(pipe, given, steps), plain)


@pytest.mark.parametrize("make", [wan, hunyuan])
def test_thresholds_of_one_give_the_dense_video(make):
    pipe, given = make()
    plain = generate(pipe, given, 4)
    with heart.enabled(pipe, config(dense_last_steps=1).replace(thresholds=1.0)):
        assert torch.equal(generate(pipe, given, 4), plain)


def test_two_experts_with_two_steps_each():
    pipe, given = wan(experts=2)
    with heart.enabled(pipe, config(dense_last_steps=1)):
        generate(pipe, given, 4)
        stats = heart.stats(pipe)
    served = {record["transformer"]: record for record in stats["records"]}
    assert served[0]["steps"] == [0, 1] and served[1]["steps"] == [2, 3]
    assert served[0]["dense"] == [[True, False]] * 2 and served[1]["dense"] == [[False, True]] * 2
    assert stats["generations"] == 1 and not stats["fallbacks"]
    first_sparse = [row[0] for row in served[1]["refreshed"]]
    assert all(value == 1.0 for row in first_sparse for value in row)  # the second expert has masks of its own


def test_exact_masses_of_the_dense_step_serve_the_first_sparse_one():
    pipe, given = wan()
    made = heart.HeartConfig(heart.ExactMass(block=8), 0.5, heart.TMR(relative=0.5), force_sparse=True)
    with heart.enabled(pipe, made):
        generate(pipe, given, 4)
        stats = heart.stats(pipe)
    assert stats["dense_steps"]["first"] == 1 and 0 < stats["density"] < 1 and not stats["fallbacks"]


def test_clusters_serve_four_steps():
    pipe, given = wan()
    made = heart.HeartConfig(
        heart.SVG2(q_clusters=4, k_clusters=8, rank="error"),
        0.3,
        heart.TMR(relative=0.5),
        rest="mean",
        force_sparse=True,
    )
    with heart.enabled(pipe, made):
        generate(pipe, given, 4)
        stats = heart.stats(pipe)
    assert stats["dense_reasons"] == {FIRST: 2} and not stats["fallbacks"]
