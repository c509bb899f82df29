"""Runs the studies that are wanted, sharing what they can, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import adjacent, drift, frequency, iou, response, timesteps


def run(wanted: Sequence[str], pipe, control, backbone, call: dict, prompts: list[str], out: Path) -> dict[str, dict]:
    """Name → finding; the three studies of adjacent steps share one pass over the generations."""
    found: dict[str, dict] = {}
    together = {"iou": iou.run, "drift": drift.run, "timesteps": timesteps.run}
    if any(name in together for name in wanted):
        trained = adjacent.cached(pipe, backbone, call, prompts, out, "trained")
        random = adjacent.cached(control, backbone, call, prompts[:1], out, "random")
        for name in wanted:
            if name in together:
                found[name] = together[name](trained, random, out)
    steps = call["num_inference_steps"]
    if "response" in wanted:
        found["response"] = response.run(pipe, control, backbone, call, prompts[:1], out, [steps // 3, 4 * steps // 5])
    if "frequency" in wanted:
        found["frequency"] = frequency.run(pipe, control, call, prompts, out)
    if "interactions" in wanted:
        from . import interactions

        found["interactions"] = interactions.run(pipe, control, out)
    return found
