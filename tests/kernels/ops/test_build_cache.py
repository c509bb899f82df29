"""The cache of compiled kernels: what is cut off, changed or somebody else's is never loaded."""

import logging
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from heart_attention import HeartConfig, files, kernels
from heart_attention.kernels.ops import build
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler")
posix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes are POSIX's")


SOURCE = "int heart_vector_floats(void) { return 4; }\n"  # what is built does not matter here, and this is quick


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and builds that are quick."""
    monkeypatch.setenv("HEART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "FLAG_SETS", (("-O0",),))
    monkeypatch.setattr(build, "_loaded", {})
    return tmp_path / "cache"


@pytest.fixture
def small(cache, monkeypatch, tmp_path):
    """The same, of a library with a single function."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "small.c").write_text(SOURCE)
    monkeypatch.setattr(build, "FOLDER", tmp_path / "csrc")
    return cache


def built():
    """A library that is built and installed, but not loaded: this process must not have it mapped when it is damaged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_loads", lambda target: True)
        path = build.folder() / f"kernels-{build._key(build._compiler())}.so"
        build._build_once(build._compiler(), path)
    assert path.is_file() and build.checksum_path(path).is_file()
    return path


def count_builds(monkeypatch):
    builds, real = [], build._build
    monkeypatch.setattr(build, "_build", lambda *args: (builds.append(1), real(*args)))
    return builds


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "no checksum", "wrong checksum", "long checksum"])
def test_damaged_library_is_built_again_once(small, monkeypatch, damage):
    path, builds = built(), count_builds(monkeypatch)
    data, checksum = path.read_bytes(), build.checksum_path(path)
    if damage == "truncated":
        os.truncate(path, len(data) // 2)
    elif damage == "changed":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "empty":
        os.truncate(path, 0)
    elif damage == "no checksum":
        checksum.unlink()
    else:
        checksum.write_text("0" * (64 if damage == "wrong checksum" else 1 << 20))
    assert build.load().heart_vector_floats() == 4 and builds == [1]
    build._loaded.clear()
    build.load()
    assert builds == [1]


LOAD = """
import pathlib, sys
from heart_attention.kernels.ops import build
build.FLAG_SETS, build.FOLDER = (("-O0",),), pathlib.Path(sys.argv[1])
print(build.load()._name)
"""


def test_truncated_library_does_not_kill_the_process(small):
    """The dynamic linker maps what the headers promise: touching pages that the file lacks is SIGBUS."""
    path = built()
    os.truncate(path, 4096)
    command = [sys.executable, "-c", LOAD, str(build.FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == str(path) and path.stat().st_size > 4096


@posix
def test_library_that_others_may_write_is_not_loaded(small, monkeypatch):
    path, builds = built(), count_builds(monkeypatch)
    path.chmod(0o666)
    build.load()
    assert builds == [1] and path.stat().st_mode & 0o022 == 0


@posix
@pytest.mark.parametrize("what", ["library", "checksum", "folder"])
def test_somebody_elses_files_are_not_loaded(small, monkeypatch, what):
    path, builds = built(), count_builds(monkeypatch)
    theirs = {"library": path, "checksum": build.checksum_path(path), "folder": path.parent}[what]
    real = build._foreign
    old = theirs.stat()

    def foreign(found, kind):  # a new file may be given an old one's inode: the time tells them apart
        same = (found.st_ino, found.st_ctime_ns) == (old.st_ino, old.st_ctime_ns)
        return "belongs to user 7, not to 8" if same else real(found, kind)

    monkeypatch.setattr(build, "_foreign", foreign)
    if what == "folder":
        assert "belongs to user 7" in build.reasons_not()[0] and not builds
        assert "belongs to user 7" in kernels.available()["cpu"][0]
    else:
        assert build.load() and builds == [1]


@posix
def test_a_stat_of_another_user_is_foreign(tmp_path):
    mine = tmp_path.lstat()
    assert not build._foreign(mine, build.stat.S_ISDIR)
    other = os.stat_result([*mine[:4], mine.st_uid + 1, *mine[5:]])
    assert "belongs to user" in build._foreign(other, build.stat.S_ISDIR)
    assert "symbolic link" in build._foreign(mine, build.stat.S_ISREG)


@posix
def test_a_link_in_place_of_the_library_is_not_followed(small, monkeypatch, tmp_path):
    path = built()
    target = tmp_path / "elsewhere.so"
    shutil.move(path, target)
    path.symlink_to(target)
    build.load()
    assert not path.is_symlink() and target.is_file()


@posix
def test_folder_that_others_may_write_is_not_used(cache):
    build.folder().chmod(0o777)
    assert "may be written by others" in build.reasons_not()[0]


def test_library_that_never_loads_gives_the_portable_kernel(small, monkeypatch, caplog):
    def broken(target, path):
        path.write_bytes(b"cut off")  # not into target, which is loaded: the process would die of it

    monkeypatch.setattr(build, "_install", broken)
    with caplog.at_level(logging.WARNING):  # without -v too
        assert "cannot be trusted" in build.reasons_not()[0]
        build.reasons_not()
    assert len([r for r in caplog.records if "the portable kernels serve" in r.message]) == 1
    assert len([r for r in caplog.records if r.message.startswith("building the C kernels, which")]) == 1
    assert kernels.choose(None, torch.zeros(1, 1, 8, 8)).name == "gather"


@pytest.mark.parametrize("text", ["gcc 'x", '"', "gcc \\"])
def test_compiler_with_an_unclosed_quote(cache, monkeypatch, text):
    monkeypatch.setenv("CC", text)
    assert "CC" in build.reasons_not()[0]


@posix
def test_a_compiler_that_complains_at_length_in_another_encoding(small, monkeypatch, tmp_path):
    compiler = tmp_path / "complaining-cc"
    compiler.write_text("#!/bin/sh\nprintf 'd\\351faut \\033[31m\\n\\n' >&2\nseq 999 >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    (reason,) = build.reasons_not()
    assert "does not compile the C kernels (d\ufffdfaut ?[31m 1 2 3" in reason
    assert reason.isprintable() and len(reason) <= 300


def test_leftovers_of_killed_builds_are_swept(small, monkeypatch):
    path = built()
    old, young = path.parent / ".build-old", path.parent / ".build-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "x.o").write_bytes(b"1")
    os.utime(old, (time.time() - 9999,) * 2)
    monkeypatch.setattr(files, "_swept", set())  # as in the next process
    built()
    assert not old.exists() and young.exists()


@posix
def test_user_without_a_name_or_home(tmp_path):
    """A container's user that the system does not know."""
    script = (
        "import os; os.environ.pop('HOME', None); os.environ.pop('XDG_CACHE_HOME', None)\n"
        "import pwd\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown\n"
        "from heart_attention.files import cache_dir\n"
        "print(cache_dir())"
    )
    env = {k: v for k, v in os.environ.items() if k != "HEART_CACHE"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**env, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path / f"heart-attention-{os.getuid()}")


def test_no_call_is_timed_while_kernels_are_built(cache, monkeypatch):
    """The first call of an engine builds; `stats` must not count it."""
    real = build._build

    def slow(*args):
        time.sleep(2.0)
        real(*args)

    monkeypatch.setattr(build, "_build", slow)
    engine = Engine(HeartConfig("xattention", 0.5, dense_steps=0, force_sparse=True), 1, 2)
    q = torch.randn(1, 2, 256, 16)
    engine.attend(CallContext(layer=0, step=0), q, q, q, torch.nn.functional.scaled_dot_product_attention)
    assert list(cache.glob("kernels*/kernels-*.so"))
    assert 0 < engine.stats()["time"]["total"] < 2.0
