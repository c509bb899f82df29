"""What a user calls: enable, enabled, disable, stats, record, attention, and the doors `register_...`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from . import presets
from .config import HeartConfig
from .errors import HeartError
from .files import read_json
from .online import thresholds
from .online.call import CallContext
from .online.engine import Engine
from .online.stats import Stats

__all__ = ["attention", "disable", "enable", "enabled", "record", "stats"]


ConfigLike: TypeAlias = str | os.PathLike[str] | HeartConfig | Mapping[str, Any] | list[Any] | tuple[Any, ...]


def enable(model: Any, config: ConfigLike = "xattention", *, compile_blocks: bool = False, **changes: Any) -> None:
    """Let HEART serve the video attention of a pipeline or transformer until `disable`.

    Args:
        model: a diffusers video pipeline, or its transformer alone.
        config: a backbone's name such as "xattention" (the preset for this model), a preset's name, a `HeartConfig`, or
            a JSON file with one (or with a calibration); for a pipeline with two transformers a list of both
            calibrations' files. "heart" is the calibration of operating points that ships for this model. "heart@0.25"
            and "mine.heart.json@0.25" are solved anew for a budget, "xattention@0.8" has that threshold.
        compile_blocks: also compile the transformer's repeated blocks around attention, which fuses norms, RoPE,
            modulation and residuals; the first step waits for the compiler, later processes find its work in a cache.
        changes: fields of the config to set otherwise, e.g. `thresholds=0.95`.
    """
    from .models import attachment, inspect, regional_compile

    transformers = inspect.transformers_of(model)
    if any(attachment.attachment_of(t) is not None for t in transformers):
        raise HeartError(f"HEART is already enabled on this {type(model).__name__}: call heart.disable(...) first")
    shapes = {inspect.layers_and_heads(t) for t in transformers}  # an unknown model is refused before a preset is told
    if len(shapes) > 1:
        raise HeartError(
            f"the pipeline's transformers differ in (layers, heads): {sorted(shapes)}; enable one at a time"
        )
    chosen, note = resolve(config, model)
    chosen = chosen.replace(**changes) if changes else chosen
    _check(chosen, transformers)
    if compile_blocks:
        for transformer in transformers:
            regional_compile.blocks_of(transformer)
    costs = _head_costs(chosen, len(transformers))
    layers, heads = shapes.pop()
    engine = Engine(chosen, layers, heads, len(transformers))
    if note:
        engine.recorder.notes.append(note)
    for sentence in chosen.oddities():
        engine.recorder.warn(sentence)
    if inspect.is_pipeline(model):
        pipe = weakref.ref(model)
        engine.steps = lambda: getattr(getattr(pipe(), "scheduler", None), "num_inference_steps", None)
        attached = attachment.attach_pipeline(model, engine)
    else:
        attached = [attachment.attach(model, engine)]
    for one, table in zip(attached, costs):
        one.assign_heads(table)
    for one in attached:
        if compile_blocks:
            one.compile_blocks()


@contextmanager
def enabled(
    model: Any, config: ConfigLike = "xattention", *, compile_blocks: bool = False, **changes: Any
) -> Iterator[Any]:
    """`enable` for the length of a `with` block; gives the model."""
    enable(model, config, compile_blocks=compile_blocks, **changes)
    try:
        yield model
    finally:
        if _attachments(model):
            disable(model)


def disable(model: Any) -> None:
    """Leave the model as it was before `enable`."""
    found = _attachments(model)
    if not found:
        raise HeartError(f"HEART is not enabled on this {type(model).__name__}: there is nothing to disable")
    for attachment in found:
        attachment.detach()
        _engine(attachment).reset()  # type: ignore[union-attr]


def stats(model: Any, wait: bool = False) -> Stats:
    """What HEART did since it was enabled: print it, or take `.to_dict()`.

    `wait` waits for the GPU where times are not known yet; otherwise nothing is synchronised.
    """
    if isinstance(model, Engine):
        return model.stats(wait)
    found = _attachments(model)
    if not found:
        raise HeartError(f"HEART is not enabled on this {type(model).__name__}: call heart.enable(...) before it runs")
    return _engine(found[0]).stats(wait)  # type: ignore[union-attr]


def record(model: Any, **options: Any) -> Any:
    """`with heart.record(pipe) as r: pipe(...)`: q, k, v by (generation, step, branch, layer), for studies."""
    from .online.recorder import record as start

    return start(model, **options)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: CallContext | Mapping[str, Any] | tuple,
    state: Engine,
    dense: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """One attention call of another inference engine, q, k, v [B, H, N, D] -> [B, H, N, D].

    Args:
        call: (layer, step, branch), a dict with these and more of `CallContext`'s fields (grid, text), or a
            `CallContext`.
        state: an `Engine(config, layers, heads)`: one per model, kept between calls. A step that is not later than
            the last one of its layer and branch begins a new generation.
        dense: what computes dense attention; PyTorch's own by default.
    """
    at = _as_call(call)
    if not isinstance(state, Engine):
        raise HeartError(f"state is {type(state).__name__}: make one Engine(config, layers, heads) and keep it")
    if q.dim() != 4 or q.shape[1] + at.head_offset > state.heads:
        raise HeartError(f"q has shape {tuple(q.shape)} but the state is for {state.heads} heads: give [B, H, N, D]")
    if not (0 <= at.layer < state.layers and 0 <= at.transformer < state.transformers):
        raise HeartError(f"layer {at.layer} is none of the state's {state.layers}: count layers from 0")
    state.turn(at)
    return state.attend(at, q, k, v, _of_items(dense or F.scaled_dot_product_attention))


def _of_items(dense: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Dense attention of a caller who has no mask that would have to be cut to some batch items."""
    return lambda q, k, v, items=None: dense(q, k, v)


