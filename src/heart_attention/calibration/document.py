"""How a calibration's tables stand in its file: an axis of phases always, a line for each layer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ..errors import HeartError

BY_PHASE = ("choice", "E", "S", "cost", "bands")  # in memory their axis of phases is there only if there are several


def saved(name: str, value: Any, one_phase: bool) -> Any:
    """A field as plain JSON types."""
    if not isinstance(value, np.ndarray):
        return value
    return [value.tolist()] if name in BY_PHASE and one_phase else value.tolist()


def without_phase(data: dict[str, Any]) -> dict[str, Any]:
    """Tables of a file, [phases][layers]…, as they are in memory: one phase has no axis of its own."""
    choice = data.get("choice")
    if not isinstance(choice, list) or len(choice) != 1:
        return data
    out = dict(data)
    for name in BY_PHASE:
        if name in out:
            if not isinstance(out[name], list) or len(out[name]) != 1:
                raise HeartError(f"the calibration's {name} is not for one phase as its choice is: it is damaged")
            out[name] = out[name][0]
    return out


def _lines(value: Any) -> str:
    """JSON on one line, but a table with a line for each row of its first axes."""
    dump = lambda v: json.dumps(v, separators=(",", ":"), allow_nan=False)  # noqa: E731
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        return "[" + _lines(value[0]) + "]"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n  " + ",\n  ".join(map(dump, value)) + "\n ]"
    return dump(value)


def text(data: dict[str, Any]) -> str:
    """The file's text: equal for equal content."""
    return "{\n" + ",\n".join(f' "{name}": {_lines(value)}' for name, value in data.items()) + "\n}\n"
