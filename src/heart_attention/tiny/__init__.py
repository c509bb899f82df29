"""The embedded models: a small ``WanPipeline`` that was really trained, for demos, tests and studies on a CPU.

    from heart_attention import tiny
    pipe = tiny.load()
    video = pipe(tiny.prompts("demo")[0], **tiny.NATIVE).frames[0]

Beside it there are a few-step student (``load("student")``) and a small ``HunyuanVideoPipeline`` (``load("hunyuan")``).
They make clips of one coloured shape moving over a coloured background; see MODEL_CARD.md beside this file.
Importing this module is cheap: torch and diffusers are imported by the functions that need them.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import HeartError
from .scene import check, prompts

if TYPE_CHECKING:
    import torch

    from .pipeline import WanPipeline

__all__ = ["FEW_STEPS", "NATIVE", "QUICK", "check", "load", "load_random", "path", "prompts", "tokens"]

# Arguments for calling the pipeline: 16 x 16 x 16 = 4,096 video tokens of 8 x 8 pixels.
NATIVE = {
    "height": 128,
    "width": 128,
    "num_frames": 16,
    "num_inference_steps": 50,
    "guidance_scale": 3.0,
    "max_sequence_length": 64,
}
# 8 x 12 x 12 = 1,152 video tokens.
QUICK = {**NATIVE, "height": 96, "width": 96, "num_frames": 8, "num_inference_steps": 12}
# For the student: 4 steps (or 8) without guidance.
FEW_STEPS = {**NATIVE, "num_inference_steps": 4, "guidance_scale": 1.0}
FOLDERS = {"model": "weights", "student": "student", "hunyuan": "hunyuan"}  # of each model's weights


def path(name: str = "model") -> str:
    """Folder of the weights, for ``WanPipeline.from_pretrained``; through it diffusers adds a frame, through ``load`` not.

    The student's folder has its own transformer and text encoder only: ``load("student")`` takes the rest from the model.
    HunyuanVideo's lacks a codec that diffusers knows: ``load("hunyuan")`` brings it.
    """
    return str(Path(__file__).parent / FOLDERS[name])


def tokens(height: int, width: int, num_frames: int, **_: object) -> tuple[int, int, int]:
    """Video tokens (time, height, width) of a call with these arguments: ``tokens(**NATIVE)``."""
    return num_frames, height // 8, width // 8


def load(name: str | torch.dtype | None = "model", dtype: torch.dtype | None = None) -> Any:
    """A trained pipeline ("model", "student", "hunyuan"), on the CPU and in float32 unless told otherwise."""
    import torch

    if not isinstance(name, str):  # load(torch.bfloat16), as it was before there was a student
        name, dtype = "model", name
    if name not in FOLDERS:
        *others, last = FOLDERS
        raise HeartError(f"there is no embedded model {name[:40]!r}: there are {', '.join(others)} and {last}")
    if not Path(path(name)).is_dir():
        raise HeartError(f"the embedded model {name!r} has no weights in this version: train it, see tools/train_tiny")
    dtype = dtype or torch.float32
    with warnings.catch_warnings():
        # Old diffusers know no other name for it, new ones warn of this one.
        warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)
        pipe = _load_hunyuan(dtype) if name == "hunyuan" else _load_wan(name, dtype)
    pipe.set_progress_bar_config(disable=True)
    pipe.register_to_config(_name_or_path=path(name))
    return pipe


def _load_wan(name: str, dtype: torch.dtype) -> WanPipeline:
    """The Wan pipeline, with the student's own parts where the student is asked for."""
    from diffusers import WanTransformer3DModel
    from transformers import UMT5EncoderModel

    from .pipeline import WanPipeline

    parts = {}
    if name == "student":  # its files hold float16
        folder = path(name)
        transformer = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=dtype)
        text_encoder = UMT5EncoderModel.from_pretrained(folder, subfolder="text_encoder").to(dtype)
        parts = {"transformer": transformer.eval(), "text_encoder": text_encoder.eval()}
    return WanPipeline.from_pretrained(path(), **parts, torch_dtype=dtype)


def _load_hunyuan(dtype: torch.dtype) -> Any:
    """The HunyuanVideo pipeline, with a codec of our own."""
    from diffusers import HunyuanVideoPipeline

    from .patch_codec import PatchCodec

    codec = PatchCodec.from_pretrained(path("hunyuan"), subfolder="vae", torch_dtype=dtype)
    said = logging.getLogger("diffusers.pipelines.pipeline_utils")
    said.addFilter(_expected)
    try:
        return HunyuanVideoPipeline.from_pretrained(path("hunyuan"), vae=codec.eval(), torch_dtype=dtype)
    finally:
        said.removeFilter(_expected)


def _expected(record: logging.LogRecord) -> bool:
    """Whether a line of diffusers' log says anything new: that the codec is ours is known."""
    return "Expected types for vae" not in record.getMessage()


def load_random(seed: int = 0, dtype: torch.dtype | None = None, name: str = "model") -> Any:
    """The same architecture with the random weights that training starts from (seed 0): the control."""
    import torch

    pipe = load(name, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = type(pipe.transformer).from_config(pipe.transformer.config)  # text encoders are set, not trained
    pipe.register_modules(transformer=transformer.to(pipe.transformer.dtype).eval())
    return pipe
