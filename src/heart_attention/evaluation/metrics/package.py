"""A package of the index, fetched by the user's own pip and checked by hash before anything in it is read."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from ...errors import HeartError


class Package(NamedTuple):
    """One file of the index: its project, version and SHA-256; `source` for its source archive, else its wheel."""

    name: str
    version: str
    digest: str
    source: bool = False


def checked(data: bytes, digest: str, what: str) -> bytes:
    """`data` if it has this SHA-256."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise HeartError(
            f"{what} has sha256 {actual[:16]}…, expected {digest[:16]}…: it is damaged or replaced, fetch it again"
        )
    return data


def download(package: Package, folder: Path, instead: str) -> Path:
    """Fetch it into `folder`; pip checks the hash before it touches the content. `instead` says what to do without."""
    listing = folder / "requirements.txt"
    listing.write_text(f"{package.name}=={package.version} --hash=sha256:{package.digest}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", str(listing)]
    kind = ["--no-binary", ":all:"] if package.source else []
    done = subprocess.run([*command, *kind, "-d", str(folder)], capture_output=True, text=True)
    found = list(folder.glob("*.tar.gz" if package.source else "*.whl"))
    if done.returncode or not found:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no message"]
        raise HeartError(f"pip could not fetch {package.name} {package.version} ({last[0][:150]}): {instead}")
    return found[0]
