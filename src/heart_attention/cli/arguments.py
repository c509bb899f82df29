"""Arguments that several commands have in common, written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import HeartError


def add_model(parser: Any) -> None:
    """Which model."""
    parser.add_argument("--model", default="tiny", help="embedded model (tiny, the default), a folder, or a hub id")


def add_size(parser: Any) -> None:
    """Steps, size and frames of a generation."""
    parser.add_argument("--steps", type=int)
    parser.add_argument("--size", help="WIDTHxHEIGHT")
    parser.add_argument("--frames", type=int)


def add_device(parser: Any) -> None:
    """Where and in what precision it runs."""
    parser.add_argument("--dtype", help="float32, bfloat16 or float16")
    parser.add_argument("--device")


def numbers(text: str, name: str, kind: Callable[[str], Any] = float) -> list[Any]:
    """Numbers that are separated by commas, at least one."""
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found:
        raise HeartError(f"{name} is {text!r}: write numbers separated by commas")
    return found
