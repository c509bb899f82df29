"""From a model's name on the command line to a pipeline and the arguments of its call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import HeartError

TINY = ("tiny", "tiny-random")  # the embedded model, and its architecture with random weights as the control


def load(model: str = "tiny", dtype: str | None = None, device: str | None = None):
    """A diffusers pipeline: the embedded model, a folder, or a model id of the hub."""
    import torch

    if dtype is not None and dtype not in ("float32", "bfloat16", "float16"):
        raise HeartError(f"dtype is {dtype!r}: use float32, bfloat16 or float16")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = getattr(torch, dtype) if dtype else (torch.bfloat16 if device != "cpu" else torch.float32)
    if model in TINY:
        from diffusers.utils import logging

        from .. import tiny

        logging.get_logger("diffusers.pipelines.wan.pipeline_wan").setLevel("ERROR")  # it warns of any frame count here
        pipe = tiny.load(kind) if model == "tiny" else tiny.load_random(dtype=kind)
    else:
        from diffusers import DiffusionPipeline

        if not Path(model).exists() and model.count("/") != 1:
            raise HeartError(f"there is no model {model!r}: give 'tiny', a folder, or a hub id like owner/name")
        try:
            pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=kind)
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise HeartError(f"the model {model!r} cannot be loaded ({first}): check its name or folder") from None
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def parse_size(text: str) -> tuple[int, int]:
    """`832x480` → (832, 480): width, then height."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 2 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise HeartError(f"size is {text!r}: write it as WIDTHxHEIGHT, for example 832x480")
    return int(parts[0]), int(parts[1])


def call_arguments(model: str, pipe, size: str | None = None, frames: int | None = None, steps: int | None = None,
                   quick: bool = False) -> dict[str, Any]:  # fmt: skip
    """Arguments of the pipeline's call: the model's native ones, changed where the user said so."""
    if model in TINY:
        from .. import tiny

        call = dict(tiny.QUICK if quick else tiny.NATIVE)
    else:
        from ..config import PRESETS, identify

        name = identify(pipe.transformer, two=getattr(pipe, "transformer_2", None) is not None)
        known = next((p for p in PRESETS.values() if name and p.config.model == name), None)
        call = {"num_inference_steps": 50}
        if known:
            call |= {"width": known.width, "height": known.height, "num_frames": known.frames}
    if size:
        call["width"], call["height"] = parse_size(size)
    for key, value in (("num_frames", frames), ("num_inference_steps", steps)):
        if value is not None:
            if value < 1:
                raise HeartError(f"{key} is {value}: it must be 1 or more")
            call[key] = value
    return call


def read_prompts(path: str) -> list[str]:
    """One prompt a line, empty lines and lines that begin with # left out."""
    file = Path(path)
    if not file.is_file():
        raise HeartError(f"there is no prompts file {path!r}: give a text file with one prompt a line")
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise HeartError(f"{path} is not a text file in UTF-8: give one with a prompt a line") from None
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise HeartError(f"{path} holds no prompt: write one a line")
    return prompts
