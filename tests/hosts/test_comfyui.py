"""The ComfyUI node against a stand-in of its call contract: model patcher, wrappers, attention, samplers.

What the stand-in does is what ComfyUI's model code does: `transformer_options` carries `block_type` and `block_index`
(VACE's control blocks keep the main block's), `sigmas`, `sample_sigmas` (the schedule of this sampler alone) and
`cond_or_uncond`; the diffusion model runs inside its wrappers.
"""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import heart_attention as heart
from heart_attention import HeartError
from heart_attention.hosts.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, HeartNode, Host

H, D, GRID, STEPS = 2, 8, (2, 4, 4), 6
VIDEO = 32
CONFIG = heart.HeartConfig(
    heart.XAttention(stride=4, block=8), 0.5, heart.TMR(delta=1e9), dense_steps=2, force_sparse=True
)
SIGMAS = torch.linspace(1, 0, STEPS + 1)


def pytorch(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **kw):
    """ComfyUI's attention: [B, N, H * D] or, with skip_reshape, [B, H, N, D]."""
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@functools.wraps(pytorch)
def attention(*args, **kw):
    """The same, letting an override in, once."""
    override = (kw.get("transformer_options") or {}).get("optimized_attention_override")
    if "_inside_attn_wrapper" not in kw and override is not None:
        return override(attention, *args, **{**kw, "_inside_attn_wrapper": True})
    return pytorch(*args, **kw)


class Network(torch.nn.Module):
    """A diffusion model: blocks of self- and cross-attention; VACE control blocks; text beside the video."""

    patch_size = (1, 2, 2)

    def __init__(self, double=2, single=0, control=0, text=0):
        super().__init__()
        self.num_heads, self.text = H, text
        blocks = lambda n: torch.nn.ModuleList(torch.nn.Linear(H * D, 3 * H * D, bias=False) for _ in range(n))  # noqa: E731
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if single:
                self.double_blocks, self.single_blocks = blocks(double), blocks(single)
            else:
                self.blocks = blocks(double)
            if control:
                self.vace_blocks = blocks(control)
            self.embed = torch.nn.Linear(4, H * D)

    def forward(self, x, timestep, context, transformer_options, **kwargs):
        x = self.embed(x[:, :, :, ::2, ::2].flatten(2).transpose(1, 2))  # [B, N, H * D]
        x = torch.cat([x, context[:, : self.text]], dim=1)
        for kind, name in (("double", "blocks"), ("double", "double_blocks"), ("single", "single_blocks")):
            for i, block in enumerate(getattr(self, name, ())):
                transformer_options["block_type"], transformer_options["block_index"] = kind, i
                x = x + self._attend(block, x, transformer_options)
                attention(x, context, context, H, transformer_options=transformer_options)  # to the text
                if i < len(getattr(self, "vace_blocks", ())):
                    x = x + 0.1 * self._attend(self.vace_blocks[i], x, transformer_options)
        return x

    def _attend(self, block, x, options):
        return attention(*block(x).chunk(3, dim=-1), H, transformer_options=options)


class Patcher:
    """A MODEL: options, wrappers, and parts of the model by name."""

    def __init__(self, network, sigma_max=1.0):
        self.network, self.sigma_max = network, sigma_max
        self.model_options, self.wrappers = {"transformer_options": {}}, []

    def clone(self):
        new = Patcher(self.network, self.sigma_max)
        new.model_options, new.wrappers = copy.copy(self.model_options), list(self.wrappers)
        new.model_options["transformer_options"] = dict(self.model_options["transformer_options"])
        return new

    def get_model_object(self, name):
        return {"diffusion_model": self.network, "model_sampling": SimpleNamespace(sigma_max=self.sigma_max)}[name]

    def add_wrapper_with_key(self, kind, key, wrapper):
        assert kind == "diffusion_model"
        self.wrappers.append(wrapper)

    @torch.no_grad()
    def evaluate(self, x, sigma, schedule, branch):
        options = {**self.model_options["transformer_options"], "sample_sigmas": schedule, "cond_or_uncond": branch}
        options["sigmas"] = torch.tensor([sigma])
        run = self.network.forward
        for wrapper in self.wrappers:
            run = functools.partial(wrapper, run)
        context = torch.ones(x.shape[0], 5, H * D)
        return run(x, torch.tensor([sigma]), context, transformer_options=options)


