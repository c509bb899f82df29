"""The examples point to hosts that are there."""

import importlib.util
import re
from pathlib import Path

import heart_attention as heart

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_comfyui_folder_is_a_custom_node():
    spec = importlib.util.spec_from_file_location("custom_node", EXAMPLES / "comfyui" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.NODE_CLASS_MAPPINGS) == set(module.NODE_DISPLAY_NAME_MAPPINGS) != set()


def test_the_vllm_omni_script_names_a_preset_and_the_variable():
    script = (EXAMPLES / "vllm_omni.sh").read_text()
    source = (Path(heart.__file__).parent / "hosts" / "vllm_omni.py").read_text()
    (preset,) = re.findall(r"HEART_VLLM_OMNI:-([\w.-]+)", script)
    assert preset in heart.PRESETS
    assert re.search(r'VARIABLE = "(\w+)"', source).group(1) in script
    assert re.search(r"SLOT = DiffusionAttentionBackendEnum\.(\w+)", source).group(1) in script


def test_the_docs_give_the_same_node():
    page = (EXAMPLES.parent / "docs" / "hosts.md").read_text()
    (line,) = re.findall(r'^echo "(from .+)"', page, re.M)
    scope = {}
    exec(line, scope)
    assert line in (EXAMPLES / "comfyui" / "__init__.py").read_text()
    assert set(scope["NODE_CLASS_MAPPINGS"]) == set(scope["NODE_DISPLAY_NAME_MAPPINGS"]) != set()
