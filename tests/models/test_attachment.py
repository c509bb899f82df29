"""HEART beside everything else that people do to a transformer: before and after, all layers seen, equal outputs.

Also what a user may do while HEART is on: swap processors or backends, copy, save, fail, interrupt, disable.
"""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import stand_ins
import tiny_models as tiny
import torch
from diffusers import (
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    PyramidAttentionBroadcastConfig,
    WanTransformer3DModel,
    hooks,
)
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

import heart_attention as heart
from heart_attention import HeartError
from heart_attention.models.attachment import attach, attach_pipeline, attachment_of

CPU = torch.device("cpu")
STEPS = 6


@pytest.fixture(autouse=True)
def active_backend():
    """`set_attention_backend` changes a process-wide default: put it back."""
    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry._active_backend = before


def generate(model, inputs=tiny.wan_inputs, names=("cond", "uncond")):
    """A denoising loop as WanPipeline has it; the outputs of all forwards."""
    outputs = []
    for step in range(STEPS):
        for name in names:
            with tiny.context(model, name, step):
                outputs.append(tiny.run(model, inputs(900.0 - 100 * step, seed=step)))
    model._reset_stateful_cache()
    return torch.stack(outputs)


# -- other people's hooks, weights and caches ------------------------------------------------------------
def peft(model):
    """The library itself; `stand_ins.lora` does the same to a model."""
    config = pytest.importorskip("peft").LoraConfig
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.add_adapter(config(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False))


def quanto(model):
    """The library itself; `stand_ins.int8` does the same to a model."""
    library = pytest.importorskip("optimum.quanto")
    library.quantize(model, weights=library.qint8)
    library.freeze(model)


def offload(model, **how):
    try:
        apply_group_offloading(model, CPU, CPU, **how)
    except AttributeError as error:
        if (
            "'NoneType' object has no attribute 'type'" in str(error)
            and torch.accelerator.current_accelerator() is None
        ):
            pytest.skip("this diffusers cannot offload groups where there is no accelerator")
        raise


def group_offload(model):
    offload(model, offload_type="block_level", num_blocks_per_group=1)


def leaf_offload(model):
    offload(model, offload_type="leaf_level")


def sequential_offload(model):
    from accelerate import cpu_offload

    cpu_offload(model, CPU)


def model_offload(model):
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(model, CPU)


def newer(name):
    """A cache that the oldest diffusers we promise does not have."""
    return getattr(hooks, name, None) or pytest.skip(f"this diffusers has no {name}")


def taylorseer(model):
    model.enable_cache(newer("TaylorSeerCacheConfig")(cache_interval=2, disable_cache_before_step=2))


def mag_cache(model):
    model.enable_cache(
        newer("MagCacheConfig")(mag_ratios=[1.0] * STEPS, num_inference_steps=STEPS, retention_ratio=0.4)
    )


def cache(config):
    return lambda model: model.enable_cache(config)


COMPOSED = {
    "lora": stand_ins.lora,
    "peft": peft,
    "fused qkv": lambda model: model.fuse_qkv_projections(),
    "int8": stand_ins.int8,
    "quanto": quanto,
    "group offload": group_offload,
    "leaf offload": leaf_offload,
    "sequential offload": sequential_offload,
    "model offload": model_offload,
    "layerwise casting": lambda model: model.enable_layerwise_casting(torch.bfloat16, torch.float32),
    "attention backend": lambda model: model.set_attention_backend("_native_math"),
    "first block cache": cache(FirstBlockCacheConfig(threshold=0.3)),
    "taylorseer": taylorseer,
    "magcache": mag_cache,
    "pab": cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(100, 800),
            current_timestep_callback=lambda: 500,
        )
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composes_before_and_after(name):
    compose = COMPOSED[name]
    compose(plain := tiny.wan())
    expected = generate(plain)
    compose(before := tiny.wan())
    attach(before, seen_before := tiny.Seen())
    attach(after := tiny.wan(), seen_after := tiny.Seen())
    compose(after)
    for model, seen in ((before, seen_before), (after, seen_after)):
        assert torch.equal(generate(model), expected)
        assert {call.layer for call, _ in seen.calls} == {0, 1}
        assert [call.step for call in seen.forwards] == [step for step in range(STEPS) for _ in range(2)]
        assert {call.branch for call in seen.forwards} == {"cond", "uncond"}
        assert seen.passed == [] and seen.resets == 1
        assert torch.equal(generate(model), expected)  # and once more
        assert seen.forwards[-1].generation == 1


