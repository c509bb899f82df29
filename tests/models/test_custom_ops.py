"""torch.compile with HEART on: no graph break, no recompile over steps and branches, equal outputs."""

import pytest
import tiny_models as tiny
import torch
from torch._dynamo.utils import counters

import heart_attention as heart
from heart_attention.models.attachment import attach

TIMES = [(900.0, "cond"), (900.0, "uncond"), (800.0, "cond"), (800.0, "uncond")]


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def generate(model, case, rising=False):
    outputs = []
    for t, name in TIMES:
        t = 1000 - t if rising else t
        with model.cache_context(name):
            outputs.append(tiny.run(model, case.inputs(t)))
    return torch.stack(outputs)


def graphs():
    assert not counters["graph_break"] and not counters["recompiles"]
    return counters["stats"]["unique_graphs"]


def compile_whole(model, backend):
    model.compile(fullgraph=True, backend=backend)


def compile_blocks(model, backend):
    model.compile_repeated_blocks(fullgraph=True, backend=backend)


def check(name, compile_model, backend, plain_graphs):
    """Outputs as in eager mode with the same handler, and as many graphs as without HEART."""
    case = tiny.every_model()[name]
    rising = attach(eager := case.build(), tiny.Halved()).clock.rising
    expected = generate(eager, case, rising)
    model = case.build()
    compile_model(model, backend)
    attachment = attach(model, handler := tiny.Halved())
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = generate(model, case, rising)
    assert (found - expected).abs().max() <= 1e-5
    assert graphs() == plain_graphs
    assert [call.layer for call, _ in handler.calls] == [0, 1] * len(TIMES)
    assert [(call.step, call.branch) for call in handler.forwards] == [(i // 2, n) for i, (_, n) in enumerate(TIMES)]
    return model, attachment


@pytest.mark.parametrize("compile_model", [compile_whole, compile_blocks])
def test_wan_compiles_to_one_graph(compile_model):
    model, attachment = check("wan", compile_model, "aot_eager", 1)
    attachment.detach()
    expected = generate(tiny.wan(), tiny.MODELS["wan"])
    assert (generate(model, tiny.MODELS["wan"]) - expected).abs().max() <= 1e-5


def test_inside_a_graph_of_the_caller():
    attach(eager := tiny.wan(), tiny.Halved())
    attach(model := tiny.wan(), handler := tiny.Halved())
    forward = torch.compile(lambda given: model(**given)[0], fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for t in (900.0, 900.0, 800.0):
            found = forward(tiny.wan_inputs(t))
            assert (found - tiny.run(eager, tiny.wan_inputs(t))).abs().max() <= 1e-5
    assert graphs() == 1
    assert [(call.step, call.branch) for call in handler.forwards] == [(0, "0"), (0, "1"), (1, "0")]


@pytest.mark.slow
@pytest.mark.parametrize("compile_model", [compile_whole, compile_blocks])
def test_wan_with_inductor(compile_model):
    check("wan", compile_model, "inductor", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compile_model", "plain_graphs"),
    [
        *(
            (name, compile_whole, 1)
            for name in ("hunyuan", "cogvideox", "helios", "motif", "minimax-h3", "kandinsky-6")
        ),
        ("ltx", compile_blocks, 1),
    ],
)
def test_other_families(name, compile_model, plain_graphs):
    check(name, compile_model, "aot_eager", plain_graphs)


@pytest.mark.slow
@pytest.mark.parametrize("compile_model", [compile_whole, compile_blocks])
def test_sparse_attention_with_reuse(compile_model):
    config = heart.HeartConfig(
        backbone=heart.XAttention(stride=4, block=8),
        thresholds=[[0.5, 0.8], [0.7, 1.0]],
        reuse=heart.TMR(delta=2.0),
        dense_steps=1,
        force_sparse=True,
    )
    case = tiny.MODELS["wan"]
    dense = generate(tiny.wan(), case)
    heart.enable(eager := tiny.wan(), config)
    expected = generate(eager, case)
    assert not torch.allclose(expected[2:], dense[2:], atol=1e-4)
    compile_model(model := tiny.wan(), "aot_eager")
    heart.enable(model, config)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert (generate(model, case) - expected).abs().max() <= 1e-5
    assert graphs() == 1


@pytest.mark.slow
def test_enabling_and_disabling_a_compiled_model():
    case = tiny.MODELS["wan"]
    expected = generate(tiny.wan(), case)
    attach(eager := tiny.wan(), tiny.Halved())
    halved = generate(eager, case)
    compile_blocks(model := tiny.wan(), "aot_eager")
    for _ in range(2):
        assert (generate(model, case) - expected).abs().max() <= 1e-5
        attachment = attach(model, tiny.Halved())
        assert (generate(model, case) - halved).abs().max() <= 1e-5
        attachment.detach()
    assert counters["stats"]["unique_graphs"] == 2  # one without HEART, one with, each used again
