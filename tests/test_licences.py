"""Every dependency and extra stands in docs/licences.md with a reason, and nothing stands there that is not brought."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT = (ROOT / "docs" / "licences.md").read_text()


def rows(heading):
    """The cells of the table below a heading."""
    part = TEXT.split(f"## {heading}")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_dependency_has_a_licence_and_a_reason():
    needed = {re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["dependencies"]}
    found = {name: row for row in rows("What an installation brings") for name in row[0].split(", ")}
    assert set(found) == needed
    assert all(licence and reason for _, licence, reason in found.values())


OURS = {"test", "test-all", "lint", "docs"}  # for working on HEART: told of in one row


def test_every_extra_is_told():
    told = {name.strip("`"): row for row in rows("Extras") for name in row[0].split(", ")}
    assert set(told) == set(PROJECT["optional-dependencies"])
    for extra in set(told) - OURS:
        for requirement in PROJECT["optional-dependencies"][extra]:
            assert re.match(r"[\w-]+", requirement)[0].lower() in told[extra][1].lower(), (extra, requirement)
