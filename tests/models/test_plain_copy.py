"""Copies, pickles and saved files of an enabled transformer are plain models."""

import copy
import io
import pickle

import pytest
import tiny_models as tiny
import torch

import heart_attention as heart
from heart_attention.models.attachment import attach, attachment_of


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}


@pytest.mark.parametrize("name", ["wan", "hunyuan", "cogvideox", "cosmos"])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_plain_and_the_original_stays_enabled(way, name):
    case = tiny.MODELS[name]
    model, given = case.build(), case.inputs()
    expected = tiny.run(model, given)
    attachment = attach(model, handler := tiny.Halved())
    halved, calls = tiny.run(model, given), len(handler.calls)
    twin = WAYS[way](model)
    assert attachment_of(twin) is None and attachment_of(model) is attachment
    assert torch.equal(tiny.run(twin, given), expected) and len(handler.calls) == calls
    assert torch.equal(tiny.run(model, given), halved) and len(handler.calls) == 2 * calls
    assert next(twin.parameters()).data_ptr() != next(model.parameters()).data_ptr()
    attach(twin, tiny.Seen())  # and can be enabled in its turn


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_made_amid_a_generation(way):
    model, given = tiny.wan(), tiny.wan_inputs()
    expected = tiny.run(model, given)
    heart.enable(model, heart.HeartConfig("xattention", 0.5, dense_steps=0, force_sparse=True))
    with model.cache_context("cond"):
        tiny.run(model, given)
        twin = WAYS[way](model)
    with twin.cache_context("cond"):
        assert torch.equal(tiny.run(twin, given), expected)


def test_disabled_models_pickle_as_before():
    model = tiny.wan()
    attach(model, tiny.Seen()).detach()
    assert "__reduce_ex__" not in vars(model) and "__deepcopy__" not in vars(model)
    assert torch.equal(tiny.run(pickled(model), tiny.wan_inputs()), tiny.run(model, tiny.wan_inputs()))
