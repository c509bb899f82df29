"""How HEART gets into diffusers transformers: families by class name, and the interception itself."""

from __future__ import annotations

import torch

from ..errors import HeartError
from .families.base import Family
from .families.cogvideox import CogVideoX
from .families.cosmos import Cosmos
from .families.hunyuan import HunyuanVideo, HunyuanVideo15
from .families.ltx import LTX
from .families.mochi import Mochi
from .families.wan import Wan, WanVACE

# Class name of the transformer -> what differs in it.
FAMILIES: dict[str, Family] = {
    "WanTransformer3DModel": Wan(),
    "WanVACETransformer3DModel": WanVACE(),
    "SkyReelsV2Transformer3DModel": Wan(),
    "HunyuanVideoTransformer3DModel": HunyuanVideo(),
    "HunyuanVideo15Transformer3DModel": HunyuanVideo15(),
    "CogVideoXTransformer3DModel": CogVideoX(),
    "LTXVideoTransformer3DModel": LTX(),
    "LTX2VideoTransformer3DModel": LTX(),
    "MochiTransformer3DModel": Mochi(),
    "CosmosTransformer3DModel": Cosmos(),
}


def register(class_name: str, family: Family) -> None:
    """Add a family for transformers of this class name."""
    FAMILIES[class_name] = family


def family_of(transformer: torch.nn.Module) -> Family:
    """The family of a transformer, found by its class or a base class of it."""
    for cls in type(transformer).__mro__:
        if cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__]
    raise HeartError(
        f"{type(transformer).__name__} is not a video transformer that HEART knows "
        f"(it knows {', '.join(sorted(FAMILIES))}); add it with heart_attention.models.register(...)."
    )
