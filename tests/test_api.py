"""enable, enabled, disable, stats and attention, on small pipelines with random weights."""

import copy
import json
import logging
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

import heart_attention as heart
from heart_attention.errors import HeartError
from heart_attention.models import attachment
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine
from heart_attention.online.thresholds import ThresholdSource

HEADS, LAYERS = 3, 2
X = heart.XAttention(stride=2, block=8)


def transformer(seed=0, layers=LAYERS, heads=HEADS):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=8,
            ffn_dim=16, num_layers=layers, rope_max_seq_len=32,
        ).eval()  # fmt: skip


def pipeline(model=None, second=None, scheduler=None):
    scheduler = scheduler or UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipe = WanPipeline(
        None, None, None, scheduler, model or transformer(), second, boundary_ratio=0.5 if second else None
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe, seed=0, prompts=1, steps=6, guidance=3.0, size=64, frames=5, **kw):
    g = [torch.Generator().manual_seed(seed + i) for i in range(prompts)]
    text = torch.cat([torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(seed + i)) for i in range(prompts)])
    return pipe(
        prompt_embeds=text, negative_prompt_embeds=torch.zeros_like(text), height=size, width=size, num_frames=frames,
        num_inference_steps=steps, guidance_scale=guidance, generator=g, output_type="latent", **kw,
    ).frames  # fmt: skip


def config(**kw):
    kw = {"backbone": X, "thresholds": 0.5, "reuse": heart.TMR(delta=0.3), "dense_steps": 2, "force_sparse": True, **kw}
    return heart.HeartConfig(**kw)


