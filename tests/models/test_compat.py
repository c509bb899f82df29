"""The private names of diffusers and torch that HEART uses are where they were, in the installed versions."""

import ast
import re
from pathlib import Path

import diffusers
import pytest
import tiny_models as tiny
import torch
from diffusers import hooks
from diffusers.models import attention_dispatch
from diffusers.models.transformers import transformer_wan

import heart_attention
from heart_attention.models import compat

SOURCE = Path(heart_attention.__file__).parent


def test_names_stand_where_they_were():
    processor = transformer_wan.WanAttnProcessor
    assert compat.DISPATCH in processor.__call__.__code__.co_names
    assert getattr(transformer_wan, compat.DISPATCH) is getattr(attention_dispatch, compat.DISPATCH)
    assert getattr(processor, compat.BACKEND, 1) is None and getattr(processor, compat.PARALLEL, 1) is None
    assert hasattr(torch.nn.functional, compat.SDPA)
    assert all(hasattr(torch.nn.Module(), name) for name in compat.PRE_HOOKS)
    assert compat.HookRegistry is hooks.HookRegistry and compat.ModelHook is hooks.ModelHook


def test_backends_by_name():
    assert compat.backend_name(None) == "native"
    assert compat.backend_name(attention_dispatch.AttentionBackendName.FLEX) == "flex"
    assert compat.backend_name("flash") == "flash"


def test_a_compiled_model_is_unwrapped():
    model = tiny.wan()
    assert compat.unwrapped(torch.compile(model)) is model and compat.unwrapped(model) is model


def test_remembered_children_are_forgotten():
    model = tiny.wan()
    compat.forget_child_registries(model)  # nothing there yet
    with model.cache_context("cond"):
        pass
    registry = model._diffusers_hook
    assert "_child_registries_cache" in vars(registry)
    compat.forget_child_registries(model)
    assert registry._child_registries_cache is None


def test_context_parallel_parts():
    from diffusers import ContextParallelConfig, ParallelConfig

    context = ContextParallelConfig(ulysses_degree=2)
    assert compat.context_parallel(ParallelConfig(context_parallel_config=context)) is context
    assert compat.context_parallel(None) is None and compat.context_parallel(tiny.wan()) is None
    assert compat.ulysses_anything(context) is False and hasattr(context, "_ulysses_mesh")


def test_the_installed_versions_are_those_that_were_checked():
    said = re.search(r"diffusers ([\d.]+) to ([\d.]+) and torch ([\d.]+) to ([\d.]+)", compat.__doc__).groups()
    number = lambda version: tuple(int(x) for x in re.findall(r"\d+", version)[:2])  # noqa: E731
    assert number(said[0]) <= number(diffusers.__version__) <= number(said[1])
    assert number(said[2]) <= number(torch.__version__) <= number(said[3])


@pytest.mark.parametrize("path", sorted((SOURCE / "models").rglob("*.py")), ids=lambda p: p.name)
def test_no_other_file_imports_private_names(path):
    if path.name == "compat.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "diffusers"):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            assert not any(part.startswith("_") and part != "__future__" for part in parts), node.module
