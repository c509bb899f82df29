"""The vLLM-Omni backend against a stand-in of its call contract, and the stand-in against the real source if it is here.

`HEART_VLLM_OMNI_SOURCE` names a folder with the package `vllm_omni` (an unpacked wheel); without it, or an installed
package, the last tests are skipped.
"""

import ast
import enum
import importlib
import importlib.util
import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import heart_attention as heart
from heart_attention import HeartError

H, D, GRID, LAYERS, STEPS = 2, 8, (2, 4, 4), 2, 6
VIDEO = 32
CONFIG = heart.HeartConfig(
    heart.XAttention(stride=4, block=8), 0.5, heart.TMR(delta=1e9), dense_steps=2, force_sparse=True
)


def find_source():
    if "HEART_VLLM_OMNI_SOURCE" in os.environ:
        return Path(os.environ["HEART_VLLM_OMNI_SOURCE"]) / "vllm_omni"
    spec = importlib.util.find_spec("vllm_omni")
    return None if spec is None or not spec.origin else Path(spec.origin).parent


SOURCE = find_source()  # before the stand-in takes the package's name

# ---------------------------------------- the stand-in


@dataclass
class VideoTokenLayout:
    prefix_len: int | None = None
    latent_grid: tuple[int, int, int] | None = None
    used_len: int | None = None
    video_spans: tuple = ()


@dataclass
class AttentionMetadata:
    attn_mask: Any = None
    joint_query: Any = None
    full_attn_spans: Any = None
    video_layout: Any = None
    extra: dict = field(default_factory=dict)


class AttentionBackend:
    @classmethod
    def supports_head_size(cls, size):
        return not cls.get_supported_head_sizes() or size in cls.get_supported_head_sizes()


class AttentionImpl:
    def forward(self, query, key, value, attn_metadata=None):
        return self.forward_cuda(query, key, value, attn_metadata)


class SDPAImpl(AttentionImpl):
    def __init__(self, num_heads, head_size, softmax_scale, causal=False, num_kv_heads=None, prefix="", **extra):
        self.scale, self.calls = softmax_scale, 0

    def forward_cuda(self, query, key, value, attn_metadata=None):
        self.calls += 1
        mask = attn_metadata.attn_mask if attn_metadata else None
        q, k, v = (x.permute(0, 2, 1, 3) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).permute(0, 2, 1, 3)

    forward_xpu = forward_npu = forward_cuda


class SDPABackend(AttentionBackend):
    get_impl_cls = staticmethod(lambda: SDPAImpl)


class DiffusionAttentionBackendEnum(enum.Enum):
    TORCH_SDPA = "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"


context = types.SimpleNamespace(denoise_step_idx=None, total_denoise_steps=STEPS)


@pytest.fixture
def host(monkeypatch):
    """heart_attention.hosts.vllm_omni, loaded on top of the stand-in."""
    registered = {}
    backends = "vllm_omni.diffusion.attention.backends"
    contents = {
        f"{backends}.abstract": {c.__name__: c for c in (AttentionBackend, AttentionImpl, AttentionMetadata)},
        f"{backends}.registry": {
            "DiffusionAttentionBackendEnum": DiffusionAttentionBackendEnum,
            "register_diffusion_backend": registered.__setitem__,
        },
        f"{backends}.sdpa": {"SDPABackend": SDPABackend},
        "vllm_omni.diffusion.forward_context": {
            "get_forward_context": lambda: context,
            "is_forward_context_available": lambda: True,
        },
    }
    parents = {name.rsplit(".", i)[0] for name in contents for i in range(1, 5) if name.count(".") >= i}
    for name in {*contents, *parents}:
        module = types.ModuleType(name)
        module.__dict__.update(contents.get(name, {}), __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "heart_attention.hosts.vllm_omni", raising=False)
    module = importlib.import_module("heart_attention.hosts.vllm_omni")
    module.model.configure(CONFIG)
    module.registered = registered
    yield module
    sys.modules.pop("heart_attention.hosts.vllm_omni", None)


