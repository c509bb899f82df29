"""Files on disk: the user's cache folder, writes that are whole or absent, size-checked JSON, a lock."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import HeartError


def cache_dir() -> Path:
    """The user's cache folder for HEART (`$HEART_CACHE`, else the platform's usual place), created if absent."""
    named = os.environ.get("HEART_CACHE")
    if named:
        path = Path(named)
    elif sys.platform == "darwin":
        path = Path.home() / "Library" / "Caches" / "heart-attention"
    elif os.name == "nt":
        path = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "heart-attention"
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "heart-attention"
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_atomic(path: str | os.PathLike, data: bytes | str) -> Path:
    """Write `data` to a temporary name in the same folder, flush it to disk and rename it: whole or absent."""
    path = Path(path)
    if path.is_dir():
        raise HeartError(f"{str(path)!r} is a folder: give the name of a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def write_json(path: str | os.PathLike, obj: Any) -> Path:
    """Write `obj` as JSON, atomically; NaN and infinity are refused because JSON has no such numbers."""
    return write_atomic(path, json.dumps(obj, indent=1, allow_nan=False) + "\n")


def _refuse_constant(name: str) -> None:
    raise HeartError(f"the file holds the number {name}, which is not finite; it is damaged, make it again")


def read_json(path: str | os.PathLike, limit: int = 64 << 20) -> Any:
    """Read a JSON file of at most `limit` bytes; every way it can be bad is a HeartError naming the file."""
    path = Path(path)
    if not path.is_file():
        raise HeartError(f"there is no file {str(path)!r}: check the path")
    size = path.stat().st_size
    if size > limit:
        raise HeartError(f"{path} has {size} bytes, more than the {limit} allowed: it is not a file of this kind")
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except HeartError as error:
        raise HeartError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise HeartError(f"{path} is not valid JSON ({error}): it is damaged or of another kind") from None


@contextlib.contextmanager
def locked(path: str | os.PathLike) -> Iterator[None]:
    """Hold an exclusive lock on `path` (a file made for the purpose) against other processes."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
