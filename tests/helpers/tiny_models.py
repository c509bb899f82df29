"""Tiny transformers with random weights, one of each family, and inputs for them. Nothing is downloaded.

`MODELS[name].build()` gives a transformer, `MODELS[name].inputs(t, batch)` the arguments of one forward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

from heart_attention.online.call import Handler

HEADS, DIM, GRID, TEXT = 2, 16, (2, 4, 4), 6  # attention heads, their size, video tokens, text tokens
HIDDEN = HEADS * DIM


@dataclass(frozen=True)
class Tiny:
    """How to build one model and feed it; `layers` is how many attention layers HEART should find."""

    cls: str
    config: dict[str, Any]
    inputs: Callable[..., dict[str, Any]]
    layers: int
    text: Any = None  # the Text of batch item i, as (start, prompt, unused), or None
    grid: Any = GRID  # what the family should read
    video: int = math.prod(GRID)  # tokens of a call beside the text
    items: int = 1  # batch items of a call for each of the model's: frames that attend by themselves

    def build(self, seed: int = 0, **config: Any) -> torch.nn.Module:
        """The model, with weights that depend on the seed alone."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = getattr(diffusers, self.cls)(**{**self.config, **config}).eval()
            for weight in model.parameters():
                if weight.ndim > 1 and not weight.any():  # a gate that starts closed would hide what attention answers
                    torch.nn.init.normal_(weight, std=0.1)
            return model


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def latents(batch: int, seed: int, channels: int = 4) -> torch.Tensor:
    """Noise whose patches make up GRID."""
    return noise(batch, channels, GRID[0], 2 * GRID[1], 2 * GRID[2], seed=seed)


def valid_text(item: int) -> int:
    """How many text tokens of a batch item are no padding, in models that pad."""
    return 2 + item


def padding(batch: int, length: int = TEXT) -> torch.Tensor:
    """The padding mask of a text, with `valid_text` tokens of each batch item."""
    return torch.stack([(torch.arange(length) < valid_text(i)).long() for i in range(batch)])


# -- Wan and its kin -------------------------------------------------------------------------------------
WAN = {
    "num_attention_heads": HEADS,
    "attention_head_dim": DIM,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def wan_inputs(t: float = 500.0, batch: int = 1, seed: int = 0, channels: int = 4) -> dict[str, Any]:
    """Arguments for one forward of `wan()`."""
    return {
        "hidden_states": latents(batch, seed, channels),
        "timestep": torch.full((batch,), t),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "return_dict": False,
    }


def wan(layers: int = 2, seed: int = 0, **config: Any) -> torch.nn.Module:
    """A WanTransformer3DModel (T2V unless the config says otherwise)."""
    return MODELS["wan"].build(seed, num_layers=layers, **config)


def _i2v_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    given = wan_inputs(t, batch, seed, channels=6)
    # the I2V processor takes the last 512 tokens for text
    given["encoder_hidden_states"] = noise(batch, 512, 8, seed=seed + 1)
    given["encoder_hidden_states_image"] = noise(batch, 3, 10, seed=seed + 2)
    return given


def _ti2v_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    given = wan_inputs(t, batch, seed)
    times = torch.full((batch, GRID[0] * GRID[1] * GRID[2]), t)
    times[:, : GRID[1] * GRID[2]] = 0  # the first frame is given
    return {**given, "timestep": times}


def _vace_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {**wan_inputs(t, batch, seed), "control_hidden_states": latents(batch, seed + 3, 6)}


# -- HunyuanVideo ----------------------------------------------------------------------------------------
def _hunyuan_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": latents(batch, seed),
        "timestep": torch.full((batch,), t),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "encoder_attention_mask": padding(batch),
        "pooled_projections": noise(batch, 8, seed=seed + 2),
        "guidance": torch.full((batch,), 6000.0),
        "return_dict": False,
    }


def _hunyuan15_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, *GRID, seed=seed),
        "timestep": torch.full((batch,), t),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "encoder_attention_mask": padding(batch),
        "encoder_hidden_states_2": noise(batch, 4, 8, seed=seed + 2),
        "encoder_attention_mask_2": padding(batch, 4),
        "image_embeds": torch.zeros(batch, 3, 8),
        "return_dict": False,
    }


# -- the others ------------------------------------------------------------------------------------------
def _cogvideox_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    tokens = GRID[0] * GRID[1] * GRID[2]
    angles = noise(tokens, DIM, seed=9)
    return {
        "hidden_states": latents(batch, seed).transpose(1, 2),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "timestep": torch.full((batch,), t),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "return_dict": False,
    }


def _ltx_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    frames, height, width = GRID
    return {
        "hidden_states": noise(batch, frames * height * width, 4, seed=seed),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "timestep": torch.full((batch,), t),
        "encoder_attention_mask": padding(batch),
        "num_frames": frames,
        "height": height,
        "width": width,
        "return_dict": False,
    }


def _ltx2_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        **_ltx_inputs(t, batch, seed),
        "audio_hidden_states": noise(batch, 5, 4, seed=seed + 2),
        "audio_encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 3),
        "audio_encoder_attention_mask": padding(batch),
        "audio_num_frames": 5,
    }


def _mochi_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": latents(batch, seed),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "timestep": torch.full((batch,), t),
        "encoder_attention_mask": padding(batch).bool(),
        "return_dict": False,
    }


