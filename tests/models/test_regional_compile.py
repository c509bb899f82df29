"""Blocks compiled around attention: as many graphs as kinds of block, equal outputs, undone."""

import pytest
import torch
from torch._dynamo.utils import counters

import heart_attention as heart
from heart_attention import tiny
from heart_attention.errors import HeartError
from heart_attention.models.regional_compile import compile_blocks


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


@pytest.mark.slow
def test_the_real_compiler(transformer, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    want = forward(transformer)
    compile_blocks(transformer)
    assert (forward(transformer) - want).abs().max() <= 1e-4 * want.abs().max()
    assert any(tmp_path.iterdir()), "compiled code must outlive the process"