def latent(step, seed=0):
    g = torch.Generator().manual_seed(seed)
    still, moving = torch.randn(2, 1, 4, 2, 8, 8, generator=g)
    return still + 0.01 * step * moving


def sample(patcher, schedule=SIGMAS, heun=False, branches=([0], [1])):
    """What a sampler does with a schedule of its own; the outputs of all evaluations."""
    outputs, schedule = [], schedule.clone()
    for step, sigma in enumerate(schedule[:-1].tolist()):
        points = [sigma, float(schedule[step + 1])] if heun and step + 2 < len(schedule) else [sigma]
        for point in points:
            outputs += [patcher.evaluate(latent(step), point, schedule, branch) for branch in branches]
    return torch.stack(outputs)


def patched(network, config=CONFIG, **kw):
    """A MODEL with HEART, its host, and the same without."""
    plain = Patcher(network, **kw)
    model = plain.clone()
    host = Host(config, model)
    model.model_options["transformer_options"]["optimized_attention_override"] = host.override
    model.add_wrapper_with_key("diffusion_model", "heart", host.evaluate)
    return model, host, plain


def rows(host):
    """(step, branch, layer) -> sparse, of the last generation."""
    return {(r.step, r.branch, r.layer): not r.reason for r in host.engine.recorder.rows}


# ---------------------------------------- the node


def test_the_node_patches_a_clone_and_leaves_the_model_alone():
    model = Patcher(Network())
    (new,) = HeartNode().patch(model, "wan2.1-1.3b-480p-xattention")
    assert model.wrappers == [] and model.model_options["transformer_options"] == {}
    assert callable(new.model_options["transformer_options"]["optimized_attention_override"]) and len(new.wrappers) == 1
    assert NODE_CLASS_MAPPINGS.keys() == NODE_DISPLAY_NAME_MAPPINGS.keys() == {"HeartSparseAttention"}
    inputs = HeartNode.INPUT_TYPES()
    presets, options = inputs["required"]["preset"]
    assert options["default"] in presets and set(inputs["optional"]) == {
        "file",
        "first_step",
    }
    assert HeartNode.RETURN_TYPES == ("MODEL",) and callable(getattr(HeartNode(), HeartNode.FUNCTION))


def test_a_config_file_instead_of_the_preset(tmp_path):
    CONFIG.save(tmp_path / "mine.json")
    (new,) = HeartNode().patch(Patcher(Network()), "wan2.1-14b-svg2", file=str(tmp_path / "mine.json"))
    assert new.wrappers[0].__self__.engine.config.thresholds == 0.5


def test_a_model_without_heads_is_refused_in_one_sentence():
    with pytest.raises(HeartError, match="Linear does not say how many heads"):
        Host(CONFIG, Patcher(torch.nn.Linear(1, 1)))


# ---------------------------------------- generations


def test_thresholds_of_one_equal_comfyui_without_heart():
    model, _, plain = patched(Network(), CONFIG.replace(thresholds=1.0))
    assert torch.equal(sample(model), sample(plain))


def test_steps_branches_reuse_and_generations():
    model, host, plain = patched(Network())
    first = sample(model)
    assert not torch.allclose(first, sample(plain), atol=1e-5)
    expected = {(s, b, layer): s >= 2 for s in range(STEPS) for b in ("0", "1") for layer in range(2)}
    assert rows(host) == expected
    assert torch.equal(sample(model), first)  # a second generation begins with fresh masks
    stats = heart.stats(host.engine)
    assert stats["generations"] == 2
    assert [row[0] for row in stats["records"][0]["refreshed"][0]] == [0, 0, 1, 0, 0, 0]  # made once, then reused


def test_batched_guidance_is_one_branch():
    model, host, _ = patched(Network())
    sample(model, branches=([1, 0],))
    assert {branch for _, branch, _ in rows(host)} == {"1,0"}


def test_two_evaluations_a_step_do_not_mix_nor_begin_a_generation():
    model, host, _ = patched(Network())
    sample(model, heun=True, branches=([0],))
    assert heart.stats(host.engine)["generations"] == 1
    found = rows(host)
    assert {branch for _, branch, _ in found} == {"0", "0 again 1"}
    assert [s for s, b, layer in found if b == "0" and layer == 0] == list(range(STEPS))


