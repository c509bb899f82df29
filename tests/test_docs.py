"""Examples in the README and the docs run; links between pages lead somewhere."""

import importlib
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import heart_attention as heart

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = ("CHANGELOG.md", "CONTRIBUTING.md", "src/**/*.md", "tools/**/*.md", "tests/**/*.md")
MARKDOWN = [*PAGES, *sorted(p for pattern in ELSEWHERE for p in ROOT.glob(pattern))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)  # ```py blocks need a GPU or the hub: not run


@pytest.fixture
def registries():
    """What examples make known is forgotten afterwards."""
    from heart_attention import backbones, kernels, models
    from heart_attention.calibration.measure import velocity_error
    from heart_attention.evaluation import metrics

    tables = (
        kernels.registry.REGISTERED, models.FAMILIES, velocity_error._REGISTRY, metrics._METRICS, backbones.registry._REGISTERED,
    )  # fmt: skip
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


def anchors(page: Path) -> set[str]:
    """What a link into `page` can point at: its headings, as GitHub and mkdocs name them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def leads_nowhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return not target.exists() or bool(anchor and target.suffix == ".md" and anchor not in anchors(target))


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(page)))
    assert not [link for link in links if not link.startswith(("http:", "https:")) and leads_nowhere(page, link)]


def test_the_strict_build_refuses_what_leads_nowhere(tmp_path):
    pytest.importorskip("mkdocs", reason="comes with make docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    broken = ["nowhere.md", "limits.md#no-such-heading", "images/no-such-picture.png"]
    with open(tmp_path / "docs" / "index.md", "a") as page:
        page.writelines(f"\n![text]({t})\n" if t.endswith("png") else f"\n[text]({t})\n" for t in broken)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode
    assert not [t for t in broken if t not in done.stderr], done.stderr


def test_the_site_knows_every_page():
    listed = set(re.findall(r"(\S+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {p.name for p in (ROOT / "docs").glob("*.md")}


def test_every_error_sentence_is_in_the_table_of_errors():
    import importlib.util

    spec = importlib.util.spec_from_file_location("error_table", ROOT / "tools" / "error_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run python tools/error_table.py"
    assert sum(len(v) for v in module.errors().values()) > 50


def test_the_reference_has_every_public_name():
    """Each public object stands in docs/api.md once, under a path that leads to it."""
    text, found = (ROOT / "docs" / "api.md").read_text(), []
    for path, members in re.findall(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?", text, re.MULTILINE):
        try:
            module = importlib.import_module(path)
        except ImportError:
            module, name = importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]
            found.append(getattr(module, name))
            continue
        found += [getattr(module, name.strip()) for name in members.split(",")]
    public = {name: getattr(heart, name) for name in heart.__all__ if name != "__version__"}
    missing = {
        name for name, value in public.items()
        if not isinstance(value, types.ModuleType) and sum(one is value for one in found) != 1
    }  # fmt: skip
    assert not missing