def make(host, prefix, role="self", **kw):
    """As `Attention.__init__` of the host does it."""
    given = {"num_heads": H, "head_size": D, "softmax_scale": D**-0.5, "causal": False, "num_kv_heads": None, **kw}
    return host.HeartImpl(
        **given, qkv_layout=None, prefix=prefix, backend_kwargs=None, role=role, backend_explicit=True
    )


def tensors(layer, step, n=VIDEO):
    g = torch.Generator().manual_seed(layer)
    still, moving = torch.randn(2, 3, 1, n, H, D, generator=g)
    return (still + 0.01 * step * moving).unbind(0)


def generate(layers, metadata=None, branches=2, n=VIDEO):
    outputs = []
    for context.denoise_step_idx in range(STEPS):
        for _ in range(branches):
            outputs += [
                impl.forward(*tensors(i, context.denoise_step_idx, n), metadata) for i, impl in enumerate(layers)
            ]
    return torch.stack(outputs)


# ---------------------------------------- what it does


def test_steps_branches_layers_and_generations(host):
    layers = [make(host, f"blocks.{i}.attn1") for i in range(LAYERS)]
    first = generate(layers)
    engine = host.model.engine
    found = {(r.step, r.branch, r.layer): not r.reason for r in engine.recorder.rows}
    assert found == {(s, b, layer): s >= 2 for s in range(STEPS) for b in ("0", "1") for layer in range(LAYERS)}
    assert engine.steps() == STEPS
    assert torch.equal(generate(layers), first)
    stats = heart.stats(engine)
    assert stats["generations"] == 2
    assert [row[0] for row in stats["records"][0]["refreshed"][0]] == [0, 0, 1, 0, 0, 0]


def test_thresholds_of_one_equal_the_hosts_own_attention(host):
    host.model.configure(CONFIG.replace(thresholds=1.0))
    layer = make(host, "blocks.0.attn1")
    plain = SDPAImpl(H, D, D**-0.5)
    assert torch.equal(generate([layer]), generate([plain]))


def test_control_blocks_and_a_second_transformer_are_apart(host):
    names = ["blocks.0.attn1", "blocks.1.attn1", "vace_blocks.0.attn1"]
    layers = [make(host, name) for name in (*names, *names)]
    assert [x.place for x in layers] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    generate(layers)
    assert (host.model.engine.layers, host.model.engine.transformers) == (3, 2)


def test_grid_and_prefix_from_the_metadata(host):
    layer = make(host, "blocks.0.attn", role="joint")
    seen, engine = [], host.model.serving()
    attend = engine.attend
    engine.attend = lambda call, *a: seen.append(call) or attend(call, *a)
    generate([layer], AttentionMetadata(video_layout=VideoTokenLayout(5, GRID)), n=VIDEO + 5)
    assert {(call.grid, call.text[0].start, call.text[0].prompt) for call in seen} == {(GRID, 0, 5)}


def test_the_noise_level_is_the_hosts_where_it_tells(host, monkeypatch):
    layer, seen, engine = make(host, "blocks.0.attn1"), [], host.model.serving()
    attend = engine.attend
    engine.attend = lambda call, *a: seen.append(call.sigma) or attend(call, *a)
    context.denoise_step_idx = 3
    layer.forward(*tensors(0, 3))
    monkeypatch.setattr(context, "denoise_timestep", 0.7, raising=False)
    layer.forward(*tensors(0, 3))
    assert seen == [None, 0.7]


def test_what_it_cannot_serve_runs_on_the_hosts_own_attention(host):
    served = make(host, "blocks.0.attn1")
    q, k, v = tensors(0, 3)
    context.denoise_step_idx = 3
    odd = [
        (make(host, "blocks.0.attn2", role="cross"), (q, k[:, :5], v[:, :5]), None),
        (make(host, "blocks.0.attn1", causal=True), (q, k, v), None),
        (make(host, "blocks.0.attn1", softmax_scale=1.0), (q, k, v), None),
        (make(host, "blocks.0.attn1", num_kv_heads=1), (q, k, v), None),
        (served, (q, k, v), AttentionMetadata(attn_mask=torch.ones(VIDEO, VIDEO).bool())),
        (served, (q, k, v), AttentionMetadata(video_layout=VideoTokenLayout(0, (1, 4, 4)))),
        (served, (q, k, v), AttentionMetadata(video_layout=VideoTokenLayout(video_spans=(1,)))),
        (served, (q[:, :, :1], k[:, :, :1], v[:, :, :1]), None),  # heads spread over ranks
    ]
    for impl, qkv, metadata in odd:
        before = impl.dense.calls
        assert impl.forward(*qkv, metadata).shape == qkv[0].shape and impl.dense.calls == before + 1
    context.denoise_step_idx = None
    served.forward(q, k, v)
    served.forward_npu(q, k, v)
    assert host.model.engine is None  # it was never asked


