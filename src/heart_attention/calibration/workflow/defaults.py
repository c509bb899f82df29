"""What a calibration takes where the user says nothing: prompts, call, backbone settings, how many contexts there are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...backbones import Backbone
from ...config import HeartConfig
from ...errors import HeartError
from ...online.points import Point
from ...online.warmup import first_steps
from ...presets import EMBEDDED, identify, preset
from .. import experts
from ..measure import velocity_error
from ..points import read_points
from .settings import Settings, default_of, paper_candidates

PROMPTS = Path(__file__).with_name("prompts.txt")
POINTS = Path(__file__).with_name("points.json")


def settings_for(
    pipe: Any,
    backbone: Backbone | str,
    prompts: Sequence[str] | None,
    held_out: Sequence[str] | None,
    call: dict[str, Any] | None,
    given: dict[str, Any],
) -> Settings:
    """Complete settings: what is given, else the preset's for this model, else the defaults of `Settings`."""
    velocity_error.by_name(given.get("error", default_of("error")), **given.get("error_settings", {}))
    built_in, built_in_held_out = default_prompts(identify(pipe.transformer) in EMBEDDED)
    texts = list(built_in if prompts is None else prompts)
    unseen = [p for p in (built_in_held_out if held_out is None else held_out) if p not in texts]
    values = {**_of_preset(pipe, backbone), **{k: v for k, v in given.items() if v is not None}}
    values |= _points(pipe, values)
    values |= {"call": default_call(pipe) if call is None else dict(call), "prompts": tuple(texts)}
    values |= {"held_out": tuple(unseen), "order": read_order(values["order"])}
    available = _steps(pipe, values)
    for name, count in (("contexts", len(texts)), ("held_out_contexts", len(unseen))):
        values.setdefault(name, min(default_of(name), available * count))  # short runs with few prompts have no more
    try:
        return Settings(**values)
    except TypeError as error:
        raise HeartError(f"a calibration has no such setting ({error}): see calibration Settings") from None


def _of_preset(pipe: Any, backbone: Backbone | str) -> dict[str, Any]:
    """Backbone, token order and dense steps for this model; a backbone given whole stays as it is."""
    if isinstance(backbone, str):
        config = preset(backbone, pipe)
        whole = {"backbone": config.backbone, "scale_clusters": config.scale_clusters}
        whole |= {"shared": config.thresholds} if isinstance(config.thresholds, float) else {}
    else:
        config = preset(backbone.name, pipe)
        whole = {"backbone": backbone, "scale_clusters": False}
    return {
        **whole,
        "dense_steps": config.dense_steps,
        "order": config.order,
    }


def _points(pipe: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Operating points by name or from a file; a list of them as it is."""
    given = values.get("points")
    if not isinstance(given, str | os.PathLike):
        return {}
    if given == "paper":
        return {"points": None, "candidates": paper_candidates(values["backbone"], values.get("shared") or 0.9)}
    if given == "default":  # cluster counts there are meant for 32,760 tokens
        return {"points": default_points(pipe), "scale_clusters": True}
    return {"points": read_points(given, lambda name: preset(name, pipe).backbone), "scale_clusters": False}


def default_points(pipe: Any) -> tuple[Point, ...]:
    """The points of `points.json`: blocks in raster and in tiles, and fine clusters with means for the rest.

    Keys of a cluster are alike, so its mean stands for them; keys of a block are not, and what it leaves out is dropped.
    """
    return read_points(POINTS, lambda name: preset(name, pipe).backbone)


def _steps(pipe: Any, values: dict[str, Any]) -> int:
    """How many steps of a generation this transformer serves sparsely."""
    steps = int(values["call"].get("num_inference_steps", 50))
    first, last = experts.served(pipe, values.get("transformer"), steps)
    return max(last + 1 - max(first, first_steps(values["dense_steps"], steps)), 1)


def default_prompts(tiny: bool) -> tuple[list[str], list[str]]:
    """Ten prompts to calibrate on and six held out: the embedded model's own words, else VBench's."""
    from ... import tiny as embedded
    from ...evaluation.pipelines import read_prompts

    if tiny:
        return embedded.prompts("calibration")[:10], embedded.prompts("heldout")[:6]
    built_in = read_prompts(str(PROMPTS))
    return built_in[:10], built_in[10:]


def default_call(pipe: Any) -> dict[str, Any]:
    """The arguments of a call at the model's own size."""
    from ...evaluation.pipelines import TINY, call_arguments, name_of

    known_as, name = identify(pipe.transformer), name_of(pipe)
    if known_as in EMBEDDED:
        return call_arguments(name if name in TINY else known_as, pipe)
    return call_arguments("", pipe)


def read_order(given: Any) -> Any:
    """A token order, or that of a config of `heart tune-order`."""
    is_file = isinstance(given, str) and given.endswith(".json")
    return HeartConfig.load(given).order if is_file else given
