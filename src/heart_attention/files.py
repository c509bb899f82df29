"""Files on disk: the user's cache folder, writes that are whole or absent, size-checked JSON, a lock."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import HeartError, named

STALE = 3600  # seconds after which a temporary file belongs to a process that was killed
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{12}\.tmp(\.\w+)?")
_swept: set[str] = set()  # folders, once a process


def cache_dir() -> Path:
    """The user's cache folder for HEART (`$HEART_CACHE`, else the platform's usual place), created if absent."""
    named_by_user = os.environ.get("HEART_CACHE")
    path = Path(named_by_user) if named_by_user else _usual_cache()
    try:
        if os.name != "nt" and path.parent == _temporary_folder() and not named_by_user:
            own_folder(path)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeartError(f"the cache folder {named(path)} cannot be made ({error.strerror}): set HEART_CACHE") from None
    return path


def own_folder(path: Path) -> Path:
    """Make a folder that holds code, or lies where everybody may write; refuse one that others may write to."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    mine = os.name == "nt" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    if not stat.S_ISDIR(found.st_mode) or not mine:
        raise HeartError(f"the folder {named(path)} is not this user's alone: remove it, or set HEART_CACHE")
    return path


def _usual_cache() -> Path:
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "heart-attention"
        if os.name == "nt":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "heart-attention"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heart-attention"
    except (RuntimeError, KeyError):  # a container's user that the system does not know, without HOME
        if (folder := _temporary_folder()) is None:
            raise HeartError("there is neither a home nor a temporary folder for the cache: set HEART_CACHE") from None
        return folder / f"heart-attention-{os.getuid()}"


def _temporary_folder() -> Path | None:
    """The system's; None where it may not be written to."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None


def write_atomic(path: str | os.PathLike, data: bytes | str) -> Path:
    """Write `data` to a temporary name in the same folder, flush it to disk and rename it: whole or absent."""
    path = Path(path)
    if path.is_dir():
        raise HeartError(f"{named(path)!r} is a folder: give the name of a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    _write_and_rename(path, data.encode() if isinstance(data, str) else data)
    return path


def temporary_name(path: Path, suffix: str = "") -> Path:
    """A name beside `path` that `sweep` knows as a leftover; `suffix` for programs that go by it.

    Names have at most 255 bytes, and a character up to four.
    """
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(6)}.tmp{suffix}")


def _write_and_rename(path: Path, data: bytes) -> None:
    temporary = temporary_name(path)
    handle = os.open(
        temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666
    )  # less the umask
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def sweep(folder: Path, builds: str = "") -> None:
    """Remove temporary files that killed processes left here; once a folder and process.

    `builds`: what names of build folders begin with, where the folder is ours alone. Elsewhere they are the user's.
    """
    key = f"{folder}/{builds}"
    if key in _swept:
        return
    _swept.add(key)
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime <= STALE:
                continue
            if builds and entry.name.startswith(builds) and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif _LEFTOVER.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)


def write_json(path: str | os.PathLike, obj: Any) -> Path:
    """Write `obj` as JSON, atomically; NaN and infinity are refused because JSON has no such numbers."""
    return write_atomic(path, json.dumps(obj, indent=1, allow_nan=False) + "\n")


def _refuse_constant(name: str) -> None:
    raise HeartError(f"the file holds the number {name}, which is not finite; it is damaged, make it again")


def read_json(path: str | os.PathLike, limit: int = 64 << 20) -> Any:
    """Read a JSON file of at most `limit` bytes; every way it can be bad is a HeartError naming the file."""
    path = Path(path)
    data = read_bytes(path, limit)
    # Counted before anything is made: 60 MB of "[]," would be 20 million lists. Real files have far longer values.
    lists, values = data.count(b"[") + data.count(b"{"), data.count(b",")
    if lists > limit >> 6 or values > limit >> 3:
        raise HeartError(f"{named(path)} has {lists} lists and {values} values: it is not a file of this kind")
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except HeartError as error:
        raise HeartError(f"{named(path)}: {error}") from None
    except (ValueError, RecursionError) as error:
        why = str(error)[:100]
        raise HeartError(f"{named(path)} is not valid JSON ({why}): it is damaged or of another kind") from None


def read_bytes(path: Path, limit: int) -> bytes:
    """A file of at most `limit` bytes; every way it can be bad is a HeartError naming it."""
    try:
        if not path.is_file():
            raise HeartError(f"there is no file {named(path)!r}: check the path")
        size = path.stat().st_size
        if size > limit:
            raise HeartError(
                f"{named(path)} has {size} bytes, more than the {limit} allowed: it is not a file of this kind"
            )
        return path.read_bytes()
    except OSError as error:
        raise HeartError(f"{named(path)} cannot be read ({error.strerror}): check the path and its rights") from None


@contextlib.contextmanager
def locked(path: str | os.PathLike, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `path` (a file made for the purpose) against other processes; without `wait`, or OSError."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