def test_registering_follows_the_environment(host, monkeypatch):
    host.register()
    assert host.registered == {}
    monkeypatch.setenv("HEART_VLLM_OMNI", "wan2.1-14b-xattention")
    host.register()
    assert host.registered == {host.SLOT: "heart_attention.hosts.vllm_omni.HeartBackend"}
    assert host.model.config.backbone == heart.PRESETS["wan2.1-14b-xattention"].config.backbone
    backend = host.HeartBackend
    assert (
        backend.get_impl_cls() is host.HeartImpl and backend.supports_head_size(128) and backend.get_name() == "HEART"
    )
    host.model.configure(None)
    context.denoise_step_idx = 0
    with pytest.raises(HeartError, match="set HEART_VLLM_OMNI"):
        make(host, "blocks.0.attn1").forward(*tensors(0, 0))


# ---------------------------------------- the stand-in against the real source


def source(*parts):
    """The parsed source of a module of vLLM-Omni."""
    if SOURCE is None:
        pytest.skip("vLLM-Omni's source is not here")
    return ast.parse(SOURCE.joinpath("diffusion", *parts).read_text())


def classes(tree):
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def methods(node):
    return {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}


def fields(node):
    return {m.target.id for m in node.body if isinstance(m, ast.AnnAssign)}


def test_the_contract_of_backends_and_implementations(host):
    tree = classes(source("attention", "backends", "abstract.py"))
    abstract = {
        name for name, m in methods(tree["AttentionBackend"]).items()
        if any("abstractmethod" in ast.unparse(d) for d in m.decorator_list)
    }  # fmt: skip
    assert abstract <= set(vars(host.HeartBackend))
    given = methods(tree["AttentionImpl"])["__init__"].args
    ours = host.HeartImpl.__init__.__code__.co_varnames
    assert {a.arg for a in given.args} <= set(ours) and given.kwarg is not None
    forward = [a.arg for a in methods(tree["AttentionImpl"])["forward_cuda"].args.args]
    assert forward == ["self", "query", "key", "value", "attn_metadata"]
    assert fields(tree["AttentionMetadata"]) >= set(AttentionMetadata.__dataclass_fields__)
    assert fields(tree["VideoTokenLayout"]) == set(VideoTokenLayout.__dataclass_fields__)


def test_the_contract_of_registry_layer_and_context():
    registry = source("attention", "backends", "registry.py")
    names = {
        t.id
        for n in classes(registry)["DiffusionAttentionBackendEnum"].body
        if isinstance(n, ast.Assign)
        for t in n.targets
    }
    assert "TORCH_SDPA" in names
    register = next(
        n for n in registry.body if isinstance(n, ast.FunctionDef) and n.name == "register_diffusion_backend"
    )
    assert [a.arg for a in register.args.args] == ["backend", "class_path"]
    call = next(
        n for n in ast.walk(source("attention", "layer.py"))
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.attn_impl_cls"
    )  # fmt: skip
    assert {k.arg for k in call.keywords} >= {"num_heads", "head_size", "softmax_scale", "prefix", "role", "qkv_layout"}
    context_class = classes(source("forward_context.py"))["ForwardContext"]
    assert set(vars(context)) <= fields(context_class)
    assert {"get_forward_context", "is_forward_context_available"} <= {
        n.name for n in source("forward_context.py").body if isinstance(n, ast.FunctionDef)
    }
    assert {"SDPABackend", "SDPAImpl"} <= set(classes(source("attention", "backends", "sdpa.py")))
