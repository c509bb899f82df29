"""Tiny transformers of the video classes that came with later releases of diffusers, as in `tiny_models`."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import (
    CHANNELS,
    DIM,
    GRID,
    HIDDEN,
    SIZE,
    TEXT,
    VIDEO,
    WAN,
    Tiny,
    latents,
    noise,
    padding,
    valid_text,
    wan_inputs,
)

FRAMES, ROWS, COLUMNS = GRID
AXES = (4, 6, 6)  # of rotary embeddings; their sum is DIM
IMAGE = 3  # tokens of an image


def _times(batch: int, t: float) -> torch.Tensor:
    return torch.full((batch,), t)


# ---------------------------------------- Wan's descendants


def _animate_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        **wan_inputs(t, batch, seed, channels=12),
        "pose_hidden_states": noise(batch, 4, FRAMES - 1, 2 * ROWS, 2 * COLUMNS, seed=seed + 2),
        "face_pixel_values": noise(batch, 3, 4 * (FRAMES - 1), 16, 16, seed=seed + 3),
    }


def _anyflow_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    given = wan_inputs(t, batch, seed)
    frames_first = given["hidden_states"].transpose(1, 2)
    times = torch.full((batch, FRAMES), t)
    return {**given, "hidden_states": frames_first, "timestep": times, "r_timestep": times - 100}


HISTORY = FRAMES * ROWS * COLUMNS + 2 * 2 + 1  # short, mid and long history of Helios, at their three resolutions


def _helios_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    index = lambda first, n: torch.arange(first, first + n).expand(batch, -1)  # noqa: E731
    size = (2 * ROWS, 2 * COLUMNS)
    return {
        **wan_inputs(t, batch, seed),
        "indices_hidden_states": index(8, FRAMES),
        "latents_history_short": noise(batch, 4, FRAMES, *size, seed=seed + 2),
        "indices_latents_history_short": index(6, FRAMES),
        "latents_history_mid": noise(batch, 4, 2, *size, seed=seed + 3),
        "indices_latents_history_mid": index(4, 2),
        "latents_history_long": noise(batch, 4, 4, *size, seed=seed + 4),
        "indices_latents_history_long": index(0, 4),
    }


# ---------------------------------------- joint attention

PACKED = ROWS * COLUMNS + 2 * 2 + 1  # clean frame, history at half and at a quarter of the resolution


def _framepack_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    size = (2 * ROWS, 2 * COLUMNS)
    return {
        "hidden_states": latents(batch, seed),
        "timestep": _times(batch, t),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "encoder_attention_mask": padding(batch),
        "pooled_projections": noise(batch, 8, seed=seed + 2),
        "image_embeds": noise(batch, IMAGE, 8, seed=seed + 3),
        "guidance": torch.full((batch,), 6000.0),
        "indices_latents": torch.arange(7, 7 + FRAMES),
        "latents_clean": noise(batch, 4, 1, *size, seed=seed + 4),
        "indices_latents_clean": torch.arange(6, 7),
        "latents_history_2x": noise(batch, 4, 2, *size, seed=seed + 5),
        "indices_latents_history_2x": torch.arange(4, 6),
        "latents_history_4x": noise(batch, 4, 4, *size, seed=seed + 6),
        "indices_latents_history_4x": torch.arange(4),
        "return_dict": False,
    }


def _consisid_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    angles = noise(VIDEO, DIM, seed=9)
    return {
        "hidden_states": latents(batch, seed).transpose(1, 2),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "timestep": _times(batch, t),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "return_dict": False,
    }


def _easyanimate_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": latents(batch, seed),
        "timestep": _times(batch, t),
        "encoder_hidden_states": noise(batch, TEXT - 2, 8, seed=seed + 1),
        "encoder_hidden_states_t5": noise(batch, 2, 8, seed=seed + 2),
        "return_dict": False,
    }


def _motif_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": latents(batch, seed),
        "timestep": _times(batch, t),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "encoder_attention_mask": padding(batch),
        "image_embeds": noise(batch, IMAGE, 8, seed=seed + 2),
        "return_dict": False,
    }


AUDIO, REFERENCE = 6, 4  # tokens of MiniMax-H3 before the video, beside the text
BEFORE = TEXT + REFERENCE + AUDIO


def _minimax_inputs(t: float = 0.5, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    n = BEFORE + VIDEO
    video = torch.cat([torch.arange(TEXT, TEXT + REFERENCE), torch.arange(BEFORE, n)])
    tags = torch.full((n,), 2)
    tags[:TEXT], tags[video] = 1, 0
    return {
        "hidden_states": noise(batch, len(video), 16, seed=seed),
        "audio_hidden_states": noise(batch, AUDIO, 4, seed=seed + 1),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 2),
        "timestep": torch.tensor([t / 1000 if t > 1 else t]),
        "timestep_indices": torch.zeros(n, dtype=torch.long),
        "token_tags": tags,
        "position_ids": torch.arange(n).view(-1, 1).expand(-1, 3).float(),
        "video_indices": video,
        "audio_indices": torch.arange(TEXT + REFERENCE, BEFORE),
        "text_indices": torch.arange(TEXT),
        "return_dict": False,
    }


# ---------------------------------------- the others


def _allegro_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": latents(batch, seed),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "timestep": _times(batch, t),
        "encoder_attention_mask": padding(batch),
        "return_dict": False,
    }


def _latte_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": latents(batch, seed),
        "timestep": _times(batch, t),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "return_dict": False,
    }


def _kandinsky5_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": latents(batch, seed).permute(0, 2, 3, 4, 1),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "timestep": _times(batch, t),
        "pooled_projections": noise(batch, 8, seed=seed + 2),
        "visual_rope_pos": [torch.arange(n) for n in GRID],
        "text_rope_pos": torch.arange(TEXT),
        "return_dict": False,
    }


def _kandinsky6_inputs(t: float = 500.0, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, FRAMES, 2 * ROWS, 2 * COLUMNS, 9, seed=seed),
        "encoder_hidden_states": noise(batch, TEXT, 8, seed=seed + 1),
        "pooled_projections": noise(batch, 8, seed=seed + 2),
        "timestep": _times(batch, t),
        "audio_hidden_states": noise(batch, AUDIO, 4, seed=seed + 3),
        "return_dict": False,
    }


HUNYUAN = {**SIZE, **CHANNELS, "num_layers": 1, "num_single_layers": 1, "text_embed_dim": 8, "rope_axes_dim": AXES}
KANDINSKY = {
    "in_text_dim": 8,
    "in_text_dim2": 8,
    "time_dim": 16,
    "model_dim": HIDDEN,
    "ff_dim": 32,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": AXES,
}
COGVIDEOX = {
    "time_embed_dim": 8,
    "text_embed_dim": 8,
    "sample_width": 8,
    "sample_height": 8,
    "max_text_seq_length": TEXT,
    "use_rotary_positional_embeddings": True,
}
FACE = {
    "latent_channels": 4,
    "in_channels": 12,
    "image_dim": None,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 8,
    "face_encoder_hidden_dim": 8,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}

MORE: dict[str, Tiny] = {
    "wan-animate": Tiny("WanAnimateTransformer3DModel", {**WAN, **FACE}, _animate_inputs, 2),
    "chronoedit": Tiny("ChronoEditTransformer3DModel", WAN, wan_inputs, 2),
    "anyflow": Tiny("AnyFlowTransformer3DModel", WAN, _anyflow_inputs, 2),
    "helios": Tiny(
        "HeliosTransformer3DModel",
        {k: v for k, v in WAN.items() if k != "rope_max_seq_len"} | {"rope_dim": AXES},
        _helios_inputs,
        2,
        lambda i: (0, HISTORY, 0),
    ),
    "framepack": Tiny(
        "HunyuanVideoFramepackTransformer3DModel",
        {
            **HUNYUAN,
            "num_refiner_layers": 1,
            "pooled_projection_dim": 8,
            "has_image_proj": True,
            "image_proj_dim": 8,
            "has_clean_x_embedder": True,
        },
        _framepack_inputs,
        2,
        lambda i: (VIDEO, PACKED + IMAGE + valid_text(i), TEXT - valid_text(i)),
    ),
    "motif": Tiny(
        "MotifVideoTransformer3DModel",
        {**HUNYUAN, "image_embed_dim": 8},
        _motif_inputs,
        2,
        lambda i: (VIDEO, IMAGE + valid_text(i), TEXT - valid_text(i)),
    ),
    "consisid": Tiny(
        "ConsisIDTransformer3DModel",
        {**SIZE, **CHANNELS, **COGVIDEOX, "sample_frames": 5},
        _consisid_inputs,
        2,
        lambda i: (0, TEXT, 0),
    ),
    "easyanimate": Tiny(
        "EasyAnimateTransformer3DModel",
        {
            **SIZE,
            **CHANNELS,
            "patch_size": 2,
            "time_embed_dim": 8,
            "text_embed_dim": 8,
            "text_embed_dim_t5": 8,
            "mmdit_layers": 1,
        },
        _easyanimate_inputs,
        2,
        lambda i: (0, TEXT, 0),
    ),
    "minimax-h3": Tiny(
        "MiniMaxH3Transformer3DModel",
        {
            **SIZE,
            "hidden_size": HIDDEN,
            "num_refiner_layers": 1,
            "ffn_dim": 32,
            "in_channels": 4,
            "audio_in_channels": 4,
            "text_dim": 8,
            "freq_dim": 8,
            "time_embed_hidden_dim": 16,
            "time_embed_dim": 8,
            "rope_freq_dim": 2,
        },
        _minimax_inputs,
        2,
        lambda i: (0, BEFORE, 0),
        grid=None,
    ),
    "allegro": Tiny(
        "AllegroTransformer3DModel",
        {
            **SIZE,
            **CHANNELS,
            "cross_attention_dim": HIDDEN,
            "caption_channels": 8,
            "sample_height": 8,
            "sample_width": 8,
        },
        _allegro_inputs,
        2,
    ),
    "latte": Tiny(
        "LatteTransformer3DModel",
        {
            **SIZE,
            **CHANNELS,
            "cross_attention_dim": HIDDEN,
            "caption_channels": 8,
            "sample_size": 8,
            "patch_size": 2,
            "video_length": FRAMES,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
        },
        _latte_inputs,
        2,
        grid=(1, ROWS, COLUMNS),
        video=ROWS * COLUMNS,
        items=FRAMES,
    ),
    "kandinsky-5": Tiny(
        "Kandinsky5Transformer3DModel",
        {**KANDINSKY, "in_visual_dim": 4, "out_visual_dim": 4},
        _kandinsky5_inputs,
        2,
    ),
    "kandinsky-6": Tiny(
        "Kandinsky6Transformer3DModel",
        {**KANDINSKY, "in_visual_dim": 4, "out_visual_dim": 4, "in_audio_dim": 4, "out_audio_dim": 4},
        _kandinsky6_inputs,
        2,
    ),
}
