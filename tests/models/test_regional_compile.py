"""Blocks compiled around attention: as many graphs as kinds of block, equal outputs, undone."""

import functools
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

import heart_attention as heart
from heart_attention import tiny
from heart_attention.errors import HeartError
from heart_attention.evaluation import methods, run
from heart_attention.models import attachment, regional_compile
from heart_attention.models.regional_compile import CACHE, _own_cache, compile_blocks, compiled


@pytest.fixture
def transformer():
    return tiny.load().transformer.eval()


def forward(transformer, seed=0):
    """A forward pass at a small size."""
    g = torch.Generator().manual_seed(seed)
    config = transformer.config
    latents = torch.randn(1, config.in_channels, 3, 16, 16, generator=g)
    text = torch.randn(1, 8, config.text_dim, generator=g)
    with torch.no_grad():
        return transformer(latents, torch.tensor([500]), text, return_dict=False)[0]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_one_graph_serves_the_whole_depth_and_is_undone(transformer, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    want = forward(transformer)
    compiled = compile_blocks(transformer, backend="aot_eager", fullgraph=True)
    assert len(compiled.blocks) == transformer.config.num_layers
    assert (forward(transformer) - want).abs().max() <= 1e-5
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    compiled.undo()
    counters.clear()
    assert torch.equal(forward(transformer), want) and not counters["stats"]


def test_sparse_attention_stays_an_opaque_call_inside(transformer, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config = heart.HeartConfig(heart.XAttention(stride=4, block=16), 0.6, dense_steps=0, force_sparse=True)
    with heart.enabled(transformer, config):
        want = forward(transformer)
    with heart.enabled(transformer, config):
        compiled = compile_blocks(transformer, backend="aot_eager", fullgraph=True)
        assert (forward(transformer) - want).abs().max() <= 1e-5
        compiled.undo()


def test_blocks_that_the_user_compiled_stay_compiled(transformer, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    transformer.blocks[0].compile(backend="eager")
    compiled = compile_blocks(transformer, backend="eager")
    assert len(compiled.blocks) == transformer.config.num_layers - 1
    compiled.undo()
    assert transformer.blocks[0]._compiled_call_impl is not None


def test_a_model_without_repeated_blocks_is_refused():
    with pytest.raises(HeartError, match="Linear does not say which blocks it repeats"):
        compile_blocks(torch.nn.Linear(2, 2))


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A compiler that only traces, so that tests take seconds."""
    monkeypatch.setattr(
        regional_compile.files, "cache_dir", lambda: tmp_path
    )  # the C kernels stay where they are built
    monkeypatch.delenv(CACHE, raising=False)
    tracing = functools.partial(compile_blocks, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(attachment, "compile_blocks", tracing)
    monkeypatch.setattr(regional_compile, "compile_blocks", tracing)
    return tmp_path


def test_enable_compiles_and_disable_gives_the_same_bits_back(transformer, quick):
    want = forward(transformer)
    config = heart.HeartConfig(heart.XAttention(stride=4, block=16), 0.6, dense_steps=0, force_sparse=True)
    with heart.enabled(transformer, config):
        sparse = forward(transformer)
    heart.enable(transformer, config, compile_blocks=True)
    assert os.environ[CACHE] == str(quick / "inductor"), "a cache that survives the process"
    assert (forward(transformer) - sparse).abs().max() <= 1e-5
    assert heart.stats(transformer).to_dict()["kernels"], "attention itself stays ours"
    heart.disable(transformer)
    counters.clear()
    assert torch.equal(forward(transformer), want) and not counters["stats"] and CACHE not in os.environ


def test_a_cache_that_the_user_named_stays(transformer, quick, monkeypatch):
    monkeypatch.setenv(CACHE, str(quick / "mine"))
    with heart.enabled(transformer, "xattention", compile_blocks=True):
        assert os.environ[CACHE] == str(quick / "mine")
    assert os.environ[CACHE] == str(quick / "mine")


def test_a_line_says_when_the_compiler_starts_and_ends(transformer, quick, caplog):
    caplog.set_level(logging.INFO, logger="heart_attention.models.regional_compile")
    with compiled(transformer):
        assert not caplog.messages
        forward(transformer), forward(transformer)
    first, last = caplog.messages
    assert first.startswith(
        f"compiling {transformer.config.num_layers} blocks of WanTransformer3DModel: the first step"
    )
    assert last.startswith(f"compiled {transformer.config.num_layers} blocks of WanTransformer3DModel in ")


def test_enable_refuses_before_anything_is_touched(transformer, monkeypatch):
    monkeypatch.setattr(type(transformer), "_repeated_blocks", None)
    with pytest.raises(HeartError, match="does not say which blocks it repeats"):
        heart.enable(transformer, "xattention", compile_blocks=True)
    assert attachment.attachment_of(transformer) is None


def test_all_rows_of_a_comparison_share_one_compilation(quick, tmp_path):
    pipe = tiny.load()
    call = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3}
    rows = [methods.build("dense", pipe, "tiny"), methods.build("xattention", pipe, "tiny", force_sparse=True)]
    setting = run.Setting("tiny", call, in_turns=True, compile_blocks=True)
    made = run.run(pipe, rows, ["a red square"], [0], setting, tmp_path / "out", warm=False)
    assert made["provenance"]["compile_blocks"] and len(made["rows"]) == 2
    assert counters["stats"]["unique_graphs"] == 1, "turns must not recompile"
    assert all(block._compiled_call_impl is None for block in pipe.transformer.blocks)


OTHER_PROCESS = """
import torch, heart_attention as heart
from heart_attention import tiny
from torch._dynamo.utils import counters
pipe = tiny.load()
heart.enable(pipe, "xattention", compile_blocks=True)
pipe("a red square", height=32, width=32, num_frames=5, num_inference_steps=1, output_type="latent")
print("missed", counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_the_next_process_finds_what_was_compiled(tmp_path):
    env = {**os.environ, "HEART_CACHE": str(tmp_path)}
    env.pop(CACHE, None)
    runs = [
        subprocess.run([sys.executable, "-c", OTHER_PROCESS], env=env, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [r.stdout.strip().splitlines()[-1] for r in runs] == ["missed 1", "missed 0"]


@pytest.mark.slow
def test_the_real_compiler(transformer, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    want = forward(transformer)
    compile_blocks(transformer)
    assert (forward(transformer) - want).abs().max() <= 1e-4 * want.abs().max()
    assert any(tmp_path.iterdir()), "compiled code must outlive the process"


@pytest.mark.skipif(os.name == "nt", reason="needs modes")
def test_compiled_code_that_others_may_write_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HEART_CACHE", str(tmp_path))
    folder = tmp_path / "inductor"
    assert _own_cache() == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert _own_cache() is None and "not this user's alone" in caplog.text
