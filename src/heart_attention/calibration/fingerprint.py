"""What makes a model this model: class, config, layers, heads, shapes of its weights, and a sample of their values."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import HeartError, shown
from ..models.inspect import head_size, layers_and_heads, unwrapped

FIELDS: dict[str, Any] = {
    "class": str,
    "config_hash": str,
    "layers": int,
    "heads": int,
    "head_dim": int,
    "weights_digest": str,  # of names and shapes
    "values_digest": str | None,  # of sampled values; None where they could not be read
}
SAMPLE = 64  # values of each weight
_NOT_THE_MODEL = ("sparse_attention_config", "quantization_config")  # may be added to a config without changing it
_ADDED = re.compile(r"(^|\.)(lora_|to_qkv|to_kv|to_added_qkv)")  # weights that LoRA and fused projections add


def fingerprint(transformer: Any) -> dict[str, Any]:
    """The fingerprint of a transformer.

    LoRA, fused projections, quantisation, offload and compilation leave all of it but the values as it is.
    """
    transformer = unwrapped(transformer)
    layers, heads = layers_and_heads(transformer)
    return {
        "class": _public_class(transformer),
        "config_hash": _sha(_plain_config(transformer.config)),
        "layers": layers,
        "heads": heads,
        "head_dim": head_size(transformer),
        "weights_digest": _sha(sorted(_weight_shapes(transformer))),
        "values_digest": values_digest(transformer),
    }


def values_digest(transformer: Any) -> str | None:
    """SHA-256 over some numbers of every weight: tells other values of the same shapes without reading them all.

    Numbers are rounded to bfloat16 first, so that a model has one digest in float32 and in bfloat16. None where a weight
    cannot be read: quantised, or not in memory.
    """
    return _values_digest(_weights(transformer))


def adapters(transformer: Any) -> list[Any]:
    """What LoRA adds to a model: a digest of the adapters' values, and how strongly each of them counts where."""
    added = [(name, weight) for name, weight in transformer.named_parameters() if "lora_" in name]
    scales = [
        [name, sorted(module.scaling.items()), str(getattr(module, "active_adapters", ""))]
        for name, module in transformer.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    ]
    return [_values_digest(added), scales] if added else []


def _values_digest(weights: Sequence[tuple[str, Any]]) -> str | None:
    import torch

    digest = hashlib.sha256()
    for name, weight in sorted(weights, key=lambda pair: pair[0]):
        if weight.is_meta or not weight.is_floating_point() or getattr(weight, "quant_state", None) is not None:
            return None
        flat = weight.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].to("cpu", torch.bfloat16).float()
        digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()


def check_fingerprint(model: Any, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """Raise unless this is None or a whole fingerprint of a model with so many layers and heads."""
    if model is None:
        return None
    good = isinstance(model, dict) and set(model) == set(FIELDS)
    if not good or any(
        isinstance(model[name], bool) or not isinstance(model[name], kind) for name, kind in FIELDS.items()
    ):
        raise HeartError(f"the calibration's model is not a fingerprint with {', '.join(FIELDS)}")
    if (model["layers"], model["heads"]) != shape or model["head_dim"] < 1:
        raise HeartError(
            f"the calibration is for {shape[0]}×{shape[1]} heads but its model has "
            f"{shown(model['layers'])}×{shown(model['heads'])}: it is damaged"
        )
    return dict(model)


def differences(mine: dict[str, Any], here: dict[str, Any]) -> str:
    """What differs between two fingerprints besides the values, as text; empty if nothing does."""
    names = [name for name in FIELDS if name != "values_digest" and mine[name] != here[name]]
    return ", ".join(f"{name.replace('_', ' ')} {_short(mine[name])} ≠ {_short(here[name])}" for name in names)


def other_values(mine: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether both know a digest of their weights' values and the two differ."""
    digests = (mine["values_digest"], here["values_digest"])
    return None not in digests and digests[0] != digests[1]


def prompts_hash(prompts: Sequence[str]) -> str:
    """SHA-256 over the prompts in their order."""
    return _sha(list(prompts))


def versions() -> dict[str, str]:
    """Versions of what has a say in the figures."""
    import diffusers
    import torch

    from .. import __version__

    return {
        "heart_attention": __version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _public_class(transformer: Any) -> str:
    """The diffusers class; hooks and quantisers may have put a subclass of their own on top."""
    for cls in type(transformer).__mro__:
        if cls.__module__.startswith("diffusers."):
            return cls.__name__
    return type(transformer).__name__


def _plain_config(config: Any) -> dict[str, Any]:
    return {k: v for k, v in dict(config).items() if not k.startswith("_") and k not in _NOT_THE_MODEL}


def _weights(transformer: Any) -> list[tuple[str, Any]]:
    """Weights by the names they have without LoRA and compilation, those that were added left out."""
    return [
        (name.replace(".base_layer.", ".").replace("_orig_mod.", ""), weight)
        for name, weight in transformer.named_parameters()
        if not _ADDED.search(name)
    ]


def _weight_shapes(transformer: Any) -> list[list[Any]]:
    shapes = []
    for name, weight in _weights(transformer):
        packed = getattr(weight, "quant_state", None)  # 4-bit weights are stored in another shape
        shape = getattr(packed, "shape", None) or weight.shape
        shapes.append([name, [int(n) for n in shape]])
    return shapes


def _sha(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _short(value: Any) -> str:
    return f"{value[:8]}…" if isinstance(value, str) and len(value) == 64 else str(value)
