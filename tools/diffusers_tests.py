"""Run diffusers' own tests without and with HEART on every video transformer, and compare which pass.

    python -m tools.diffusers_tests CHECKOUT [--files tests/pipelines/wan ...] [-- -k inference -x ...]

CHECKOUT is a folder of diffusers' source with its tests; nothing is fetched. With HEART every transformer of a served
class is enabled as soon as it is made, with thresholds of 1: all calls go through HEART and are computed as without it. The same
set of tests must pass; the script ends with 1 if one passes only without.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "HEART_ON_EVERY_TRANSFORMER"
FOLDERS = ("tests/pipelines", "tests/models/transformers")


def default_files(checkout: Path) -> list[str]:
    """The tests of pipelines and transformers that name a class which HEART serves."""
    from heart_attention.models.families.registry import FAMILIES

    named = re.compile(r"\b(" + "|".join(map(re.escape, FAMILIES)) + r")\b")
    found = [path for folder in FOLDERS for path in sorted((checkout / folder).rglob("test_*.py"))]
    return [str(path.relative_to(checkout)) for path in found if named.search(path.read_text(encoding="utf-8"))]


def run(checkout: Path, files: list[str], on: bool, more: list[str]) -> dict[str, str]:
    """The outcome of every test, by its id."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.diffusers_tests", "-p", "no:cacheprovider"]
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), VARIABLE: "1" if on else ""}
        subprocess.run([*command, f"--junitxml={report}", *files, *more], cwd=checkout, env=env, check=False)
        return outcomes(report)


def outcomes(report: Path) -> dict[str, str]:
    """passed, failed or skipped, of every test in pytest's report."""
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        bad = "failed" if kinds & {"failure", "error"} else "skipped"
        found[f"{case.get('classname')}::{case.get('name')}"] = bad if kinds else "passed"
    return found


def compare(without: dict[str, str], with_heart: dict[str, str]) -> list[str]:
    """The tests that pass without HEART and not with it."""
    return [name for name, outcome in without.items() if outcome == "passed" and with_heart.get(name) != "passed"]


def main(argv: list[str] | None = None) -> int:
    """Run both, print what differs."""
    words = list(sys.argv[1:] if argv is None else argv)
    more = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--files", nargs="+", help="tests to run (default: all that name a served transformer)")
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    files = args.files or default_files(args.checkout)
    if not files:
        parser.error(f"{args.checkout} holds no tests of video models: give a checkout of diffusers")
    without, with_heart = (run(args.checkout, files, on, more) for on in (False, True))
    lost = compare(without, with_heart)
    passed = [sum(v == "passed" for v in found.values()) for found in (without, with_heart)]
    print(f"{len(without)} tests: {passed[0]} pass without HEART, {passed[1]} with it")
    for name in lost:
        print(f"passes only without HEART: {name}")
    return 1 if lost or not passed[0] else 0


# ---------------------------------------- inside pytest


def pytest_configure(config) -> None:
    """Enable HEART on every transformer of a served class from now on."""
    if not os.environ.get(VARIABLE):
        return
    import diffusers

    from heart_attention.models.families.registry import FAMILIES

    for name in FAMILIES:
        cls = getattr(diffusers, name, None)
        if cls is not None:
            cls.__init__ = _enabling(cls, cls.__init__)


def _enabling(cls, init):
    """A constructor that ends with `heart.enable`."""
    import functools

    import heart_attention as heart

    @functools.wraps(init)
    def made(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if type(self) is cls:  # not while a subclass is still being made
            heart.enable(self, heart.HeartConfig("xattention", thresholds=1.0, dense_steps=0))

    return made


if __name__ == "__main__":
    sys.exit(main())
