"""Compiles the C kernels on first use into the user's cache folder and loads them.

A library is code, so only what this user built is ever loaded: it lies in a folder that nobody else may write to, and
belongs, like the checksum beside it, to this user. A library that is cut off, changed or not ours is never opened by
the dynamic linker (a truncated one would end the process with SIGBUS): it is built again, once.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from ...errors import HeartError, named, printable, shown
from ...files import cache_dir, locked, sweep, write_atomic

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
BUILDS = ".build-"  # what names of folders begin with in which the compiler works

_PROCESS = os.getpid()
_loaded: dict[tuple, ctypes.CDLL | BuildError] = {}  # by what in the environment decides it


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
        except (HeartError, OSError, subprocess.SubprocessError) as error:
            _loaded[key] = BuildError(f"building the C kernels failed ({str(error)[:200]})")
        if isinstance(_loaded[key], BuildError):
            log.warning("the portable kernels serve: %s", _loaded[key])
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
    path = folder() / f"kernels-{_key(compiler)}.so"
    _build_once(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("the compiled kernels %s cannot be loaded (%s); building them again", path, error)
        path.unlink(missing_ok=True)
    _build_once(compiler, path)
    return ctypes.CDLL(str(path))


def folder() -> Path:
    """This user's own folder of compiled kernels: nobody else may write to it, else it is not used."""
    path = cache_dir() / ("kernels" if not hasattr(os, "getuid") else f"kernels-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    if reason := _foreign(path.lstat(), stat.S_ISDIR):
        raise BuildError(f"the folder {named(path)} {reason}: remove it, or set HEART_CACHE")
    sweep(path, BUILDS)
    return path


def _foreign(found: os.stat_result, is_kind: Callable[[int], bool]) -> str:
    """Why something in the cache was not put there by this user; empty if it was."""
    if not is_kind(found.st_mode):
        return "is not what it should be, or a symbolic link"
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        return f"belongs to user {found.st_uid}, not to {os.getuid()}"
    if os.name != "nt" and found.st_mode & 0o022:
        return f"may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def checksum_path(path: Path) -> Path:
    """The file beside a library that holds its SHA-256."""
    return path.with_name(f"{path.name}.sha256")


def _reason_to_build(path: Path) -> str:
    """Why the library cannot be loaded as it is: absent, cut off, changed, or somebody else's; empty if it can."""
    checksum = checksum_path(path)
    for file in (path, checksum):
        try:
            reason = _foreign(file.lstat(), stat.S_ISREG)
        except FileNotFoundError:
            return f"there is no {file.name}"
        if reason:
            return f"{file.name} {reason}"
    if hashlib.sha256(path.read_bytes()).hexdigest() != checksum.read_bytes()[:100].decode("ascii", "replace"):
        return f"{path.name} does not have the checksum beside it"
    return ""


def _build_once(compiler: list[str], path: Path) -> None:
    """Build unless a library is there that may be loaded, perhaps made by another process meanwhile."""
    if not _reason_to_build(path):
        return
    with locked(path.with_suffix(".lock")):
        reason = _reason_to_build(path)
        if not reason:
            return
        log.warning("building the C kernels, which takes some seconds (%s)", reason)  # whoever waits wants to know why
        for file in (path, checksum_path(path)):
            file.unlink(missing_ok=True)
        _build(compiler, path)
        if reason := _reason_to_build(path):
            raise BuildError(f"the C kernels were built but cannot be trusted ({reason})")


def _compiler() -> list[str]:
    given = os.environ.get("CC")
    for command in [given] if given else ["cc", "gcc", "clang"]:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise BuildError(f"CC is {shown(command)}, which cannot be read ({error})") from None
        if words and shutil.which(words[0]):
            return words
    raise BuildError(
        f"CC names {shown(given)}, which is not there" if given else "there is no C compiler (cc, gcc, clang)"
    )


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
    with tempfile.TemporaryDirectory(prefix=BUILDS, dir=path.parent) as place:
        target = Path(place) / path.name
        for flags in FLAG_SETS:
            command = [*compiler, *flags, *COMMON, "-o", str(target), *map(str, sources()), "-lm"]
            log.info("building the C kernels: %s", shlex.join(command))
            done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False)
            if done.returncode == 0 and _loads(target):
                _install(target, path)
                return
            complaint = complaint or _one_line(done.stderr)
    raise BuildError(
        f"{_one_line(shlex.join(compiler).encode(), 80)} does not compile the C kernels ({complaint or 'not loadable'})"
    )


def _one_line(told: bytes, most: int = 150) -> str:
    """The beginning of what a compiler says, in whatever encoding, as it can stand in a sentence."""
    return printable(" ".join(told[:4000].decode(errors="replace").split()))[:most]


def _install(target: Path, path: Path) -> None:
    """Put library and checksum in place, both flushed to disk; a crash between the two only means another build."""
    target.chmod(0o700)
    with open(target, "rb+") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
        os.fsync(file.fileno())
    os.replace(target, path)
    write_atomic(checksum_path(path), digest).chmod(0o600)


def _loads(target: Path) -> bool:
    """Whether the linker finds all it needs, e.g. an OpenMP library."""
    assert torch.__version__  # torch is in first, so its own OpenMP library serves both: one pool of threads
    try:
        ctypes.CDLL(str(target))
    except OSError as error:
        log.info("built but not loadable: %s", error)
        return False
    return True
