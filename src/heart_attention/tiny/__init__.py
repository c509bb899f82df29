"""The embedded model: a small ``WanPipeline`` that was really trained, for demos, tests and studies on a CPU.

    from heart_attention import tiny
    pipe = tiny.load()
    video = pipe(tiny.prompts("demo")[0], **tiny.NATIVE).frames[0]

It makes clips of one coloured shape moving over a coloured background; see MODEL_CARD.md beside this file.
Importing this module is cheap: torch and diffusers are imported by the functions that need them.
"""

from __future__ import annotations

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
NAMES = ("model", "student")


def path(name: str = "model") -> str:
    """Folder of the weights, for ``WanPipeline.from_pretrained``; through it diffusers adds a frame, through ``load`` not.

    The student's folder has its own transformer and text encoder only: ``load("student")`` takes the rest from the model.
    """
    return str(Path(__file__).parent / {"model": "weights", "student": "student"}[name])


def tokens(height: int, width: int, num_frames: int, **_: object) -> tuple[int, int, int]:
    """Video tokens (time, height, width) of a call with these arguments: ``tokens(**NATIVE)``."""
    return num_frames, height // 8, width // 8


def load(name: str | torch.dtype | None = "model", dtype: torch.dtype | None = None) -> WanPipeline:
    """The trained pipeline, or its few-step "student", on the CPU and in float32 unless told otherwise."""
    import torch

    from .pipeline import WanPipeline

    if not isinstance(name, str):  # load(torch.bfloat16), as it was before there was a student
        name, dtype = "model", name
    if name not in NAMES:
        raise HeartError(f"there is no embedded model {name[:40]!r}: there are {' and '.join(NAMES)}")
    other = {} if dtype in (None, torch.float32) else {"torch_dtype": dtype}  # the files hold float32
    with warnings.catch_warnings():
        # Old diffusers know no other name for it, new ones warn of this one.
        warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)
        parts = _student_parts(dtype or torch.float32) if name == "student" else {}
        pipe = WanPipeline.from_pretrained(path(), **parts, **other)
    pipe.set_progress_bar_config(disable=True)
    if parts:
        pipe.register_to_config(_name_or_path=path(name))
    return pipe


def _student_parts(dtype: torch.dtype) -> dict[str, Any]:
    """What the student has of its own; its files hold float16."""
    from diffusers import WanTransformer3DModel
    from transformers import UMT5EncoderModel

    folder = path("student")
    transformer = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=dtype)
    text_encoder = UMT5EncoderModel.from_pretrained(folder, subfolder="text_encoder").to(dtype)
    return {"transformer": transformer.eval(), "text_encoder": text_encoder.eval()}


def load_random(seed: int = 0, dtype: torch.dtype | None = None) -> WanPipeline:
    """The same architecture with the random weights that training starts from (seed 0): the control."""
    import torch
    from diffusers import WanTransformer3DModel
    from transformers import UMT5EncoderModel

    pipe = load(dtype=dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the order below is the order of training's initialisation
        transformer = WanTransformer3DModel.from_config(pipe.transformer.config)
        text_encoder = UMT5EncoderModel(pipe.text_encoder.config)
    if dtype not in (None, torch.float32):
        transformer, text_encoder = transformer.to(dtype), text_encoder.to(dtype)
    pipe.register_modules(transformer=transformer.eval(), text_encoder=text_encoder.eval())
    return pipe
