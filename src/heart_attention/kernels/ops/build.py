"""Compiles the C kernels on first use into the user's cache folder and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import torch

from ...files import cache_dir, locked

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parents[1] / "csrc"
# Tried in this order; what the compiler or the machine does not have is left out.
FLAG_SETS = (
    ("-O3", "-march=native", "-fopenmp"),
    ("-O3", "-march=native"),
    ("-O2",),
)
COMMON = ("-std=gnu11", "-shared", "-fPIC")
TIMEOUT = 120  # seconds one attempt may take

_PROCESS = os.getpid()
_loaded: dict[tuple, ctypes.CDLL | BuildError] = {}


class BuildError(RuntimeError):
    """The C kernels cannot be built or loaded here; the message says why."""


def load() -> ctypes.CDLL:
    """The compiled library, built if need be; raises BuildError with the reason, and remembers it."""
    key = tuple(os.environ.get(name) for name in ("HEART_NO_COMPILER", "CC", "HEART_CACHE"))
    if key not in _loaded:
        try:
            _loaded[key] = _load()
        except BuildError as error:
            _loaded[key] = error
        except (OSError, subprocess.SubprocessError) as error:
            _loaded[key] = BuildError(f"building the C kernels failed ({error})")
    found = _loaded[key]
    if isinstance(found, BuildError):
        raise found
    return found


def reasons_not() -> list[str]:
    """Why there is no C code here; empty if there is."""
    try:
        load()
    except BuildError as error:
        return [str(error)]
    return []


def call(name: str, form: struct.Struct, *arguments: int | float) -> int:
    """Call a C function with its arguments as one struct, packed in one go; what it returns.

    All C files take their arguments so. After a long kernel every line of Python is cold, and building a struct field by
    field took as long as a block of queries.
    """
    return getattr(load(), name)(form.pack(*arguments))


def threads() -> int:
    """As many as PyTorch uses; one in a forked child, where OpenMP's threads are gone."""
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


def sources() -> list[Path]:
    """All C files of this folder; they make one library."""
    return sorted(FOLDER.glob("*.c"))


def _load() -> ctypes.CDLL:
    if os.environ.get("HEART_NO_COMPILER", "0") not in ("", "0"):
        raise BuildError("HEART_NO_COMPILER is set, so the C kernels are not built")
    compiler = _compiler()
    path = cache_dir() / f"kernels-{_key(compiler)}.so"
    if not path.exists():
        _build_once(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("the compiled kernels %s cannot be loaded (%s); building them again", path, error)
        path.unlink(missing_ok=True)
    _build_once(compiler, path)
    return ctypes.CDLL(str(path))


def _build_once(compiler: list[str], path: Path) -> None:
    """Build unless another process did while this one waited for the lock."""
    with locked(path.with_suffix(".lock")):
        if not path.exists():
            _build(compiler, path)


def _compiler() -> list[str]:
    named = os.environ.get("CC")
    for command in [named] if named else ["cc", "gcc", "clang"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise BuildError(f"CC names {named!r}, which is not there" if named else "there is no C compiler (cc, gcc, clang)")


def _key(compiler: list[str]) -> str:
    """Changes with the sources, the compiler and the CPU: a cache folder may be shared by unlike machines."""
    digest = hashlib.sha256()
    for source in sorted([*sources(), *FOLDER.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=TIMEOUT, check=False).stdout
    digest.update(version + repr((compiler, FLAG_SETS, COMMON)).encode() + cpu_flags().encode())
    return digest.hexdigest()[:24]


def cpu_flags() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = [line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name")]
    return f"{platform.machine()} " + " ".join(dict.fromkeys(first))


def _build(compiler: list[str], path: Path) -> None:
    """Compile to a temporary name and rename: the library is whole or absent."""
    complaint = ""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as folder:
        target = Path(folder) / path.name
        for flags in FLAG_SETS:
            command = [*compiler, *flags, *COMMON, "-o", str(target), *map(str, sources()), "-lm"]
            log.info("building the C kernels: %s", shlex.join(command))
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
            if done.returncode == 0 and _loads(target):
                os.replace(target, path)
                return
            complaint = complaint or done.stderr.strip()[:300]
    raise BuildError(f"{shlex.join(compiler)} does not compile the C kernels ({complaint or 'not loadable'})")


def _loads(target: Path) -> bool:
    """Whether the linker finds all it needs, e.g. an OpenMP library."""
    assert torch.__version__  # torch is in first, so its own OpenMP library serves both: one pool of threads
    try:
        ctypes.CDLL(str(target))
    except OSError as error:
        log.info("built but not loadable: %s", error)
        return False
    return True
