"""Hostile files of every kind: whatever stands in them, the answer is a HeartError of one short sentence, or none.

Inputs are made by structure from valid ones, seeded. `make test` takes a few hundred of each kind, `make test-all` more
than 20,000 together.
"""

from __future__ import annotations

import collections
import hashlib
import json
import traceback

import pytest

from heart_attention import Calibration, HeartConfig, HeartError, files
from heart_attention.errors import LONGEST
from heart_attention.kernels.ops import build
from heart_attention.online import cost_model

from .kinds import KINDS
from .mutate import damaged, variants

QUICK, MANY = 250, 3000


@pytest.fixture
def attack(record_property):
    """Runs an attack; how many inputs it had stands in the run's summary."""

    def attacking(use, inputs, folder):
        record_property("hostile inputs", told_apart(use, inputs, folder))

    return attacking


def told_apart(use, inputs, folder):
    """How many inputs there were; fails with every foreign exception or long message, by where it came from."""
    found, count = collections.Counter(), 0
    for value in inputs:
        count += 1
        try:
            use(value, folder)
        except HeartError as error:
            if len(str(error)) > LONGEST or "\n" in str(error):
                found[f"a message of {len(str(error))} characters: {str(error)[:100]!r}"] += 1
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found[f"{type(error).__name__} at {last.filename}:{last.lineno}: {str(error)[:100]}"] += 1
    assert not found, f"{sum(found.values())} of {count}: " + "\n".join(
        f"{n} × {text}" for text, n in found.most_common(20)
    )
    return count


@pytest.mark.parametrize("name", KINDS)
def test_valid_objects_are_taken(name, tmp_path):
    for value in KINDS[name].valid:
        KINDS[name].use(value, tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_hostile_objects(attack, name, tmp_path):
    attack(KINDS[name].use, variants(KINDS[name].valid, QUICK, seed=1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_hostile_objects(attack, name, tmp_path):
    attack(KINDS[name].use, variants(KINDS[name].valid, MANY, seed=2), tmp_path)


READERS = {
    "config": HeartConfig.load,
    "calibration": Calibration.load,
    "cost table": lambda path: cost_model.load(str(path)),
    "results": files.read_json,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_bytes(attack, name, count, tmp_path):
    path, data = tmp_path / "x.json", json.dumps(KINDS[name].valid[0]).encode()

    def use(found, folder):
        path.write_bytes(found)
        READERS[name](path)

    attack(use, damaged(data, count, seed=3), tmp_path)


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_kernel_cache(attack, count, tmp_path, monkeypatch):
    """Whatever becomes of a library or its checksum, it counts as something to build again; nothing is loaded here."""
    monkeypatch.setenv("HEART_CACHE", str(tmp_path))
    library = build.folder() / "kernels-0.so"
    checksum, data = build.checksum_path(library), bytes(range(256)) * 4
    digest = hashlib.sha256(data).hexdigest().encode()

    def use(found, folder):
        library.write_bytes(found)
        checksum.write_bytes(digest)
        assert build._reason_to_build(library) or found == data

    def use_checksum(found, folder):
        library.write_bytes(data)
        checksum.write_bytes(found)
        assert build._reason_to_build(library) or found == digest

    attack(use, damaged(data, count, seed=4), tmp_path)
    attack(use_checksum, damaged(digest, count, seed=5), tmp_path)
    use(data, tmp_path)
    assert not build._reason_to_build(library)
