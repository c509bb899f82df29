"""Files: writes that are whole or absent, and JSON that may be hostile."""

import errno
import os
import resource
import stat
import sys
import time

import pytest

from heart_attention import files
from heart_attention.errors import HeartError, named, shown


@pytest.fixture(autouse=True)
def nothing_swept(monkeypatch):
    monkeypatch.setattr(files, "_swept", set())


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_umask_is_respected(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        path = files.write_atomic(tmp_path / "a.json", "1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_leftovers_are_swept_but_not_what_is_young_or_somebody_elses(tmp_path):
    old, young, other = (tmp_path / n for n in (".a.json.0123456789ab.tmp", ".b.0123456789ac.tmp", ".notes.tmp"))
    for path in (old, young, other):
        path.write_text("x")
    for path in (old, other):
        os.utime(path, (time.time() - 2 * files.STALE,) * 2)
    files.write_atomic(tmp_path / "c.json", "1")
    assert not old.exists() and young.exists() and other.exists()


def test_folders_of_the_users_are_never_swept(tmp_path):
    """Builds of other programs are named much as ours are; what lies beside a file that we write is not ours."""
    theirs = [tmp_path / name for name in (".build-debug", ".a.json.0123456789ab.tmp")]
    for folder in theirs:
        folder.mkdir()
        (folder / "x.o").write_bytes(b"1")
        os.utime(folder, (time.time() - 2 * files.STALE,) * 2)
    files.write_atomic(tmp_path / "c.json", "1")
    assert all((folder / "x.o").is_file() for folder in theirs)


@pytest.fixture
def homeless(tmp_path, monkeypatch):
    """A user without a home: the cache lies where everybody may write."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("HEART_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(files.Path, "home", no_home)
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"heart-attention-{os.getuid()}"


@pytest.mark.skipif(not hasattr(os, "getuid") or sys.platform == "darwin", reason="needs users, and no Library folder")
def test_a_cache_where_everybody_may_write_is_this_users_alone(homeless):
    assert files.cache_dir() == homeless and stat.S_IMODE(homeless.stat().st_mode) == 0o700
    homeless.chmod(0o777)
    with pytest.raises(HeartError, match="not this user's alone: remove it, or set HEART_CACHE"):
        files.cache_dir()
    homeless.rmdir()
    (elsewhere := homeless.with_name("elsewhere")).mkdir(mode=0o700)
    homeless.symlink_to(elsewhere)
    with pytest.raises(HeartError, match="not this user's alone"):
        files.cache_dir()


@pytest.mark.skipif(not hasattr(os, "getuid") or sys.platform == "darwin", reason="needs users, and no Library folder")
def test_a_system_without_a_temporary_folder(homeless, monkeypatch, tmp_path):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(files.tempfile, "gettempdir", none)
    with pytest.raises(HeartError, match="neither a home nor a temporary folder"):
        files.cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert files.cache_dir() == tmp_path / "cache" / "heart-attention"


@pytest.mark.parametrize("name", ["飛" * 80 + ".json", "x" * 250 + ".json"])
def test_every_name_that_a_file_can_have_can_be_written(tmp_path, name):
    assert files.write_atomic(tmp_path / name, "1").read_text() == "1"


def test_full_disk_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    path = files.write_atomic(tmp_path / "a.json", "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("text", ["[],", "{},", "[[]],", "0,"])
def test_many_small_values_are_refused_before_they_are_made(tmp_path, text):
    """60 MB of nested lists took a minute and 1.6 GB."""
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + text.encode() * ((60 << 20) // len(text)) + b"0]")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(HeartError, match="not a file of this kind"):
        files.read_json(path)
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # kB


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 500_000,
        b'{"a":' * 500_000,
        b"9" * 5000,
        b"\xff\xfe",
        b"",
        b'"\\ud800',
        b"NaN",
        b"[1e999999]x",
        b"\0" * 100,
    ],
)
def test_hostile_json_is_one_short_sentence(tmp_path, data):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(HeartError) as caught:
        files.read_json(path)
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 3000, "a\0b"])
def test_impossible_paths_are_one_short_sentence(tmp_path, name):
    with pytest.raises(HeartError) as caught:
        files.read_json(f"{tmp_path}/{name}")
    assert len(str(caught.value)) <= 300


def test_values_in_sentences_are_short():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (
        deep,
        "x" * 10**6,
        10**6000,
        list(range(10**5)),
        {"a": {"b": {"c": {"d": 1}}}},
        "two\nlines",
        float("nan"),
    ):
        text = shown(value)
        assert len(text) <= 60 and "\n" not in text
    assert shown("abc") == "'abc'" and shown(1.5) == "1.5"
    assert named("x" * 500).endswith("x") and len(named("x" * 500)) == 120
