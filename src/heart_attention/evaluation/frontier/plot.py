"""The front as a picture: for the report page, and as a file of its own."""

from __future__ import annotations

from pathlib import Path

from ...errors import HeartError
from ...files import write_atomic
from .. import tables
from ..methods import HEART
from ..report import curves, picture
from . import front

TITLES = {"attention": "attention speed-up over dense", "total": "end-to-end speed-up over dense"}


def svg(results: dict, axis: str = "attention") -> str:
    """PSNR against speed-up, a curve a family."""
    found = front.places(results, axis)
    lines = front.curves(found)
    ordered = sorted(lines, key=lambda name: name != HEART)  # the first colour is HEART's
    families = {name: [_spot(place) for place in lines[name]] for name in ordered}
    return curves.curves(families, front.unbeaten(found), TITLES[axis], "PSNR dB", f"quality against {axis} speed-up")


def _spot(place: front.Place) -> curves.Spot:
    _, half = tables.interval(list(place.psnr.values()))
    return curves.Spot(place.name, place.name.partition("@")[2], place.speed, place.mean(), half)


def check_suffix(out: str | Path) -> None:
    """Raise unless a picture can be written under this name."""
    if Path(out).suffix.lower() != ".svg":
        raise HeartError(f"the plot cannot be written to {str(out)!r}: give a name that ends in .svg")


def write(results: dict, out: str | Path, axis: str = "attention") -> Path:
    """The picture as a file (.svg) that needs nothing around it."""
    check_suffix(out)
    opened = svg(results, axis).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return write_atomic(out, opened.replace(">", f"><style>{picture.STYLE}{curves.CSS}</style>", 1))
