"""Intercepted processors: which can be, that they behave as the model's own, and what dense attention stands for."""

import copy
import functools
import pickle

import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0
from diffusers.models.transformers.transformer_cosmos import CosmosAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from heart_attention.models import processors
from heart_attention.models.attachment import attach


class Slotted:
    __slots__ = ()

    def __call__(self, attn, x):
        return dispatch_attention_fn(x, x, x)


class Decorated:
    @functools.wraps(dispatch_attention_fn)
    def __call__(self, attn, x):
        return dispatch_attention_fn(x, x, x)


class Other:
    def __call__(self, attn, x):
        return x


class OwnBackend:
    def __call__(self, attn, x):
        return dispatch_attention_fn(x, x, x, backend=AttentionBackendName.FLEX)


class Module(torch.nn.Module):
    def __call__(self, attn, x):
        return dispatch_attention_fn(x, x, x)


class Direct:
    def __call__(self, attn, x):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (WanAttnProcessor(), None),
        (CogVideoXAttnProcessor2_0(), None),
        (CosmosAttnProcessor2_0(), None),
        (Direct(), None),
        (Slotted(), "not a plain object"),
        (Module(), "not a plain object"),
        (Decorated(), "decorated"),
        (Other(), "uses neither"),
        (OwnBackend(), "chooses an attention backend by itself"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_which_processors_can_be_intercepted(processor, reason):
    found = processors.reason_not(processor)
    assert (found is None) if reason is None else reason in found


@pytest.fixture
def wan():
    model = tiny.wan()
    plain = model.blocks[0].attn1.processor
    attachment = attach(model, tiny.Seen())
    yield model.blocks[0].attn1.processor, plain
    attachment.detach()


def test_an_intercepted_processor_looks_like_the_original(wan):
    ours, plain = wan
    assert isinstance(ours, WanAttnProcessor) and type(ours).__name__ == "WanAttnProcessor" and ours is not plain
    assert processors.original(ours) is plain and processors.original(plain) is plain
    assert processors.layer_of(ours).info.index == 0 and processors.layer_of(plain) is None
    ours.note = "set on one"
    assert plain.note == "set on one"  # shows on the other
    plain._attention_backend = "_native_math"
    ours._attention_backend = "_native_math"
    assert ours._attention_backend == "_native_math" and ours._attention_backend.backend == "_native_math"


def test_copies_and_pickles_are_the_users_own(wan):
    ours, plain = wan
    for twin in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is type(plain) and twin is not plain and processors.layer_of(twin) is None


def test_a_processor_that_outlives_its_attachment_runs_plainly():
    model, given = tiny.wan(), tiny.wan_inputs()
    expected = tiny.run(model, given)
    attachment = attach(model, seen := tiny.Seen())
    kept = model.blocks[0].attn1.processor
    attachment.detach()
    model.blocks[0].attn1.set_processor(kept)
    assert torch.equal(tiny.run(model, given), expected) and seen.calls == []


@pytest.mark.parametrize("name", ["wan", "cogvideox", "cosmos", "latte", "kandinsky-6"])
def test_dense_is_the_models_own_attention_for_any_heads_and_items(name):
    case = tiny.every_model()[name]
    model, given = case.build(), case.inputs(batch=2)
    plain = tiny.run(model, given)

    class ByHead(tiny.Seen):
        def attend(self, call, q, k, v, dense):
            whole = dense(q, k, v)
            heads = [dense(*(x[:, h : h + 1] for x in (q, k, v))) for h in range(q.shape[1])]
            torch.testing.assert_close(torch.cat(heads, 1), whole, rtol=0, atol=1e-6)
            return whole

    attach(model, ByHead())
    assert torch.equal(tiny.run(model, given), plain)


def test_options_that_heart_does_not_know_run_dense_with_their_names():
    model = tiny.wan()
    attach(model, seen := tiny.Seen())
    tiny.run(model, tiny.wan_inputs())
    tag = model.blocks[0].attn1.processor._attention_backend
    q = torch.randn(1, tiny.VIDEO, tiny.HEADS, tiny.DIM)
    out = processors.dispatch(q, q, q, is_causal=True, scale=0.5, backend=tag)
    assert seen.passed[-1][1] == "attention with is_causal, scale"
    q = q.transpose(1, 2)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5).transpose(1, 2)
    assert torch.equal(out, expected)