def snapshot(model):
    """Everything on the modules of a model that HEART could leave something in."""
    return [
        (name, sorted(m.__dict__), type(getattr(m, "processor", None)), sorted(m._modules), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    ]


# ---------------------------------------------------------------- on and off


def test_enable_changes_the_output_disable_restores_it_bit_for_bit_and_leaves_nothing():
    pipe = pipeline()
    before, state = generate(pipe), snapshot(pipe.transformer)
    heart.enable(pipe, config())
    sparse = generate(pipe)
    assert not torch.equal(sparse, before)
    heart.disable(pipe)
    assert torch.equal(generate(pipe), before)
    assert snapshot(pipe.transformer) == state


def test_enabled_as_a_context_also_after_an_error():
    pipe = pipeline()
    before = generate(pipe)
    with pytest.raises(RuntimeError, match="mine"), heart.enabled(pipe, config()) as same:
        assert same is pipe
        raise RuntimeError("mine")
    assert torch.equal(generate(pipe), before)
    with heart.enabled(pipe, config()):
        heart.disable(pipe)  # by hand inside: no complaint at the end


@torch.no_grad()
def test_a_bare_transformer():
    model = transformer()
    given = dict(  # noqa: C408
        hidden_states=torch.randn(1, 4, 3, 8, 8), timestep=torch.tensor([500.0]),
        encoder_hidden_states=torch.randn(1, 6, 8), return_dict=False,
    )  # fmt: skip
    before = model(**given)[0]
    heart.enable(model, config(dense_steps=0))
    assert not torch.equal(model(**given)[0], before)
    assert heart.stats(model)["calls"] == LAYERS
    heart.disable(model)
    assert torch.equal(model(**given)[0], before)


def test_every_way_to_say_what(tmp_path):
    pipe = pipeline()
    config().save(tmp_path / "c.json")
    for form in ("xattention", "svg2", config(), config().to_dict(), str(tmp_path / "c.json"), tmp_path / "c.json"):
        with heart.enabled(pipe, form):
            generate(pipe, steps=1)
            assert heart.stats(pipe)["calls"] == 2 * LAYERS
    with heart.enabled(pipe, "xattention", thresholds=0.3, dense_steps=0):
        made = heart.stats(pipe)["config"]["_data"]
        assert (made["thresholds"], made["dense_steps"]) == (0.3, 0)


def test_an_unknown_model_is_noted_in_stats(caplog):
    pipe = pipeline()
    with caplog.at_level(logging.WARNING), heart.enabled(pipe):
        assert "no preset of xattention knows this WanTransformer3DModel" in str(heart.stats(pipe))
    assert "no preset of xattention knows" in caplog.text


# ---------------------------------------------------------------- identity limits


def test_thresholds_of_one_are_bit_identical_to_dense():
    pipe = pipeline()
    before = generate(pipe)
    for backbone in ("xattention", "svg2"):
        with heart.enabled(pipe, config(backbone=backbone, thresholds=1.0, dense_steps=0)):
            assert torch.equal(generate(pipe), before)
            assert heart.stats(pipe)["dense_reasons"] == {"every threshold is 1": 6 * 2 * LAYERS}


def test_heads_with_threshold_one_beside_an_almost_full_one_equal_dense():
    pipe = pipeline()
    before = generate(pipe)
    with heart.enabled(pipe, config(thresholds=[1.0, 1.0, 0.9999999], dense_steps=0)):
        torch.testing.assert_close(generate(pipe), before, rtol=0, atol=1e-5)
        assert heart.stats(pipe)["dense_calls"] == 0


def test_always_is_no_reuse_and_infinite_delta_never_refreshes_again():
    pipe = pipeline()
    outs = {}
    for name, policy in (
        ("always", heart.Always()),
        ("negative", heart.TMR(delta=-1)),
        ("inf", heart.TMR(delta=math.inf)),
    ):
        with heart.enabled(pipe, config(reuse=policy)):
            outs[name] = generate(pipe)
            for record in heart.stats(pipe)["records"]:
                rows = [[row[0] for row in layer] for layer in record["refreshed"]]
                assert rows == [[0, 0, 1, 0, 0, 0] if name == "inf" else [0, 0, 1, 1, 1, 1]] * LAYERS
    assert torch.equal(outs["always"], outs["negative"])
    assert not torch.equal(outs["always"], outs["inf"])


def test_force_sparse_false_on_a_tiny_video_is_dense_and_says_why():
    pipe = pipeline()
    before = generate(pipe, size=32)
    with heart.enabled(pipe, config(force_sparse=False)):
        assert torch.equal(generate(pipe, size=32), before)
        assert any(reason.startswith("not worth it") for reason in heart.stats(pipe)["dense_reasons"])


# ---------------------------------------------------------------- generations


@pytest.mark.parametrize("backbone", [X, heart.SVG2(q_clusters=4, k_clusters=8)], ids=["xattention", "svg2"])
def test_two_generations_in_a_row_are_equal(backbone):
    pipe = pipeline()
    with heart.enabled(pipe, config(backbone=backbone)):
        first = generate(pipe)
        assert torch.equal(generate(pipe), first)
        stats = heart.stats(pipe).to_dict()
    assert stats["generations"] == 2
    assert json.loads(json.dumps(stats, allow_nan=False)) == stats


@pytest.mark.parametrize("scheduler", [None, FlowMatchEulerDiscreteScheduler(shift=3.0)], ids=["unipc", "euler"])
def test_warm_up_counts_true_steps(scheduler):
    pipe = pipeline(scheduler=scheduler)
    with heart.enabled(pipe, config(dense_steps=2)):
        generate(pipe, steps=5)
        for record in heart.stats(pipe)["records"]:
            assert record["steps"] == [0, 1, 2, 3, 4]
            assert record["dense"] == [[True, True, False, False, False]] * LAYERS


def test_an_interrupted_or_failed_generation_leaves_nothing_behind():
    pipe = pipeline()

    def fail(pipe, step, timestep, kwargs):
        if step == 3:
            raise RuntimeError("stop")
        return kwargs

    def interrupt(pipe, step, timestep, kwargs):
        pipe._interrupt = step == 3
        return kwargs

    with heart.enabled(pipe, config()):
        clean = generate(pipe)
        with pytest.raises(RuntimeError, match="stop"):
            generate(pipe, seed=5, callback_on_step_end=fail)
        assert torch.equal(generate(pipe), clean)
        generate(pipe, seed=5, callback_on_step_end=interrupt)
        assert torch.equal(generate(pipe), clean)


@pytest.mark.parametrize("guidance", [3.0, 1.0], ids=["guided", "unguided"])
def test_a_batch_of_two_prompts_is_two_single_runs(guidance):
    """Random weights make chaos of rounding: compare decisions, and outputs as closely as dense ones agree."""
    pipe = pipeline()
    with heart.enabled(pipe, config()):
        both = generate(pipe, prompts=2, guidance=guidance)
        records = heart.stats(pipe)["records"]
        assert [r["branch"] for r in records] == (["cond", "uncond"] if guidance > 1 else ["cond"])
        singles = torch.cat([generate(pipe, seed=i, guidance=guidance) for i in range(2)])
    torch.testing.assert_close(both, singles, rtol=0, atol=1e-4)


def test_batched_guidance_equals_separate_guidance():
    """Both branches as one batch of two, as some pipelines do it: state is per batch item."""
    model = transformer()
    text = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    steps = [(t, torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(t))) for t in (900, 700, 400, 100)]

    def call(x, t, text):
        return model(x, torch.full((len(x),), float(t)), text, return_dict=False)[0]

    with heart.enabled(model, config(dense_steps=1)), torch.no_grad():
        batched = [call(x, t, text) for t, x in steps]
    with heart.enabled(model, config(dense_steps=1)), torch.no_grad():
        separate = [torch.cat([call(x[i : i + 1], t, text[i : i + 1]) for i in range(2)]) for t, x in steps]
        assert len(heart.stats(model)["records"]) == 2
    for a, b in zip(batched, separate):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_size_and_dtype_may_change_between_calls():
    pipe = pipeline()
    with heart.enabled(pipe, config()):
        first = generate(pipe)
        assert generate(pipe, size=48).shape[-1] == 6
        assert torch.equal(generate(pipe), first)
        pipe.transformer.to(torch.bfloat16)
        assert torch.isfinite(generate(pipe, size=32, steps=3).float()).all()


