"""Hostile variants of a valid JSON object: one to three changes at random places, seeded."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any


def _nested(depth: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def hostile(chance: random.Random) -> Any:
    """A value that nobody expects; objects that are dear to make are made anew only when drawn."""
    simple = (
        None, True, False, -1, 0, 1, 2, 7, 0.5, -0.5, 1e-320, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**70), 10**400,
        float("nan"), float("inf"), -float("inf"), "", "x", "abc", "inf", "-inf", "nan", "1", "1e5", "true", "raster",
        "tiles", "4x4x4", "0x0x0", "99999x1x1", "²x1x1", "drop", "mean", "auto", "TMR", "svg2", "xattention", "order",
        "\0", "\x1b[31m", "\ud800", "../../etc/passwd", "/etc/passwd", "a\nb", "heart-calibration/1", "HeartConfig",
        [], {}, [[]], [{}], {"": None}, [None], ["x"], [True], [1, "x"], [[1], [1, 2]], [0.9, 0.5], {"name": "svg2"},
        {"name": "xattention", "stride": 0}, {"_type": "TMR", "_version": 1, "_data": {}}, {"points": []},
    )  # fmt: skip
    large = (
        lambda: "x" * 100_000, lambda: list(range(3000)), lambda: {str(i): i for i in range(3000)},
        lambda: _nested(900, list), lambda: _nested(900, dict), lambda: _nested(5, list), lambda: [[0.5] * 40] * 40,
        lambda: 10**4000, lambda: _nested(30_000, list),
    )  # fmt: skip
    return copy.deepcopy(chance.choice(simple)) if chance.random() < 0.9 else chance.choice(large)()


def _places(value: Any, found: list | None = None) -> list[tuple[Any, Any]]:
    """Every (container, key) inside."""
    found = [] if found is None else found
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        _places(inner, found)
    return found


def _change(value: Any, chance: random.Random) -> Any:
    places = _places(value)
    if not places or chance.random() < 0.02:
        return hostile(chance)
    container, key = chance.choice(places)
    kind = chance.randrange(8)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[str(hostile(chance))[:50] if chance.random() < 0.5 else key + "x"] = container.pop(key)
    elif kind == 2 and isinstance(container, list):
        container.insert(chance.randint(0, len(container)), copy.deepcopy(container[key]))
    elif kind == 3:
        container[key] = [container[key]]
    elif kind == 4:
        other, name = chance.choice(places)
        container[key] = copy.deepcopy(other[name])
    elif kind == 5 and isinstance(container[key], int | float) and not isinstance(container[key], bool):
        container[key] = container[key] * chance.choice((-1, 0, 10, 1e9, 0.1, 1e-9, 2**40)) + chance.choice((0, 1, 0.5))
    else:
        container[key] = hostile(chance)
    return value


def variants(valid: list[Any], count: int, seed: int) -> Iterator[Any]:
    """`count` hostile variants of these objects, the same for the same seed."""
    chance = random.Random(seed)
    for _ in range(count):
        value = copy.deepcopy(chance.choice(valid))
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            try:
                value = _change(value, chance)
            except (RecursionError, OverflowError):  # a change inside something nested 30,000 deep: hostile enough
                break
        yield value


def damaged(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """`count` files that were cut off, changed in some bytes, or written over by something else."""
    chance = random.Random(seed)
    for _ in range(count):
        out, kind = bytearray(data), chance.randrange(4)
        if kind == 0:
            del out[chance.randrange(len(out)) :]
        elif kind == 1:
            for _ in range(chance.randint(1, 8)):
                out[chance.randrange(len(out))] = chance.randrange(256)
        elif kind == 2:
            start = chance.randrange(len(out))
            out[start : start + chance.randint(1, 64)] = chance.randbytes(chance.randint(0, 64))
        else:
            start = chance.randrange(len(out))
            out[start:start] = chance.choice(
                (b"[" * 5000, b'{"a":' * 2000, b"9" * 5000, b"\0" * 100, b"\xff\xfe", b"NaN")
            )
        yield bytes(out)
