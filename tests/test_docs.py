"""Examples in the README and the docs run; links between pages lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)  # ```py blocks need a GPU or the hub: not run


@pytest.fixture
def registries():
    """What examples make known is forgotten afterwards."""
    from heart_attention import kernels, models
    from heart_attention.calibration import error

    tables = (kernels._REGISTERED, models.FAMILIES, error._REGISTRY)
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before):
        table.clear()
        table.update(kept)


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_examples_run(page, tmp_path, monkeypatch, registries):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": f"example_{page.stem.replace('-', '_')}"}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), namespace)  # the examples are ours
    assert namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [t for t in targets if t and not t.startswith(("http:", "https:")) and not (page.parent / t).exists()]
    assert not missing


def test_the_site_knows_every_page():
    listed = set(re.findall(r"(\S+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {p.name for p in (ROOT / "docs").glob("*.md")}


def test_every_error_sentence_is_in_the_troubleshooting_page():
    import importlib.util

    spec = importlib.util.spec_from_file_location("error_table", ROOT / "tools" / "error_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run python tools/error_table.py"
    assert sum(len(v) for v in module.errors().values()) > 50