def test_wan22_two_transformers_share_one_engine():
    pipe = pipeline(transformer(0), transformer(1))
    before = generate(pipe)
    with heart.enabled(pipe, config(dense_steps=0)):
        out = generate(pipe)
        records = heart.stats(pipe)["records"]
        assert {r["transformer"] for r in records} == {0, 1}
        for r in records:  # each expert begins with fresh masks at its first own step
            assert all(row[0] == [1.0] * HEADS for row in r["refreshed"])
        assert not torch.equal(out, before)
    assert torch.equal(generate(pipe), before)


def test_two_pipelines_sharing_a_transformer():
    one = pipeline()
    two = pipeline(one.transformer)
    heart.enable(one, config())
    a = generate(one)
    assert torch.equal(generate(two), a)
    with pytest.raises(HeartError, match="already enabled"):
        heart.enable(two, config())
    heart.disable(two)
    with pytest.raises(HeartError, match="not enabled"):
        heart.disable(one)


def test_two_threads_with_two_models():
    pipes = [pipeline(transformer(i)) for i in range(2)]
    for pipe in pipes:
        heart.enable(pipe, config())
    alone = [generate(pipe) for pipe in pipes]
    got = [None, None]

    def work(i):
        got[i] = generate(pipes[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, got))


def test_a_copy_of_an_enabled_model_is_plain_and_saving_works(tmp_path):
    pipe = pipeline()
    before = generate(pipe)
    heart.enable(pipe, config())
    plain = pipeline(copy.deepcopy(pipe.transformer))
    assert torch.equal(generate(plain), before)
    heart.enable(plain, config())
    pipe.transformer.save_pretrained(tmp_path)
    loaded = pipeline(WanTransformer3DModel.from_pretrained(tmp_path))
    assert torch.equal(generate(loaded), before)


