"""Transformers of a pipeline, and layers and heads of a transformer."""

import logging
from types import SimpleNamespace

import pytest
import tiny_models as tiny
import torch

import heart_attention as heart
from heart_attention import HeartError
from heart_attention.models import inspect


def test_transformers_of_pipelines_and_of_themselves():
    one, two = tiny.wan(), tiny.wan(seed=1)
    assert inspect.transformers_of(one) == [one] and not inspect.is_pipeline(one)
    pipe = SimpleNamespace(transformer=one, transformer_2=two)
    assert inspect.transformers_of(pipe) == [one, two] and inspect.is_pipeline(pipe)
    assert inspect.named_transformers(pipe) == {"transformer": one, "transformer_2": two}
    pipe.transformer = None  # Wan2.2 with its second expert alone
    assert inspect.transformers_of(pipe) == [two]


def test_a_compiled_transformer_is_looked_through():
    model = tiny.wan()
    compiled = torch.compile(model)
    assert inspect.transformers_of(compiled) == [model]
    assert inspect.transformers_of(SimpleNamespace(transformer=compiled)) == [model]
    assert inspect.layers_and_heads(compiled) == (2, tiny.HEADS)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_layers_heads_and_their_size(name):
    model = tiny.MODELS[name].build()
    assert inspect.layers_and_heads(model) == (tiny.MODELS[name].layers, tiny.HEADS)
    assert inspect.head_size(model) == tiny.DIM


@pytest.mark.parametrize("model", [None, "Wan-AI/Wan2.1", SimpleNamespace(scheduler=1)])
def test_what_has_no_transformer_is_refused_in_one_sentence(model):
    for verb in (heart.enable, heart.disable, heart.stats):
        with pytest.raises(HeartError, match="has no transformer: give a diffusers video pipeline"):
            verb(model)


def test_an_unknown_model_is_refused_before_a_preset_is_told(caplog):
    with caplog.at_level(logging.INFO), pytest.raises(HeartError, match="Linear is not a video transformer"):
        heart.enable(torch.nn.Linear(2, 2))
    assert caplog.records == []
    with pytest.raises(HeartError, match="has no attention layer that HEART knows"):
        inspect.layers_and_heads(tiny.wan(layers=0))
