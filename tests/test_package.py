"""The package as it is built: every file that is not Python is in it, and no pattern is there for nothing."""

import re
import tomllib
from pathlib import Path

import heart_attention

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "heart_attention"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def data_files() -> set[Path]:
    files = {p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    return {p for p in files if p.suffix != ".py"}


def test_patterns_of_package_data_match_every_file_and_none_is_idle():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["heart_attention"]
    matched = {pattern: {p for p in PACKAGE.glob(pattern) if p.is_file()} for pattern in patterns}
    assert [pattern for pattern, files in matched.items() if not files] == []
    assert set().union(*matched.values()) == data_files()


def test_the_version_has_one_place():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "heart_attention.__version__"}
    assert "version" not in PROJECT["project"]
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest and latest[1] == heart_attention.__version__


def test_sets_name_only_what_the_makefile_asks_for():
    makefile = (ROOT / "Makefile").read_text()
    asked = set(re.findall(r"\$\(STAMP\)-([\w-]+)", makefile))
    assert {"test", "test-all", "lint", "docs"} <= asked <= set(PROJECT["project"]["optional-dependencies"])