SPARSE = [
    "lora",
    "peft",
    "int8",
    "quanto",
    "group offload",
    "sequential offload",
    "layerwise casting",
    "magcache",
    "fused qkv",
]


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_composes_before_and_after(name):
    config = heart.HeartConfig(
        backbone=heart.XAttention(stride=4, block=8),
        thresholds=0.5,
        reuse=heart.TMR(delta=2.0),
        dense_steps=1,
        force_sparse=True,
    )
    compose = COMPOSED[name]
    compose(plain := tiny.wan())
    compose(before := tiny.wan())
    heart.enable(before, config)
    heart.enable(after := tiny.wan(), config)
    compose(after)
    found = generate(before)
    assert torch.equal(generate(after), found)
    assert not torch.allclose(generate(plain), found, atol=1e-4)


@pytest.mark.parametrize("name", ["first block cache", "group offload", "fused qkv", "sequential offload"])
def test_can_leave_again_in_any_order(name):
    COMPOSED[name](plain := tiny.wan())
    expected = generate(plain)
    model = tiny.wan()
    attachment = attach(model, tiny.Halved())
    COMPOSED[name](model)
    assert not torch.equal(generate(model), expected)
    attachment.detach()
    assert torch.equal(generate(model), expected)


def test_fused_cogvideox_shares_one_processor_among_layers():
    case = tiny.MODELS["cogvideox"]
    model, given = case.build(), case.inputs()
    expected = tiny.run(model, given)
    attachment = attach(model, seen := tiny.Seen())
    model.fuse_qkv_projections()
    assert torch.allclose(tiny.run(model, given), expected, atol=1e-6)
    assert [call.layer for call, _ in seen.calls] == [0, 1] and seen.passed == []
    attachment.detach()
    model.unfuse_qkv_projections()  # brings back processors it remembered from before
    assert torch.equal(tiny.run(model, given), expected) and len(seen.calls) == 2


def cache_dit(model):
    library = pytest.importorskip("cache_dit")
    adapter = library.BlockAdapter(
        transformer=model,
        blocks=model.blocks,
        forward_pattern=library.ForwardPattern.Pattern_2,
        has_separate_cfg=True,
    )
    config = library.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=2, num_inference_steps=STEPS
    )
    library.enable_cache(adapter, cache_config=config)


@pytest.mark.parametrize("compose", [stand_ins.block_cache, cache_dit])
def test_a_cache_that_puts_one_module_in_the_place_of_all_blocks(compose):
    compose(plain := tiny.wan(layers=3))
    expected = generate(plain)
    for first in (True, False):
        model = tiny.wan(layers=3)
        if first:
            compose(model)
        attach(model, seen := tiny.Seen())
        if not first:
            compose(model)
        assert torch.equal(generate(model), expected)
        assert {call.layer for call, _ in seen.calls} == {0, 1, 2}


# -- what a user does meanwhile --------------------------------------------------------------------------
def test_swapping_processors_while_enabled():
    model, given = tiny.wan(), tiny.wan_inputs()
    expected = tiny.run(model, given)
    attachment = attach(model, seen := tiny.Seen())
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    mine = WanAttnProcessor()
    model.set_attn_processor(mine)  # one for all layers, cross-attention too
    assert torch.equal(tiny.run(model, given), expected)
    assert [call.layer for call, _ in seen.calls] == [0, 1]
    assert model.blocks[0].attn2.processor is mine  # cross-attention is not touched
    attachment.detach()
    assert model.blocks[0].attn1.processor is mine


def test_a_processor_heart_cannot_serve_runs_and_is_reported():
    class Zero:
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return torch.zeros_like(hidden_states)

    model = tiny.wan()
    attachment = attach(model, seen := tiny.Seen())
    model.blocks[0].attn1.set_processor(Zero())
    for _ in range(2):
        tiny.run(model, tiny.wan_inputs())
    assert [(call.layer, "cannot serve" in reason) for call, reason in seen.passed] == [(0, True)] * 2
    assert [call.layer for call, _ in seen.calls] == [1, 1]
    attachment.detach()
    assert isinstance(model.blocks[0].attn1.processor, Zero)


