"""From a model's name on the command line to a pipeline and the arguments of its call."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

from ..errors import HeartError

log = logging.getLogger(__name__)

# Embedded models by the name that commands know them by, each with the name that `tiny.load` knows it by.
TINY = {
    "tiny": "model", "tiny-student": "student", "tiny-hunyuan": "hunyuan",
    "tiny-random": "model", "tiny-hunyuan-random": "hunyuan",
}  # fmt: skip
RANDOM = "-random"  # ends the names of controls: the same architecture with random weights
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
DTYPES = ("float32", "bfloat16", "float16")
# Frames a second that models were trained at, by the beginning of their transformer's class name.
FRAME_RATES = {
    "Wan": 16, "HunyuanVideo": 24, "CogVideoX": 8, "LTX": 24, "Mochi": 30, "Cosmos": 24, "SkyReels": 24,
}  # fmt: skip
TINY_FRAME_RATE = 8
UNIT, TINY_UNIT = 8, 16  # pixels that width and height are multiples of: in every video model, and in the embedded one
ROOM_FOR_VIDEO = 12 << 30  # bytes that activations and decoding of a full-size video take beside the weights


def check(model: str, dtype: str | None = None, device: str | None = None) -> str:
    """Raise if these cannot be meant, before anything is loaded; the device that will be used."""
    import torch

    if dtype is not None and dtype not in DTYPES:
        raise HeartError(f"--dtype is {dtype!r}: use {', '.join(DTYPES)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise HeartError(f"--device is {device!r}: use cpu, cuda, or cuda:N") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise HeartError("--device is cuda but PyTorch sees no CUDA device here: use --device cpu")
    if model not in TINY and not Path(model).exists() and not HUB_ID.fullmatch(model):
        raise HeartError(f"there is no model {model!r}: give 'tiny', a folder, or a hub id like owner/name")
    if Path(model).exists() and model not in TINY and not (Path(model) / "model_index.json").is_file():
        if Path(model).is_file():
            raise HeartError(f"the model {model!r} is a file: give the folder of a diffusers pipeline")
        raise HeartError(f"the folder {model!r} has no model_index.json: give the folder of a diffusers pipeline")
    return device


def load(model: str = "tiny", dtype: str | None = None, device: str | None = None) -> Any:
    """A diffusers pipeline on its device: the embedded model, a folder, or a model id of the hub."""
    import torch

    device = check(model, dtype, device)
    kind = getattr(torch, dtype) if dtype else (torch.bfloat16 if device != "cpu" else torch.float32)
    if model in TINY:
        from .. import tiny

        random = model.endswith(RANDOM)
        pipe = tiny.load_random(dtype=kind, name=TINY[model]) if random else tiny.load(TINY[model], kind)
    else:
        pipe = _from_pretrained(model, kind)
    pipe.set_progress_bar_config(disable=True)
    return place(pipe, device)


def _from_pretrained(model: str, kind: Any) -> Any:
    import torch
    from diffusers import DiffusionPipeline

    kinds = {"default": kind, "vae": torch.float32} if _wants_exact_decoder(model) else kind
    try:
        with warnings.catch_warnings():  # old diffusers know no other name for it, new ones warn of this one
            warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)
            return DiffusionPipeline.from_pretrained(model, torch_dtype=kinds)
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        raise HeartError(f"the model {model!r} cannot be loaded ({first}): check its name or folder") from None


def _wants_exact_decoder(model: str) -> bool:
    """Wan's decoder shows bands in bfloat16; its authors run it in float32."""
    vae = _index(model).get("vae") or [None, ""]
    return "AutoencoderKLWan" in str(vae[-1])


def _index(model: str) -> dict[str, Any]:
    """What a pipeline's index says of its parts; nothing where it cannot be read, of which loading will say more."""
    from diffusers import DiffusionPipeline

    from .. import tiny

    try:
        return dict(DiffusionPipeline.load_config(tiny.path(_whole(model)) if model in TINY else model))
    except (OSError, ValueError):
        return {}


def _whole(model: str) -> str:
    """The embedded model whose folder holds a whole pipeline: the student's has parts of its own only."""
    return TINY[model].replace("student", "model")


def control_of(pipe: Any) -> str | None:
    """The name of an embedded pipeline's control with random weights; None for any other pipeline."""
    name = name_of(pipe)
    return f"tiny{'-hunyuan' if 'hunyuan' in name else ''}{RANDOM}" if name in TINY else None


def class_of(model: str) -> type | None:
    """The class of a pipeline, without its weights; None where nothing tells."""
    import diffusers

    return getattr(diffusers, str(_index(model).get("_class_name")), None)


def outline_of(model: str) -> Any:
    """A stand-in for a pipeline's transformer: its class's name and its config, without weights; None where nothing tells."""
    import diffusers

    from .. import tiny

    name = str((_index(model).get("transformer") or [None])[-1])
    cls = getattr(diffusers, name, None)
    source = tiny.path(_whole(model)) if model in TINY else model
    try:
        config = cls.load_config(source, subfolder="transformer") if cls else {}
    except (OSError, ValueError):
        return None
    return type(name, (), {"config": dict(config)})() if cls else None