def test_memory_after_many_generations_is_that_after_two():
    import gc

    pipe = pipeline()

    def held():
        gc.collect()
        return sum(o.nbytes for o in gc.get_objects() if isinstance(o, torch.Tensor)), len(gc.get_objects())

    with heart.enabled(pipe, config()):
        for i in range(12):
            generate(pipe, steps=3, size=32)
            if i == 1:
                before = held()
        after = held()
    assert abs(after[0] - before[0]) < 2**20 / 50
    assert after[1] - before[1] < 500


# ---------------------------------------------------------------- wrong use: one sentence each


def refuses(match, function, *args, **kwargs):
    with pytest.raises(HeartError, match=match) as error:
        function(*args, **kwargs)
    assert "\n" not in str(error.value)


def test_enabling_twice_advises():
    pipe = pipeline()
    heart.enable(pipe, config())
    refuses("already enabled on this WanPipeline: call heart.disable", heart.enable, pipe, config())
    refuses("already enabled", heart.enable, pipe.transformer)


def test_disable_and_stats_without_enable():
    pipe = pipeline()
    refuses("not enabled on this WanPipeline", heart.disable, pipe)
    refuses("call heart.enable", heart.stats, pipe)


def test_wrong_configs_touch_nothing():
    pipe = pipeline()
    state = snapshot(pipe.transformer)
    refuses("is for hunyuanvideo-13b", heart.enable, pipe, "hunyuanvideo-13b-svg2")
    refuses("no preset 'fast'", heart.enable, pipe, "fast")
    refuses("config is '3'", heart.enable, pipe, 3)
    refuses("no file", heart.enable, pipe, "missing.json")
    refuses(r"shape \[4\] but the model has 2 layers of 3 heads", heart.enable, pipe, config(thresholds=[0.5] * 4))
    refuses(r"shape \[3 x 3\]", heart.enable, pipe, config(thresholds=[[0.5] * 3] * 3))
    refuses("3 per-layer bounds", heart.enable, pipe, config(reuse=heart.TMR(delta=[1.0] * 3)))
    refuses("no kernel 'abacus'", heart.enable, pipe, config(kernel="abacus"))
    assert snapshot(pipe.transformer) == state


@pytest.mark.parametrize("changes, sentence", [
    ({"thresholds": 90}, "thresholds is 90: 1 or more means dense attention"),
    ({"reuse": heart.TMR(delta=-1)}, "TMR's delta is -1: below 0 no mask is ever reused"),
    ({"reuse": heart.TMR(relative=math.inf)}, "TMR's relative is inf: masks of the first sparse step are never"),
])  # fmt: skip
def test_values_that_mean_something_else_are_said_aloud(changes, sentence, caplog):
    model = transformer()
    with heart.enabled(model, config(**changes)):
        assert sentence in caplog.text and sentence in str(heart.stats(model))
    caplog.clear()
    with heart.enabled(model, config()):
        assert not caplog.text


def test_calibrating_what_is_no_pipeline():
    refuses("NoneType has no transformer", heart.calibrate, None)


def test_a_calibration_with_another_fingerprint_is_refused():
    class Calibrated(ThresholdSource):
        thresholds = [[0.5] * HEADS] * LAYERS

        def check(self, model):
            raise HeartError("the calibration is for another model: calibrate this one, or load with force=True")

    pipe = pipeline()
    refuses("for another model", heart.enable, pipe, config(thresholds=Calibrated()))
    assert attachment.attachment_of(pipe.transformer) is None