def resolve(config: Any, model: Any = None) -> tuple[HeartConfig, str]:
    """A config from any of the forms `enable` takes, and a note if the model was not known."""
    if isinstance(config, HeartConfig):
        return config, ""
    if isinstance(config, Mapping):
        return HeartConfig.from_dict(config), ""
    if isinstance(config, list | tuple):
        return from_calibration(config, model)
    if isinstance(config, str) and not config.endswith(".json"):
        return _from_name(config, model)
    if not isinstance(config, str | os.PathLike):
        raise HeartError(
            f"config is {str(config)[:60]!r}: give a backbone's name, a preset, a HeartConfig or a JSON file"
        )
    data = read_json(config)
    if isinstance(data, dict) and data.get("_type") == "HeartConfig":
        return HeartConfig.from_dict(data), ""
    return from_calibration(config, model)


def _from_name(name: str, model: Any) -> tuple[HeartConfig, str]:
    """A preset, or the calibration that ships for this model; what follows "@" is a budget, or a preset's threshold."""
    from .calibration.solve.budget import Budget

    source, _, budget = name.rpartition("@") if "@" in name else (name, "", "")
    if source == presets.HEART:
        return from_calibration(presets.shipped_heart(model), model, budget)
    if source.endswith(".json"):
        return from_calibration(source, model, budget)
    config, note = presets.find_preset(source, model)
    return (config.replace(thresholds=Budget.named(budget, "threshold").value) if budget else config), note


def from_calibration(path: Any, model: Any, budget: str = "") -> tuple[HeartConfig, str]:
    """The preset for this model with a calibration's backbone settings and thresholds."""
    from . import backbones
    from .calibration import experts

    calibration = experts.load(path)
    calibration = calibration.at_budget(budget) if budget else calibration
    backbone = backbones.from_dict(calibration.points[0]["backbone"])
    base, note = presets.find_preset(backbone.name, model)
    as_measured = {k: v for k, v in calibration.settings.items() if k in ("order", "scale_clusters", "dense_steps")}
    if calibration.simple:
        as_measured["rest"] = calibration.rest
    else:
        as_measured["points"] = calibration.point_table()
    return base.replace(backbone=backbone, thresholds=calibration, **as_measured), note


# ---------------------------------------- doors


def register_backbone(cls: type) -> type:
    """Make a backbone known by its `name`: in configs, files, `enable`, `calibrate`, `compare` and the report."""
    from . import backbones

    return backbones.register(cls)


def register_policy(cls: type) -> type:
    """Make a reuse policy known by its class's name, so that configs with it can be saved and loaded."""
    from .online import reuse

    return reuse.register(cls)


def register_error(name: str, cls: type) -> type:
    """Make an error measure known by this name, for calibration."""
    from .calibration.measure import velocity_error

    velocity_error.register(name, cls)
    return cls


# ---------------------------------------- the model's attachments


def _attachments(model: Any) -> list[Any]:
    """HEART's attachments to the model's transformers (not those of a recording or calibration)."""
    from .models import attachment, inspect

    found = [attachment.attachment_of(t) for t in inspect.transformers_of(model)]
    return [a for a in found if a is not None and _engine(a) is not None]


def _engine(attachment: Any) -> Engine | None:
    """The engine behind an attachment, also while a recording stands in front of it."""
    return attachment.handler.engine


def _check(config: HeartConfig, transformers: list[Any]) -> None:
    """A config or calibration made for another model is refused here, before anything is touched."""
    sources = thresholds.source(config.thresholds).of_transformers(len(transformers))
    for transformer, source in zip(transformers, sources):
        presets.check_model(config, transformer)
        source.check(transformer)


def _head_costs(config: HeartConfig, transformers: int) -> list[Any]:
    """What heads cost [L, H], of each transformer, where they are assigned to ranks by it; else nothing."""
    from .models.head_assignment import head_costs

    if config.head_assignment != "cost":
        return []
    return [head_costs(one) for one in thresholds.source(config.thresholds).of_transformers(transformers)]


def _as_call(call: Any) -> CallContext:
    if isinstance(call, CallContext):
        return call
    try:
        if isinstance(call, Mapping):
            return CallContext(**call)
        layer, step, branch = call
        return CallContext(layer=layer, step=step, branch=str(branch))
    except (TypeError, ValueError):
        raise HeartError(
            f"the call is {str(call)[:80]!r}: give (layer, step, branch), or a dict with these names"
        ) from None
