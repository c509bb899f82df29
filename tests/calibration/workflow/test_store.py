"""The work folder: records are whole and of this plan, or they count as missing."""

from __future__ import annotations

import contextlib
import json

import pytest

from heart_attention.calibration.workflow.store import Store, canonical, digest
from heart_attention.errors import HeartError

PLAN = {"method": "probes", "seed": 0, "candidates": (0.8, 0.9)}


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "work", PLAN)


def test_canonical_json_is_one_text():
    assert canonical({"b": 1, "a": (1, 2)}) == canonical({"a": [1, 2], "b": 1}) == '{"a":[1,2],"b":1}'
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1}) != digest({"a": 2, "b": 2})
    with pytest.raises(ValueError):
        canonical(float("nan"))


def test_a_record_comes_back_as_it_was_put(store):
    assert store.get("x") is None
    assert store.put("x", {"error": 0.1, "pair": (1, 2)}) == {"error": 0.1, "pair": [1, 2]} == store.get("x")
    assert Store(store.folder, PLAN).get("x") == store.get("x")


@pytest.mark.parametrize("harm", ["cut", "value", "name", "plan", "list"])
def test_a_damaged_record_counts_as_missing_and_is_told(store, harm, caplog):
    store.put("x", {"error": 0.1})
    path = store.path("x")
    record = json.loads(path.read_text())
    text = {
        "cut": path.read_text()[:20],
        "value": json.dumps({**record, "value": {"error": 0.2}}),
        "name": json.dumps({**record, "name": "y"}),
        "plan": json.dumps({**record, "plan": "0" * 64}),
        "list": "[]",
    }[harm]
    path.write_text(text)
    assert store.get("x") is None and "made again" in caplog.text
    store.put("x", {"error": 0.1})
    assert store.get("x") == {"error": 0.1}


OTHER = {**PLAN, "seed": 1, "method": "joint"}


def test_the_folder_belongs_to_one_plan(store):
    store.put("x", 1)
    with pytest.raises(HeartError, match=r"another calibration \(different: method, seed\)"):
        Store(store.folder, OTHER)


@pytest.mark.parametrize("plan", [None, "[]", '{"hash": 1', "{}"])
def test_a_start_that_failed_does_not_keep_the_folder(store, plan):
    """Nothing was finished: another plan may have the folder, and the first one may not go on behind its back."""
    if plan is not None:
        (store.folder / "plan.json").write_text(plan)
    other = Store(store.folder, OTHER)
    assert json.loads((store.folder / "plan.json").read_text())["hash"] == other.hash
    with other.held():
        other.put("x", 1)
    with pytest.raises(HeartError, match="another calibration"), store.held():
        pass
    with other.held():  # the lock is free again
        assert other.get("x") == 1


def test_a_folder_somebody_works_in_is_not_taken(store):
    pytest.importorskip("fcntl")
    with store.held(), pytest.raises(HeartError, match="another calibration"):
        Store(store.folder, OTHER)


def test_records_without_resume_or_without_a_plan_are_refused(store):
    Store(store.folder, PLAN, resume=False)  # nothing there yet
    store.put("x", 1)
    with pytest.raises(HeartError, match="records already"):
        Store(store.folder, PLAN, resume=False)
    (store.folder / "plan.json").unlink()
    with pytest.raises(HeartError, match="records but no plan"):
        Store(store.folder, PLAN)


def test_only_one_process_holds_the_folder(store):
    fcntl = pytest.importorskip("fcntl")
    for held in (True, False):
        with store.held() if held else contextlib.nullcontext(), open(store.folder / ".lock", "a+b") as lock:
            expected = pytest.raises(BlockingIOError) if held else contextlib.nullcontext()
            with expected:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HeartError, match="cannot be written") as caught:
        Store(tmp_path / "file" / "work", PLAN)
    assert "\n" not in str(caught.value)
