"""Does a calibration fit: the model it is given to, and the run it is used in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import token_order
from ..errors import HeartError
from .fingerprint import differences, other_values

if TYPE_CHECKING:
    from .file import Calibration

log = logging.getLogger(__name__)


def check(calibration: Calibration, here: dict[str, Any], force: bool) -> None:
    """Raise unless the calibration was made for the model with this fingerprint; see `Calibration.check`."""
    if (here["layers"], here["heads"]) != (calibration.layers, calibration.heads):
        raise HeartError(
            f"the calibration is for {calibration.layers} layers of {calibration.heads} heads but this {here['class']} has "
            f"{here['layers']} of {here['heads']}: calibrate this model"
        )
    if calibration.model is None or force or calibration.forced:
        return
    if told := differences(calibration.model, here):
        raise HeartError(
            f"the calibration was made for another model ({told}): calibrate this one, or load it with force=True"
        )
    if other_values(calibration.model, here):
        if calibration.shipped:
            raise HeartError(
                "this calibration ships for the embedded model's own weights and this model has others: "
                "calibrate it with heart calibrate"
            )
        log.warning("The calibration was made for other weights of this model: calibrate again for exact figures.")


def size_differences(calibration: Calibration, size: Sequence[int | None], grid: Sequence[int] | None) -> list[str]:
    """Sentences on a video of another size, in pixels or in tokens."""
    told, mine = [], (calibration.height, calibration.width, calibration.frames)
    carries = "thresholds carry over, but the sparsity they give changes: calibrate at this size for an exact budget"
    if any(a is not None and b is not None and a != b for a, b in zip(size, mine)):
        now = [b if a is None else a for a, b in zip(size, mine)]
        told.append(f"calibrated at {_size(*mine)}, used at {_size(*now)}: {carries}")
    measured = calibration.settings.get("grid")
    if grid is not None and measured is not None and list(grid) != measured:
        here, there = ("×".join(map(str, g)) for g in (grid, measured))
        size_told = f" ({_size(*mine)})" if calibration.height else ""
        told.append(f"calibrated at {there} video tokens{size_told}, used at {here}: {carries}")
    return told


def step_differences(calibration: Calibration, steps: int | None) -> list[str]:
    """A sentence on another number of steps."""
    if steps is None or calibration.steps is None or steps == calibration.steps:
        return []
    return [
        f"calibrated with {calibration.steps} steps, used with {steps}: thresholds carry over, errors were measured on the "
        "other schedule"
    ]


def point_differences(
    calibration: Calibration, order: Any, backbone: dict[str, Any] | None, rest: str | None
) -> list[str]:
    """For a config in its simple form; one with points of its own takes them from here."""
    told, measured = [], calibration.settings.get("order")
    if order is not None and measured is not None and token_order.read(order) != token_order.read(measured):
        then, now = (o if isinstance(o, str) else "one for every head" for o in (measured, order))
        told.append(
            f"calibrated in token order {then!r}, used in {now!r}: use the calibration's order, or calibrate again"
        )
    if backbone is not None and calibration.backbone is not None:
        mine, here = _complete(calibration.backbone), _complete(backbone)
        if other := [k for k in {**mine, **here} if mine.get(k) != here.get(k)]:
            words = ", ".join(f"{k} {mine.get(k)}, used {here.get(k)}" for k in other)
            told.append(f"calibrated for another backbone ({words}): use the calibration's, or calibrate again")
    if rest is not None and calibration.rest not in (None, rest):
        told.append(f"calibrated with rest {calibration.rest!r}, used with {rest!r}: calibrate again with this rest")
    return told


def _complete(backbone: dict[str, Any]) -> dict[str, Any]:
    """Settings with those that a newer version added at their defaults; as they are for an unknown backbone."""
    from .. import backbones

    try:
        return backbones.from_dict(backbone).to_dict()
    except HeartError:
        return backbone


def _size(height: int | None, width: int | None, frames: int | None) -> str:
    return f"{width or '?'}×{height or '?'}, {frames or '?'} frames"
