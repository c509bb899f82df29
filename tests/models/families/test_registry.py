"""Families by class name: a user's own, wrong ones refused in one sentence, and refusals with reasons."""

import logging

import pytest
import tiny_models as tiny
import torch

import heart_attention as heart
from heart_attention import HeartError, models, plugins
from heart_attention.models.attachment import attach
from heart_attention.models.families.base import Family
from heart_attention.models.families.registry import FAMILIES, REFUSED, family_of, register_family
from heart_attention.models.families.wan import Wan


@pytest.fixture(autouse=True)
def families():
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


class Mine(type(tiny.wan())):
    """A user's transformer."""


def mine():
    model = tiny.wan()
    model.__class__ = Mine
    return model


def test_a_family_of_ones_own_by_class_by_instance_and_as_before():
    class MyFamily(Wan):
        classes = ("Mine",)

    assert register_family(MyFamily) is MyFamily and isinstance(family_of(mine()), MyFamily)
    instance = MyFamily()
    register_family(instance)
    assert family_of(mine()) is instance and models.FAMILIES["Mine"] is instance
    with pytest.warns(DeprecationWarning, match="register_family"):
        models.register("Other", Wan())
    assert isinstance(FAMILIES["Other"], Wan) and FAMILIES["WanTransformer3DModel"].classes == Wan.classes


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        (3, "cannot register 3: derive a class"),
        (dict, "cannot register <class 'dict'>"),
        (type("Nameless", (Family,), {}), "Nameless names no classes"),
        (type("String", (Family,), {"classes": "Mine"}), "String names no classes"),
        (type("Pattern", (Family,), {"classes": ("Mine",), "layers": ("(",)}), "Pattern.layers is"),
        (type("Bare", (Family,), {"classes": ("Mine",), "layers": "blocks"}), "Bare.layers is"),
    ],
)
def test_a_wrong_family_is_refused_in_one_sentence(family, sentence):
    with pytest.raises(HeartError, match=sentence):
        register_family(family)
    assert "Mine" not in FAMILIES


def registered(**fields):
    register_family(type("Wrong", (Wan,), {"classes": ("Mine",), **fields}))
    return mine()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"layers": (r"nothing\.\d+",)}, "this Mine has no attention layer that HEART knows"),
        ({"layers": (r"blocks\.\d+\.attn1", r"proj_out")}, ""),  # a module without a processor is none
    ],
)
def test_layers_that_are_not_there(fields, sentence):
    model = registered(**fields)
    if not sentence:
        return heart.enable(model)
    with pytest.raises(HeartError, match=sentence):
        heart.enable(model)


def test_layers_with_different_numbers_of_heads():
    model = registered()
    model.blocks[1].attn1.heads = 4
    with pytest.raises(HeartError, match="have 2 to 4 heads"):
        heart.enable(model)


@pytest.mark.parametrize("wrong", ["grid", "inputs", "text"])
def test_a_family_that_cannot_read_the_inputs_lets_the_model_run_dense_and_says_so(wrong, caplog):
    def fails(self, *args):
        raise KeyError("no_such_argument")

    model, given = registered(**{wrong: fails}), tiny.wan_inputs()
    expected = tiny.run(model, given)
    attach(model, seen := tiny.Seen())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(tiny.run(model, given), expected)
    assert seen.calls == [] and len(seen.passed) == 4
    assert "the family Wrong cannot read the inputs of Mine (KeyError: 'no_such_argument')" in seen.passed[0][1]
    assert len(caplog.records) == 1  # once, though it was twice


@pytest.mark.parametrize("fields, sentence", [
    ({"front": lambda self, *a: {}["front"]}, "KeyError: 'front'"),
    ({"locate": lambda self, *a: {}["locate"]}, "KeyError: 'locate'"),
    ({"reason_not": lambda self, *a: {}["reason"]}, "KeyError: 'reason'"),
    ({"grid": lambda self, *a: (4, 4)}, "ValueError: not enough values"),
    ({"grid": lambda self, *a: "big"}, "TypeError"),
    ({"grid": lambda self, *a: (1, 0, 4)}, "ValueError: a grid of 1×0×4 tokens"),
    ({"text": lambda self, *a: "somewhere"}, "TypeError: text is somewhere, a list of Text is wanted"),
])  # fmt: skip
def test_whatever_a_family_does_wrong_the_model_runs_dense(fields, sentence, caplog):
    model, given = registered(**fields), tiny.wan_inputs()
    expected = tiny.run(model, given)
    with heart.enabled(model, "xattention", force_sparse=True, dense_steps=0), caplog.at_level(logging.WARNING):
        assert torch.equal(tiny.run(model, given), expected)
        fallbacks = heart.stats(model)["fallbacks"]
    assert len(fallbacks) == 1 and "the family Wrong cannot read the inputs of Mine" in (told := next(iter(fallbacks)))
    assert sentence in told


def test_an_installed_plugin_is_asked_before_a_model_is_refused(monkeypatch):
    def load_installed():
        register_family(type("FromPlugin", (Wan,), {"classes": ("Theirs",)}))
        return ("theirs",)

    theirs = mine()
    theirs.__class__ = type("Theirs", (torch.nn.Module,), {})
    monkeypatch.setattr(plugins, "load_installed", load_installed)
    assert type(family_of(theirs)).__name__ == "FromPlugin"


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_sentence_with_the_reason(name):
    model = type(name, (torch.nn.Module,), {})()
    with pytest.raises(HeartError) as told:
        heart.enable(model)
    assert str(told.value) == f"HEART cannot serve {name}: {REFUSED[name]}; use another model."
    assert name not in FAMILIES
