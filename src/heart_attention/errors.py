"""The one error type that users of HEART meet, and how a value stands in its sentence."""

from __future__ import annotations

import reprlib
from typing import Any

LONGEST = 300  # characters of a message about a file's content


class HeartError(ValueError):
    """Something the caller can mend; its message is one sentence: what is wrong, its value, what to do."""


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother, _repr.maxlong = 3, 200, 200, 40


def shown(value: Any, most: int = 60) -> str:
    """A value as it stands in an error's sentence: escaped, on one line, of at most `most` characters.

    Values come from files that anybody may have written: nested a thousand deep, or integers of ten thousand digits.
    """
    try:
        text = _repr.repr(value)
    except Exception:  # an integer too long to print, or an object whose own repr fails
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str, keep: str = "") -> str:
    """The text with "?" for whatever cannot be shown, which would steer a terminal; characters in `keep` stay."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in keep else "?" for c in text)


def named(path: Any, most: int = 120) -> str:
    """A path in an error's sentence, printable; of a long one the end, which tells more."""
    text = printable(str(path))
    return text if len(text) <= most else f"...{text[3 - most :]}"
