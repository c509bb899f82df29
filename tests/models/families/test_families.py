"""Every family: all its video attention seen, outputs bit-identical when answered densely, text where it lies."""

import pytest
import tiny_models as tiny
import torch

from heart_attention import HeartError
from heart_attention.models import family_of
from heart_attention.models.attachment import attach

MODELS = tiny.every_model()
NAMES = list(MODELS)


@pytest.mark.parametrize("name", NAMES)
def test_answers_densely_bit_for_bit_and_leaves_no_trace(name):
    model, given = MODELS[name].build(), MODELS[name].inputs(batch=2)
    before = tiny.run(model, given)
    seen = tiny.Seen()
    attachment = attach(model, seen)
    assert torch.equal(tiny.run(model, given), before)
    assert seen.passed == []
    attachment.detach()
    assert torch.equal(tiny.run(model, given), before)
    assert len(seen.forwards) == 1


@pytest.mark.parametrize("name", NAMES)
def test_all_layers_are_seen_with_grid_and_text(name):
    case = MODELS[name]
    model, seen, batch = case.build(), tiny.Seen(), 2
    attachment = attach(model, seen)
    assert len(attachment.layers) == case.layers
    tiny.run(model, case.inputs(batch=batch))
    assert seen.forwards[0].grid == case.grid
    layers = [call.layer for call, _ in seen.calls]
    items = attachment.family.item_by_item
    assert sorted(layers) == sorted(list(range(case.layers)) * (batch if items else 1))
    for call, (b, heads, n, dim) in seen.calls:
        assert (b, heads, dim) == (1 if items else batch * case.items, tiny.HEADS, tiny.DIM)
        expected = None if case.text is None else [case.text(call.item + i) for i in range(b)]
        found = None if call.text is None else [(t.start, t.prompt, t.unused) for t in call.text]
        assert found == expected
        assert n == case.video + (sum(expected[0][1:]) if expected else 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_reaches_the_model_from_every_layer(name):
    case = MODELS[name]
    model, given = case.build(), case.inputs()
    plain = tiny.run(model, given)

    class OneLayer(tiny.Seen):
        only = 0

        def attend(self, call, q, k, v, dense):
            out = dense(q, k, v)
            return out * 0.5 if call.layer == self.only else out

    attach(model, handler := OneLayer())
    outputs = []
    for handler.only in range(case.layers):
        outputs.append(tiny.run(model, given))
        assert not torch.equal(outputs[-1], plain)
    assert not torch.equal(outputs[0], outputs[1])


def test_gradients_flow_through_attention():
    model = tiny.wan()
    leaf = torch.zeros(1, tiny.HEADS, tiny.VIDEO, tiny.DIM, requires_grad=True)

    class AddLeaf(tiny.Seen):
        def attend(self, call, q, k, v, dense):
            assert q.requires_grad
            return dense(q, k, v) + leaf

    attach(model, AddLeaf())
    model(**tiny.wan_inputs())[0].square().sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    assert model.blocks[0].attn1.to_q.weight.grad.abs().sum() > 0


def test_an_unknown_mask_runs_dense_and_says_so():
    model = tiny.MODELS["skyreels-v2"].build(num_frame_per_block=2)  # block-causal attention
    given = tiny.wan_inputs()
    before = tiny.run(model, given)
    attach(model, seen := tiny.Seen())
    assert torch.equal(tiny.run(model, given), before)
    assert seen.calls == []
    assert len(seen.passed) == 2 and "attention mask" in seen.passed[0][1]


def test_conditioning_tokens_beside_the_grid_leave_no_grid():
    case = tiny.MODELS["ltx"]
    given = case.inputs()
    given["hidden_states"] = tiny.noise(1, tiny.VIDEO + 4, 4)
    given["video_coords"] = tiny.noise(1, 3, tiny.VIDEO + 4)
    attach(model := case.build(), seen := tiny.Seen())
    tiny.run(model, given)
    assert seen.forwards[0].grid is None and len(seen.calls) == 2


def test_dense_cuts_the_mask_to_batch_items():
    case = tiny.MODELS["hunyuan"]
    model, given = case.build(), case.inputs(batch=2)
    before = tiny.run(model, given)

    class ByItem(tiny.Seen):
        def attend(self, call, q, k, v, dense):
            parts = [dense(*(x[i : i + 1] for x in (q, k, v)), items=[i]) for i in range(q.shape[0])]
            return torch.cat(parts)

    attach(model, ByItem())
    assert torch.allclose(tiny.run(model, given), before, atol=1e-6)


def test_an_image_model_is_refused_with_the_known_ones():
    with pytest.raises(HeartError, match=r"Linear is not a video transformer .* WanTransformer3DModel"):
        family_of(torch.nn.Linear(1, 1))


def test_a_foreign_processor_is_refused_with_advice():
    class Own:
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return hidden_states

    model = tiny.wan()
    model.blocks[1].attn1.set_processor(Own())
    with pytest.raises(HeartError, match=r"Own of blocks\.1\.attn1 .* set the model's own"):
        attach(model, tiny.Seen())
    assert "_heart_tag" not in dir(model.blocks[0].attn1.processor)  # nothing half done
