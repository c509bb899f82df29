"""One generation with one method, timed; several of them in turns, a denoising step each (`timing`)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from . import timing, video
from .methods import Method


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all methods of a comparison have in common.

    Args:
        model: the model's name, for records and tables.
        call: arguments of the pipeline's call: size, frames, steps, guidance.
        metrics: names of the metrics against dense.
        fps: frames a second of the videos that are written.
        in_turns: methods take turns step by step; None: so on a CPU, where others share the machine.
        compile_blocks: the transformer's repeated blocks are compiled, for every method, dense too.
        timed: whether times count. Videos do not depend on the machine's load: without times nothing takes turns, and
            dense attention runs once.
    """

    model: str
    call: dict[str, Any]
    metrics: tuple[str, ...] = ("psnr", "ssim")
    fps: int = 8
    in_turns: bool | None = None
    compile_blocks: bool = False
    timed: bool = True


class _Lane:
    """One method's generation among others: its own view of the pipeline, and what is put aside while others run."""

    def __init__(self, pipe: Any, pause: Callable[[], None] | None) -> None:
        from ..models.attachment import attachment_of
        from ..models.inspect import transformers_of

        self.pipe, self.pause = (pipe, None) if pause is None else (view(pipe), pause)
        self._attachments = lambda: [a for a in map(attachment_of, transformers_of(self.pipe)) if a is not None]
        self.timer = timing.ForwardTimer(_modules(pipe), device_of(pipe))
        self.seconds, self._began = 0.0, time.perf_counter()

    def step_done(self) -> None:
        """A denoising step is over: the others' turn."""
        self.timer.step += 1
        if self.pause is None:
            return
        self.seconds += time.perf_counter() - self._began
        mine = self._attachments()
        for attachment in mine:
            attachment.pause()
        self.timer.paused = True
        try:
            self.pause()
        finally:
            self.timer.paused = False
            for attachment in mine:
                attachment.resume()
            self._began = time.perf_counter()

    def close(self) -> tuple[list[float], float]:
        """Seconds of the model by step, and of the whole generation without the others' turns."""
        return self.timer.close(), self.seconds + time.perf_counter() - self._began


def view(pipe: Any) -> Any:
    """The same pipeline with a scheduler of its own, so that several generations can be under way."""
    view = copy.copy(pipe)
    view.scheduler = copy.deepcopy(pipe.scheduler)
    return view


def _modules(pipe: Any) -> list:
    """The denoising models as the pipeline calls them, compiled or not (two for Wan2.2)."""
    from ..models.inspect import named_transformers

    return [getattr(pipe, name) for name in named_transformers(pipe)]


def device_of(pipe: Any) -> Any:
    """The device that a pipeline computes on; with offload its weights wait elsewhere."""
    import torch

    return torch.device(str(getattr(pipe, "_execution_device", "cpu")))


def generate(
    pipe: Any,
    method: Method,
    prompt: str,
    seed: int,
    setting: Setting,
    on_step: Callable[[], Any] | None = None,
    pause: Callable[[], None] | None = None,
) -> tuple[np.ndarray, dict]:
    """One video with one method: frames uint8 [T, H, W, 3] and its row, with the engine's statistics under "stats".

    `pause` is called after every step and returns when it is this generation's turn again.
    """
    import torch

    from .. import api
    from ..models import regional_compile

    lane = _Lane(pipe, pause)

    def step_done(pipe: Any, step: int, timestep: Any, values: dict) -> dict:
        if on_step:
            on_step()
        lane.step_done()
        return values

    generator = torch.Generator("cpu").manual_seed(seed)
    try:
        with regional_compile.compiled(lane.pipe, setting.compile_blocks), api.enabled(lane.pipe, method.config):
            output = lane.pipe(
                prompt, generator=generator, callback_on_step_end=step_done, output_type="np", **setting.call
            )
            stats = api.stats(lane.pipe, wait=True).to_dict()
    finally:
        steps, wall = lane.close()
    return video.to_uint8(output.frames[0]), _row(method, prompt, seed, stats, steps, wall)


def _row(method: Method, prompt: str, seed: int, stats: dict, steps: list[float], wall: float) -> dict:
    return {
        "method": method.name,
        "prompt": prompt,
        "seed": seed,
        "attention_s": stats["time"]["total"],
        "total_s": sum(steps),
        "wall_s": wall,
        "steps_s": [round(s, 6) for s in steps],
        "density": stats["density_with_fallbacks"],
        "dense_share": stats["fallback_share"],
        "refresh_rate": stats["refresh_rate"],
        "cost": stats["cost"],
        "dense_reasons": dict(stats["fallbacks"]),
        "kernel": ", ".join(stats["kernels"]),
        "cost_table": stats["cost_table"],
        "parts_s": stats["time"],
        "stats": stats,
    }


def warm_up(pipe: Any, methods: Sequence[Method], prompt: str, setting: Setting) -> None:
    """Three short steps with every method, so that nothing is built or measured for the first time on the clock."""
    for method in methods:
        if method.config.dense_steps:
            method = dataclasses.replace(method, config=dataclasses.replace(method.config, dense_steps=1))
        short = dataclasses.replace(setting, call={**setting.call, "num_inference_steps": 3})
        with _hushed():
            generate(pipe, method, prompt, 0, short)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """No warnings: what is said of three steps of warming up is not meant for the user."""
    logger = logging.getLogger(__name__.partition(".")[0])
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def takes_turns(pipe: Any, setting: Setting) -> bool:
    """Whether methods take turns: not on a GPU, which nobody shares, nor with compiled models, which would recompile."""
    if setting.in_turns is not None:
        return setting.in_turns
    modules = _modules(pipe)
    compiled = any(hasattr(m, "_orig_mod") for m in modules)
    return not compiled and device_of(pipe).type == "cpu"