def test_changing_attention_backends_while_enabled():
    model, given = tiny.wan(), tiny.wan_inputs()
    attachment = attach(model, tiny.Seen())
    processor = model.blocks[0].attn1.processor
    assert processor._attention_backend == "native"  # diffusers' active one
    model.set_attention_backend("_native_math")
    assert processor._attention_backend == AttentionBackendName._NATIVE_MATH
    used = []
    real = _AttentionBackendRegistry._backends[AttentionBackendName._NATIVE_MATH]
    _AttentionBackendRegistry._backends[AttentionBackendName._NATIVE_MATH] = lambda **kw: used.append(1) or real(**kw)
    try:
        tiny.run(model, given)
    finally:
        _AttentionBackendRegistry._backends[AttentionBackendName._NATIVE_MATH] = real
    assert len(used) == 4  # self- and cross-attention of both layers
    attachment.detach()
    assert model.blocks[0].attn1.processor._attention_backend is AttentionBackendName._NATIVE_MATH
    model.reset_attention_backend()
    assert model.blocks[0].attn1.processor._attention_backend is None


def everything(model):
    """All there is of a model: attributes, hooks, processors, children, by name."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            inner = dict(value) if isinstance(value, dict) else value
            found[name, key] = inner if isinstance(inner, dict) and key != "_modules" else repr(type(inner))
        found[name, "children"] = list(module._modules)
        if hasattr(module, "processor"):
            found[name, "processor"] = (module.processor, type(module.processor), dict(vars(module.processor)))
        if "_diffusers_hook" in vars(module):
            found[name, "registry"] = list(vars(module)["_diffusers_hook"].hooks)
    return found


@pytest.mark.parametrize("name", ["wan", "hunyuan", "cogvideox", "mochi", "cosmos", "ltx"])
def test_nothing_is_left_after_detaching(name):
    case = tiny.MODELS[name]
    model, given = case.build(), case.inputs()
    if hasattr(model, "cache_context"):
        with model.cache_context("cond"):
            expected = tiny.run(model, given)
    expected = tiny.run(model, given)
    before, weights = everything(model), {k: v.data_ptr() for k, v in model.state_dict().items()}
    attachment = attach(model, tiny.Halved())
    tiny.run(model, given)
    assert everything(model) != before
    attachment.detach()
    attachment.detach()  # twice does nothing
    assert everything(model) == before
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == weights
    assert torch.equal(tiny.run(model, given), expected)
    assert attachment_of(model) is None


def test_nothing_keeps_model_or_handler_alive():
    model, handler = tiny.wan(), tiny.Seen()
    attach(model, handler)
    generate(model)
    refs = [weakref.ref(model), weakref.ref(handler)]
    del model, handler
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_enabling_twice_is_refused_with_advice():
    model = tiny.wan()
    attach(model, tiny.Seen())
    with pytest.raises(HeartError, match=r"already enabled .*disable"):
        attach(model, tiny.Seen())


def test_a_deep_copy_is_a_plain_model():
    model, given = tiny.wan(), tiny.wan_inputs()
    expected = tiny.run(model, given)
    with model.cache_context("cond"):
        pass
    attachment = attach(model, handler := tiny.Halved())
    with model.cache_context("cond"):
        tiny.run(model, given)
    calls = len(handler.calls)
    twin = copy.deepcopy(model)
    assert torch.equal(tiny.run(twin, given), expected) and len(handler.calls) == calls
    assert attachment_of(twin) is None and attachment_of(model) is attachment
    attach(twin, own := tiny.Seen())
    tiny.run(twin, given)
    assert len(own.calls) == 2 and len(handler.calls) == calls
    assert next(twin.parameters()).data_ptr() != next(model.parameters()).data_ptr()


def test_save_pretrained_of_an_enabled_model(tmp_path):
    model, given = tiny.wan(), tiny.wan_inputs()
    keys, expected = list(model.state_dict()), tiny.run(model, given)
    attach(model, tiny.Halved())
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path)
    assert torch.equal(tiny.run(loaded, given), expected)


def test_two_threads_with_two_models():
    cases = [("wan", 0), ("wan", 1), ("cogvideox", 0), ("cogvideox", 1)]
    models = [tiny.MODELS[name].build(seed) for name, seed in cases]
    given = [[tiny.MODELS[name].inputs(900.0 - i) for i in range(8)] for name, _ in cases]
    expected = [[tiny.run(model, x) for x in inputs] for model, inputs in zip(models, given)]
    handlers = [tiny.Seen() for _ in cases]
    for model, handler in zip(models, handlers):
        attach(model, handler)
    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(lambda pair: [tiny.run(pair[0], x) for x in pair[1]], zip(models, given)))
    for one, other, seen in zip(found, expected, handlers):
        assert all(map(torch.equal, one, other))
        assert [call.step for call in seen.forwards] == list(range(8)) and len(seen.calls) == 16


# -- generations that end otherwise ----------------------------------------------------------------------
class Fails(tiny.Seen):
    when = (2, "uncond", 1)

    def attend(self, call, q, k, v, dense):
        if (call.step, call.branch, call.layer) == self.when:
            raise RuntimeError("out of memory")
        return super().attend(call, q, k, v, dense)


def test_a_failed_generation_leaves_nothing_behind():
    model = tiny.wan()
    expected = generate(model)
    attach(model, handler := Fails())
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(model)
    assert handler.resets == 0  # nobody says that it is over
    handler.when = None
    start = len(handler.forwards)
    assert torch.equal(generate(model), expected)
    assert handler.resets == 2 and {call.generation for call in handler.forwards[start:]} == {1}


def test_wan22_experts_share_one_clock():
    class Pipe:
        transformer, transformer_2 = tiny.wan(seed=0), tiny.wan(seed=1)
        scheduler = FlowMatchEulerDiscreteScheduler()

    pipe, handler = Pipe(), tiny.Seen()
    first, second = attach_pipeline(pipe, handler)
    assert first.clock is second.clock
    for _ in range(2):
        for step in range(4):
            model = pipe.transformer if step < 2 else pipe.transformer_2
            for name in ("cond", "uncond"):
                with tiny.context(model, name, step):
                    tiny.run(model, tiny.wan_inputs(900.0 - 100 * step))
        for model in (pipe.transformer, pipe.transformer_2):
            model._reset_stateful_cache()
    places = [(call.generation, call.step, call.transformer) for call in handler.forwards[::2]]
    assert places == [(g, step, step // 2) for g in range(2) for step in range(4)]
    assert handler.resets == 2
    for attachment in (first, second):
        attachment.detach()


def test_two_pipelines_share_a_transformer():
    class Pipe:
        def __init__(self, transformer, shift):
            self.transformer, self.scheduler = transformer, FlowMatchEulerDiscreteScheduler(shift=shift)

        def __call__(self):
            self.scheduler.set_timesteps(3)
            latents = torch.zeros(1, 1, 1, 2, 2)
            for time in self.scheduler.timesteps:
                with self.transformer.cache_context("cond"):
                    tiny.run(self.transformer, tiny.wan_inputs(float(time)))
                latents = self.scheduler.step(torch.ones_like(latents), time, latents, return_dict=False)[0]
            self.transformer._reset_stateful_cache()

    model = tiny.wan()
    one, other = Pipe(model, 1.0), Pipe(model, 5.0)
    attach_pipeline(one, handler := tiny.Seen())
    for pipe in (one, other, one):
        pipe()
    assert [(call.generation, call.step) for call in handler.forwards] == [(g, s) for g in range(3) for s in range(3)]


def test_a_pipeline_that_goes_away_is_not_kept():
    class Pipe:
        def __init__(self):
            self.transformer, self.scheduler = tiny.wan(), FlowMatchEulerDiscreteScheduler()

    pipe = Pipe()
    (attachment,) = attach_pipeline(pipe, tiny.Seen())
    model, ref = pipe.transformer, weakref.ref(pipe)
    del pipe
    assert ref() is None
    tiny.run(model, tiny.wan_inputs())
    attachment.detach()


def test_two_generations_in_turns_on_one_transformer():
    """Attachments that pause and resume between forwards: each generation is as if it had the model alone."""
    model, config = (
        tiny.wan(),
        heart.HeartConfig(heart.XAttention(stride=4, block=8), 0.7, dense_steps=1, force_sparse=True),
    )
    settings = [config, config.replace(thresholds=0.95, reuse=heart.Always())]
    alone = []
    for one in settings:
        with heart.enabled(model, one):
            alone.append((generate(model), heart.stats(model).to_dict()["density"]))
    lanes: list = [[], []]
    attached: list = [None, None]
    for step in range(STEPS):
        for i, one in enumerate(settings):
            if attached[i] is None:
                heart.enable(model, one)
                attached[i] = attachment_of(model)
            else:
                attached[i].resume()
            for name in ("cond", "uncond"):
                with tiny.context(model, name, step):
                    lanes[i].append(tiny.run(model, tiny.wan_inputs(900.0 - 100 * step, seed=step)))
            assert attachment_of(model) is attached[i]
            attached[i].pause()
            assert attachment_of(model) is None
    for i, (outputs, density) in enumerate(alone):
        assert torch.equal(torch.stack(lanes[i]), outputs)
        attached[i].resume()
        assert heart.stats(model)["density"] == density
        heart.disable(model)
