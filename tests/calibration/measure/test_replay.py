"""Replays run the model's own code from any block on, bit for bit, and leave the model as it was."""

from __future__ import annotations

import pytest
import torch
from models_for_tests import hunyuan_context, hunyuan_transformer, wan_context, wan_transformer

from heart_attention.calibration.measure.replay import Replay, block_path, frozen
from heart_attention.errors import HeartError

MODELS = {"wan": (wan_transformer, wan_context), "hunyuan": (hunyuan_transformer, hunyuan_context)}


@pytest.fixture(params=MODELS)
def case(request):
    make, context_of = MODELS[request.param]
    model = make()
    with Replay(model) as replay:
        yield replay, context_of(model).branches[0].inputs


@torch.no_grad()
def test_from_any_block_on_the_output_is_the_models(case):
    replay, inputs = case
    whole = replay.transformer(**inputs, return_dict=False)[0]
    out, streams = replay.forward_recorded(inputs)
    assert torch.equal(out, whole) and len(streams) == replay.blocks(inputs) and streams[0] == ()
    for block, stream in enumerate(streams):
        assert torch.equal(replay.finish(inputs, block, stream), whole)
    assert torch.equal(replay.finish(inputs, len(streams), (out,)), whole)


@torch.no_grad()
def test_block_after_block_is_the_whole_forward(case):
    replay, inputs = case
    _, streams = replay.forward_recorded(inputs)
    stream = ()
    for block in range(replay.blocks(inputs)):
        stream = replay.advance(inputs, block, stream)
        following = streams[block + 1] if block + 1 < len(streams) else (replay.forward(inputs),)
        assert all(torch.equal(a, b) for a, b in zip(stream, following, strict=True))


@torch.no_grad()
def test_only_the_blocks_from_the_first_on_attend(case):
    replay, inputs = case
    _, streams = replay.forward_recorded(inputs)
    seen = []

    def serve(call, q, k, v, dense):
        seen.append(call.layer)
        return dense(q, k, v)

    last = len(replay.layers) - 1
    block = replay.block_of(last, inputs)
    with replay.handler.serving(serve):
        replay.finish(inputs, block, streams[block])
    assert seen == [last]


def test_the_model_is_given_back():
    model = wan_transformer()
    processors = [b.attn1.processor for b in model.blocks]
    inputs = wan_context(model).branches[0].inputs
    with torch.no_grad():
        before = model(**inputs, return_dict=False)[0]
        with Replay(model) as replay:
            replay.forward_recorded(inputs)
        assert torch.equal(model(**inputs, return_dict=False)[0], before)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert [b.attn1.processor for b in model.blocks] == processors
    replay.close()  # a second time does nothing


def test_gradients_flow_through_one_block():
    model = wan_transformer()
    inputs = wan_context(model).branches[0].inputs
    with Replay(model) as replay, frozen(model):
        with torch.no_grad():
            _, streams = replay.forward_recorded(inputs)
        leaves = tuple(s.clone().requires_grad_() for s in streams[1])
        with torch.enable_grad():
            after = replay.advance(inputs, 1, leaves)
        (grad,) = torch.autograd.grad(after[0].sum(), leaves[:1])
        assert grad.abs().sum() > 0 and not any(p.requires_grad for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_a_watcher_is_told_of_forwards():
    model, calls = wan_transformer(), []
    inputs = wan_context(model).branches[0].inputs
    with Replay(model) as replay, torch.no_grad():
        with replay.handler.watched(calls.append):
            replay.forward(inputs)
        replay.forward(inputs)
    assert len(calls) == 1


def test_the_block_of_a_layer_is_the_outermost_list_member():
    model = wan_transformer()
    assert block_path(model, "blocks.2.attn1") == "blocks.2"
    with pytest.raises(HeartError, match="lies in no list of blocks"):
        block_path(model, "patch_embedding")