def test_image_models_and_strangers():
    flux = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=1, in_channels=4,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    refuses("FluxTransformer2DModel is not a video transformer", heart.enable, flux)
    refuses("Linear is not a video transformer", heart.enable, torch.nn.Linear(2, 2))
    refuses("has no transformer", heart.enable, type("UNetPipeline", (), {"scheduler": None, "unet": 1})())
    empty = transformer()
    empty.blocks = torch.nn.ModuleList()
    refuses("no attention layer that HEART knows", heart.enable, empty, config())


# ---------------------------------------------------------------- the plain-function door


def test_attention_serves_another_engine_step_by_step():
    state = Engine(config(reuse=heart.TMR(delta=math.inf)), LAYERS, HEADS)
    q, k, v = torch.randn(3, 1, HEADS, 64, 12)
    dense = F.scaled_dot_product_attention(q, k, v)
    for _ in range(2):  # two generations: the second begins when the step falls back
        for step in range(4):
            for layer in range(LAYERS):
                for branch in ("cond", "uncond"):
                    out = heart.attention(q, k, v, (layer, step, branch), state)
                    assert torch.equal(out, dense) == (step < 2)
    stats = heart.stats(state)
    assert stats["generations"] == 2
    assert [row[0] for row in stats["records"][0]["refreshed"][0]] == [0, 0, 1, 0]


def test_attention_takes_dicts_wheres_and_another_dense():
    state = Engine(config(order="tiles"), LAYERS, HEADS)
    q, k, v = torch.randn(3, 1, HEADS, 64, 12)
    a = heart.attention(q, k, v, {"layer": 0, "step": 5, "branch": "c", "grid": (4, 4, 4)}, state)
    state.reset()
    b = heart.attention(q, k, v, CallContext(layer=0, step=5, branch="c", grid=(4, 4, 4)), state)
    assert torch.equal(a, b)
    assert heart.attention(q, k, v, (0, 0, "x"), state, dense=lambda q, k, v: v) is v


def test_attention_refuses_nonsense():
    state = Engine(config(), LAYERS, HEADS)
    q = torch.randn(1, HEADS, 16, 12)
    refuses("the call is", heart.attention, q, q, q, (0, 1), state)
    refuses("the call is", heart.attention, q, q, q, {"level": 1}, state)
    refuses("layer 7", heart.attention, q, q, q, (7, 0, "c"), state)
    refuses("state is NoneType", heart.attention, q, q, q, (0, 0, "c"), None)
    refuses("q has shape", heart.attention, torch.randn(1, 9, 16, 12), q, q, (0, 0, "c"), state)


def test_recording_an_enabled_pipeline_sees_every_call_and_changes_nothing():
    pipe = pipeline()
    with heart.enabled(pipe, config()):
        before = generate(pipe)
        with heart.record(pipe) as r:
            assert torch.equal(generate(pipe), before)
            assert heart.stats(pipe)["generations"] == 2
        assert len(r) == 6 * 2 * LAYERS  # warm-up steps too
        assert torch.equal(generate(pipe), before)


def test_heart_by_name_takes_what_ships_or_says_what_to_run(tiny_pipe, tmp_path, monkeypatch):
    from calibrations_for_tests import points_calibration

    from heart_attention import presets
    from heart_attention.api import resolve

    with pytest.raises(
        HeartError, match="no calibration of operating points ships for this WanTransformer3DModel: make one"
    ):
        heart.enable(pipeline(), "heart")
    path = points_calibration(tmp_path / "heart.heart.json")
    monkeypatch.setattr(presets, "shipped_heart", lambda model: path)
    own, other, given = (resolve(name, tiny_pipe)[0] for name in ("heart", "heart@0.3", f"{path}@0.3"))
    assert own.points is not None and other.points == given.points != own.points
    assert resolve("xattention@0.8", tiny_pipe)[0].thresholds == 0.8
    assert resolve(f"{path}@sparsity=0.6", tiny_pipe)[0].thresholds.sparsity >= 0.6 - 1e-9