@pytest.mark.parametrize("first_step", [-1, 3])
def test_a_low_noise_expert_gets_the_second_half_without_a_warm_up(first_step):
    model = Patcher(Network())
    host = Host(CONFIG, model, first_step)
    model.model_options["transformer_options"]["optimized_attention_override"] = host.override
    model.add_wrapper_with_key("diffusion_model", "heart", host.evaluate)
    sample(model, SIGMAS[3:])
    before = 2 if first_step < 0 else 3
    assert {step for step, _, _ in rows(host)} == {before, before + 1, before + 2} and all(rows(host).values())
    assert host.engine.steps() == before + 3


def calls_of(host):
    seen, attend = [], host.engine.attend
    host.engine.attend = lambda call, *a: seen.append(call) or attend(call, *a)
    return seen


def test_noise_levels_of_flow_models_reach_the_engine():
    model, host, _ = patched(Network(), CONFIG.replace(dense_steps="auto"))
    seen, shifted = calls_of(host), torch.tensor([1.0, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.04, 0.03, 0.02, 0.0])
    sample(model, shifted)
    assert [round(c.sigma, 2) for c in seen[::4]] == [1.0, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.04, 0.03, 0.02]
    assert seen[0].schedule == pytest.approx(shifted[:-1].tolist())
    assert host.engine.recorder.dense_steps.first == 1  # by count alone it would be two of ten
    model, host, _ = patched(Network(), sigma_max=14.6)  # sigmas that are no shares of noise
    seen = calls_of(host)
    sample(model)
    assert {(c.sigma, c.schedule) for c in seen} == {(None, None)}


def test_phases_follow_the_noise_and_a_host_that_tells_none_is_said():
    few, many = (heart.Point(heart.XAttention(stride=4, block=8), threshold) for threshold in (0.3, 0.9))
    table = heart.PointTable((few, many), [[[[0] * H] * 2, [[1] * H] * 2]], (0.5,))
    model, host, _ = patched(Network(), CONFIG.replace(points=table))
    sample(model)
    early, late = (host.engine.recorder.by_step[step].density for step in (2, 4))
    assert early < late and not host.engine.recorder.notes
    model, host, _ = patched(Network(), CONFIG.replace(points=table), sigma_max=14.6)
    sample(model)
    assert [note for note in host.engine.recorder.notes if "nothing tells the noise level" in note]


def test_double_single_and_control_blocks_are_layers_of_their_own():
    model, host, _ = patched(Network(double=2, single=3, text=4))
    sample(model)
    assert {layer for _, _, layer in rows(host)} == set(range(5))
    model, host, _ = patched(Network(double=3, control=2))
    sample(model)
    assert {layer for _, _, layer in rows(host)} == set(range(5))
    refreshed = heart.stats(host.engine)["records"][0]["refreshed"]
    assert all(sum(row[0] for row in layer) == 1 for layer in refreshed)  # each reuses its own masks


def test_grid_and_text_from_the_latent():
    model, host, _ = patched(Network(double=1, single=1, text=4), CONFIG.replace(order="tiles"))
    seen = calls_of(host)
    sample(model)
    assert {(call.grid, call.text[0].start, call.text[0].prompt) for call in seen} == {(GRID, VIDEO, 4)}


def test_cross_attention_masks_and_foreign_calls_pass_through():
    model, host, _ = patched(Network())
    q = torch.randn(1, VIDEO, H * D)
    options = {**model.model_options["transformer_options"]}
    attention(q, q, q, H, transformer_options=options)  # outside the blocks
    attention(q, q[:, :7], q[:, :7], H, transformer_options={**options, "block_index": 0})
    attention(q, q, q, H, mask=torch.ones(VIDEO, VIDEO).bool(), transformer_options={**options, "block_index": 0})
    attention(q, q, q, H, transformer_options={**options, "block_index": 99})  # no such block
    assert heart.stats(host.engine)["calls"] == 0
    heads_kept = attention(
        *(x.unflatten(-1, (H, -1)).transpose(1, 2) for x in (q, q, q)),
        H, skip_reshape=True, skip_output_reshape=True, transformer_options={**options, "block_index": 0},
    )  # fmt: skip
    assert heads_kept.shape == (1, H, VIDEO, D)


def test_a_model_that_passes_no_options_is_told_so():
    _, host, _ = patched(Network())
    with pytest.raises(HeartError, match="no transformer options"):
        host.evaluate(lambda *a: None, latent(0), torch.tensor([1.0]))