def place(pipe: Any, device: str, free: int | None = None) -> Any:
    """Move a pipeline to its device; where memory is short, decode in tiles and offload, and say so in one line.

    `free` is the device's free memory in bytes; None: as CUDA tells it.
    """
    import torch

    if torch.device(device).type != "cuda":
        return pipe.to(device)
    free = torch.cuda.mem_get_info(device)[0] if free is None else free
    weights = _bytes(pipe)
    helped = []
    if weights + ROOM_FOR_VIDEO > free and hasattr(getattr(pipe, "vae", None), "enable_tiling"):
        pipe.vae.enable_tiling()
        helped.append("the video is decoded in tiles")
    if weights + ROOM_FOR_VIDEO // 2 > free:
        pipe.enable_model_cpu_offload(device=device)
        helped.append("models wait in main memory until they are needed")
    if helped:
        log.warning("%.0f GB of weights for %.0f GB of memory: %s", weights / 2**30, free / 2**30, " and ".join(helped))
    return pipe if len(helped) == 2 else pipe.to(device)


def _bytes(pipe: Any) -> int:
    """Bytes of all weights of a pipeline."""
    modules = [m for m in pipe.components.values() if hasattr(m, "parameters")]
    return sum(p.numel() * p.element_size() for m in modules for p in m.parameters())


def name_of(pipe: Any) -> str:
    """What a pipeline was loaded from; "tiny", "tiny-student" or "tiny-hunyuan" for an embedded model."""
    from .. import tiny

    source = str(getattr(getattr(pipe, "config", None), "_name_or_path", "") or "")
    embedded = {tiny.path(name): model for model, name in TINY.items() if not model.endswith(RANDOM)}
    if source in embedded:
        return embedded[source]
    return source or type(pipe).__name__


def frame_rate(pipe: Any) -> int:
    """Frames a second of a model's videos; 16 for one that nobody listed."""
    from ..models.inspect import transformers_of

    if name_of(pipe) in TINY:
        return TINY_FRAME_RATE
    kind = type(transformers_of(pipe)[0]).__name__
    return next((rate for begin, rate in FRAME_RATES.items() if kind.startswith(begin)), 16)


def parse_size(text: str) -> tuple[int, int]:
    """`832x480` → (832, 480): width, then height."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 2 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise HeartError(f"size is {text!r}: write it as WIDTHxHEIGHT, for example 832x480")
    return int(parts[0]), int(parts[1])


def check_call(
    size: str | None = None, frames: int | None = None, steps: int | None = None, model: str = ""
) -> dict[str, Any]:
    """What the user said of size, frames and steps, as arguments of a pipeline's call."""
    call: dict[str, Any] = {}
    if size:
        call["width"], call["height"] = parse_size(size)
        unit = TINY_UNIT if model in TINY else UNIT
        if call["width"] % unit or call["height"] % unit:
            raise HeartError(f"--size is {size}: width and height must be multiples of {unit}")
    for option, key, value in (("frames", "num_frames", frames), ("steps", "num_inference_steps", steps)):
        if value is not None:
            if value < 1:
                raise HeartError(f"--{option} is {value}: it must be 1 or more")
            call[key] = value
    return call


def call_arguments(
    model: str,
    pipe: Any,
    size: str | None = None,
    frames: int | None = None,
    steps: int | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Arguments of the pipeline's call: the model's native ones, changed where the user said so."""
    said = check_call(size, frames, steps)
    return {**_native(model, pipe, quick), **said}


def _native(model: str, pipe: Any, quick: bool) -> dict[str, Any]:
    if model in TINY:
        from .. import tiny

        size = tiny.QUICK if quick else tiny.NATIVE
        few = {key: tiny.FEW_STEPS[key] for key in ("num_inference_steps", "guidance_scale")}
        if TINY[model] == "hunyuan":  # its guidance is embedded, and its pipeline's defaults are right for it
            return {key: size[key] for key in ("height", "width", "num_frames", "num_inference_steps")}
        return {**size, **few} if model == "tiny-student" else dict(size)
    from ..presets import PRESETS, identify

    name = identify(pipe.transformer, two=getattr(pipe, "transformer_2", None) is not None)
    known = next((p for p in PRESETS.values() if name and p.config.model == name), None)
    call: dict[str, Any] = {"num_inference_steps": 50}
    if known:
        call |= {"width": known.width, "height": known.height, "num_frames": known.frames}
    return call


def read_prompts(path: str) -> list[str]:
    """Prompts from a file, one a line (empty lines, repeated ones and lines that begin with # left out), or a suite's.

    `vbench` is VBench's whole suite of 946 prompts, `vbench:overall_consistency` those of one of its dimensions.
    """
    if path == "vbench" or path.startswith("vbench:"):
        from .metrics import vbench

        return vbench.prompts(path.partition(":")[2] or None)
    file = Path(path)
    if not file.is_file():
        raise HeartError(f"there is no prompts file {path!r}: give a text file with one prompt a line, or vbench")
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise HeartError(f"{path} is not a text file in UTF-8: give one with a prompt a line") from None
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise HeartError(f"{path} holds no prompt: write one a line")
    return list(dict.fromkeys(prompts))
