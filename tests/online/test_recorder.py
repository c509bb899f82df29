"""Recording q, k, v: by place, filtered, on a plain and on an enabled model, leaving nothing behind."""

import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F

from heart_attention import HeartError
from heart_attention.models.attachment import attach, attachment_of
from heart_attention.online.recorder import record


def steps(model, count=2, names=("cond", "uncond")):
    for step in range(count):
        for name in names:
            with tiny.context(model, name, step):
                tiny.run(model, tiny.wan_inputs(900.0 - 100 * step))


def test_calls_by_generation_step_branch_and_layer():
    model = tiny.wan()
    with record(model, outputs=True) as kept:
        steps(model)
        steps(model)
    assert set(kept) == {(g, s, b, n) for g in (0, 1) for s in (0, 1) for b in ("cond", "uncond") for n in (0, 1)}
    call = kept[0, 1, "cond", 1]
    assert call.q.shape == (1, tiny.HEADS, tiny.VIDEO, tiny.DIM) and call.call.step == 1
    assert torch.allclose(F.scaled_dot_product_attention(call.q, call.k, call.v), call.out, atol=1e-6)
    assert kept.nbytes == 16 * 4 * call.q.nbytes
    assert attachment_of(model) is None


def test_only_what_is_wanted():
    model = tiny.wan()
    with record(model, layers=[1], steps=range(1, 2), branches={"cond"}, dtype=torch.bfloat16) as kept:
        steps(model)
    assert set(kept) == {(0, 1, "cond", 1)}
    assert kept[0, 1, "cond", 1].q.dtype == torch.bfloat16


def test_an_enabled_model_keeps_its_handler():
    model, handler = tiny.wan(), tiny.Halved()
    attachment = attach(model, handler)
    plain = tiny.run(model, tiny.wan_inputs())
    with record(model) as kept:
        assert torch.equal(tiny.run(model, tiny.wan_inputs()), plain)
    assert len(kept) == 2 and attachment.handler is handler


def test_items_of_a_batch_where_the_model_takes_them_one_by_one():
    case = tiny.MODELS["mochi"]
    with record(model := case.build()) as kept:
        tiny.run(model, case.inputs(batch=2))
    assert (0, 0, "0", 0) in kept and (0, 0, "0", 0, 1) in kept


def test_something_without_a_transformer():
    with pytest.raises(HeartError, match="has no transformer"), record(object()):
        pass