def _cosmos_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": latents(batch, seed),
        "timestep": torch.full((batch,), t),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "fps": 24,
        "return_dict": False,
    }


SIZE = {"num_attention_heads": HEADS, "attention_head_dim": DIM, "num_layers": 2}
CHANNELS = {"in_channels": 4, "out_channels": 4}
VIDEO = GRID[0] * GRID[1] * GRID[2]

MODELS: dict[str, Tiny] = {
    "wan": Tiny("WanTransformer3DModel", WAN, wan_inputs, 2),
    "wan-i2v": Tiny(
        "WanTransformer3DModel", {**WAN, "in_channels": 6, "image_dim": 10, "added_kv_proj_dim": HIDDEN}, _i2v_inputs, 2
    ),
    "wan-ti2v": Tiny("WanTransformer3DModel", WAN, _ti2v_inputs, 2),
    "wan-vace": Tiny("WanVACETransformer3DModel", {**WAN, "vace_layers": [0], "vace_in_channels": 6}, _vace_inputs, 3),
    "skyreels-v2": Tiny("SkyReelsV2Transformer3DModel", WAN, wan_inputs, 2),
    "hunyuan": Tiny(
        "HunyuanVideoTransformer3DModel",
        {
            **SIZE,
            **CHANNELS,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 8,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (4, 6, 6),
        },
        _hunyuan_inputs,
        2,
        lambda i: (VIDEO, valid_text(i), TEXT - valid_text(i)),
    ),
    "hunyuan-1.5": Tiny(
        "HunyuanVideo15Transformer3DModel",
        {
            **SIZE,
            **CHANNELS,
            "num_refiner_layers": 1,
            "text_embed_dim": 8,
            "text_embed_2_dim": 8,
            "image_embed_dim": 8,
            "rope_axes_dim": (4, 6, 6),
        },
        _hunyuan15_inputs,
        2,
        lambda i: (VIDEO, 2 * valid_text(i), TEXT + 4 + 3 - 2 * valid_text(i)),
    ),
    "cogvideox": Tiny(
        "CogVideoXTransformer3DModel",
        {
            **SIZE,
            **CHANNELS,
            "time_embed_dim": 8,
            "text_embed_dim": 8,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": TEXT,
            "use_rotary_positional_embeddings": True,
        },
        _cogvideox_inputs,
        2,
        lambda i: (0, TEXT, 0),
    ),
    "ltx": Tiny(
        "LTXVideoTransformer3DModel",
        {**SIZE, **CHANNELS, "cross_attention_dim": HIDDEN, "caption_channels": 8},
        _ltx_inputs,
        2,
    ),
    "ltx-2": Tiny(
        "LTX2VideoTransformer3DModel",
        {
            **SIZE,
            **CHANNELS,
            "cross_attention_dim": HIDDEN,
            "caption_channels": 8,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": HEADS,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": HEADS * 8,
        },
        _ltx2_inputs,
        2,
    ),
    "mochi": Tiny(
        "MochiTransformer3DModel",
        {**SIZE, "in_channels": 4, "pooled_projection_dim": 8, "text_embed_dim": 8, "time_embed_dim": 8},
        _mochi_inputs,
        2,
        lambda i: (VIDEO, valid_text(i), 0),
    ),
    "cosmos": Tiny(
        "CosmosTransformer3DModel",
        {**SIZE, **CHANNELS, "text_embed_dim": 8, "adaln_lora_dim": 4, "concat_padding_mask": False},
        _cosmos_inputs,
        2,
    ),
}


def every_model() -> dict[str, Tiny]:
    """All of them: those here and those of later releases."""
    from more_models import MORE

    return {**MODELS, **MORE}


class Seen(Handler):
    """A handler that runs everything dense and remembers what it was asked."""

    def __init__(self) -> None:
        self.forwards: list[Any] = []
        self.calls: list[Any] = []  # (where, shape of q)
        self.passed: list[Any] = []  # (where, reason)
        self.resets = 0

    def start_forward(self, call: Any) -> None:
        self.forwards.append(call)

    def attend(self, call: Any, q: Any, k: Any, v: Any, dense: Any) -> torch.Tensor:
        self.calls.append((call, tuple(q.shape)))
        return dense(q, k, v)

    def fallback(self, call: Any, reason: str) -> None:
        self.passed.append((call, reason))

    def reset(self) -> None:
        self.resets += 1


class Halved(Seen):
    """A handler that changes every answer, so that a layer it misses shows in the output."""

    def attend(self, call: Any, q: Any, k: Any, v: Any, dense: Any) -> torch.Tensor:
        return super().attend(call, q, k, v, dense) * 0.5


def context(model: torch.nn.Module, name: str, step: int) -> Any:
    """`cache_context` as this diffusers has it: older ones take a name alone, and the clock follows the timesteps."""
    takes_step = len(inspect.signature(model.cache_context).parameters) > 1
    return model.cache_context(name, step_index=step) if takes_step else model.cache_context(name)


@torch.no_grad()
def run(model: torch.nn.Module, given: dict[str, Any]) -> torch.Tensor:
    """One forward: the video output."""
    output = model(**given)
    return output if isinstance(output, torch.Tensor) else output[0]
