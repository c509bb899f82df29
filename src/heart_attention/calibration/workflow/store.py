"""The work folder of a running calibration: a plan, trajectories, and one record a finished piece of work.

Every file is whole or absent. A record carries the plan's hash, its own name and a checksum of its content, so a
record of another plan, a half-written or an altered one is never used: it counts as missing and is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import HeartError
from ...files import locked, read_json, write_json
from ..measure.trajectory import Trajectories

log = logging.getLogger(__name__)

SCHEMA = 1


def canonical(value: Any) -> str:
    """The one JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


class Store:
    """A work folder that belongs to one plan."""

    def __init__(self, folder: str | os.PathLike, plan: dict[str, Any], resume: bool = True):
        self.folder, self.plan = Path(folder), json.loads(canonical(plan))
        self.hash = digest(self.plan)
        self.trajectories = Trajectories(self.folder / "trajectories")
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
        self._claim(resume)

    def _claim(self, resume: bool) -> None:
        """Make the folder this plan's, or raise; a plan that ended before anything was finished gives way."""
        path = self.folder / "plan.json"
        if not path.exists() or self._given_up(path):
            if self._leftovers():
                raise HeartError(
                    f"the work folder {self.folder} has records but no plan: they cannot be trusted, give another folder"
                )
            with self.writing():
                write_json(path, {"schema": SCHEMA, "hash": self.hash, "plan": self.plan})
            return
        known = read_json(path)
        if (
            not isinstance(known, dict)
            or known.get("schema") != SCHEMA
            or digest(known.get("plan")) != known.get("hash")
        ):
            raise HeartError(f"the plan in {path} is damaged or of another version: give another work folder")
        if known["hash"] != self.hash:
            changed = ", ".join(_differences(known["plan"], self.plan))
            raise HeartError(
                f"the work folder {self.folder} belongs to another calibration (different: {changed}): give another "
                "folder, or the settings it was started with"
            )
        if not resume and self._leftovers():
            raise HeartError(f"the work folder {self.folder} has records already: resume, or give another folder")

    def _leftovers(self) -> bool:
        return any((self.folder / "records").glob("*.json"))

    def _given_up(self, path: Path) -> bool:
        """Whether another plan left the folder with nothing finished, and nobody works in it now."""
        if self._leftovers() or any((self.folder / "trajectories").glob("*.json")):
            return False
        try:
            with locked(self.folder / ".lock", wait=False):
                return read_json(path).get("hash") != self.hash
        except OSError:  # somebody holds the lock
            return False
        except (HeartError, AttributeError):
            return True

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what the file system refuses into one sentence."""
        try:
            yield
        except OSError as error:
            raise HeartError(
                f"the work folder {self.folder} cannot be written ({error.strerror or error}): what is finished is kept; "
                "mend that and start again to go on"
            ) from error

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out of the folder."""
        with self.writing():
            lock = locked(self.folder / ".lock")
            lock.__enter__()
        try:
            self._claim(resume=True)  # another plan may have taken the folder meanwhile
            yield
        finally:
            lock.__exit__(None, None, None)

    def path(self, name: str) -> Path:
        """Where a record lies."""
        return self.folder / "records" / f"{name}.json"

    def get(self, name: str) -> Any:
        """A record's value, or None if it is missing, damaged or not of this plan."""
        path = self.path(name)
        if not path.exists():
            return None
        try:
            record = read_json(path, 1 << 30)
            whole = (
                record["plan"] == self.hash and record["name"] == name and record["sha256"] == digest(record["value"])
            )
        except (HeartError, KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            log.warning("The record %s is damaged or of another plan; it is made again.", path)
            return None
        return record["value"]

    def put(self, name: str, value: Any) -> Any:
        """Store a record; returns the value as it will be read back."""
        value = json.loads(canonical(value))
        with self.writing():
            write_json(self.path(name), {"plan": self.hash, "name": name, "sha256": digest(value), "value": value})
        return value


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
