"""HEART as a ComfyUI node: it takes a MODEL and gives one whose video self-attention is sparse.

A folder in `custom_nodes` with one line makes the node known (examples/comfyui/__init__.py). ComfyUI tells a node
little about where a call stands, so this is what it goes by:

- an `optimized_attention_override` sees every attention call, with `block_type` and `block_index`; blocks that share
  both (VACE's control blocks and the main ones) are told apart by their order within one evaluation of the model;
- a wrapper around the diffusion model sees the beginning of each evaluation, the latent, and the sampler's schedule;
- a sampler that evaluates twice a step has a second guidance branch for it, so that states do not mix.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any

import torch

from ..api import resolve
from ..config import HeartConfig
from ..errors import HeartError
from ..masks import Text
from ..online.call import CallContext
from ..online.engine import Engine
from ..presets import PRESETS

log = logging.getLogger(__name__)

WRAPPER = "diffusion_model"  # comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
OVERRIDE = "optimized_attention_override"
PRESET = "wan2.1-14b-xattention"  # shown first
# Lists of blocks in ComfyUI's video models, in the order of layers that calibrations have, and their `block_type`.
BLOCKS = {"double_blocks": "double", "single_blocks": "single", "blocks": "double", "transformer_blocks": "double"}


class HeartNode:
    """The node "HEART sparse attention"."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model_patches/attention"
    DESCRIPTION = "Sparse video self-attention with reused masks; a calibration file gives each head its own threshold."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """What the node asks for."""
        return {
            "required": {"model": ("MODEL",), "preset": (sorted(PRESETS), {"default": PRESET})},
            "optional": {
                "file": ("STRING", {"default": "", "tooltip": "a .heart.json or config file, instead of the preset"}),
                "first_step": (
                    "INT",
                    {"default": -1, "min": -1, "max": 1000, "tooltip": "steps taken by another sampler; -1: by noise"},
                ),
            },
        }

    def patch(self, model: Any, preset: str, file: str = "", first_step: int = -1) -> tuple[Any]:
        """A clone of the model with HEART in it."""
        config, _ = resolve(file.strip() or preset)
        patched = model.clone()
        host = Host(config.replace(model=None), patched, first_step)
        options = patched.model_options.setdefault("transformer_options", {})
        if options.get(OVERRIDE) is not None:
            log.warning("another attention override is replaced by HEART; dense calls go to ComfyUI's own attention")
        options[OVERRIDE] = host.override
        patched.add_wrapper_with_key(WRAPPER, "heart", host.evaluate)
        return (patched,)


NODE_CLASS_MAPPINGS = {"HeartSparseAttention": HeartNode}
NODE_DISPLAY_NAME_MAPPINGS = {"HeartSparseAttention": "HEART sparse attention"}


class Host:
    """One patched model: its engine, and where its sampler stands. `print(heart.stats(host.engine))` tells more."""

    def __init__(self, config: HeartConfig, patcher: Any, first_step: int = -1) -> None:
        network = patcher.get_model_object("diffusion_model")
        self.lists = {name: len(getattr(network, name, ())) for name in (*BLOCKS, "vace_blocks")}
        self.patch = tuple(getattr(network, "patch_size", (1, 2, 2)))
        self.engine = Engine(config, sum(self.lists.values()), _heads(network))
        self.first_step, self.most_noise = first_step, _most_noise(patcher)
        dense = config.dense_steps
        self.warm_up = dense if isinstance(dense, int) else 5  # more than any automatic warm-up takes of a second half
        self.tells_noise = 0 < self.most_noise <= 1 + 1e-3  # sigmas are shares of noise, as in all flow models
        self._schedule: Any = None
        self._levels: list[float] | None = None  # noise of every step, where sigmas tell
        self._sigma = math.inf
        self._step, self._generation = 0, 0
        self._evaluations: Counter[str] = Counter()  # at this step, by guidance branch
        self._order: Counter[tuple[str, int]] = Counter()  # self-attention calls of this evaluation, by block
        self._branch, self._grid = "", (0, 0, 0)

    # ---------------------------------------- an evaluation of the model

    def evaluate(self, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Wraps the diffusion model: note the step, the branch and the grid, then let it run."""
        self._begin(x, _options(args, kwargs))
        return executor(x, *args, **kwargs)

    def _begin(self, x: torch.Tensor, options: dict[str, Any]) -> None:
        schedule, sigma = options.get("sample_sigmas"), float(options["sigmas"].flatten()[0])
        if schedule is not self._schedule or sigma > self._sigma * (1 + 1e-5):
            self.engine.reset()
            self._schedule, self._evaluations = schedule, Counter()
            self._levels = self._noise_levels(schedule)
            self._generation, self._step = self._generation + 1, -1
        self._sigma = sigma
        step = self._place(schedule, sigma)
        if step != self._step:
            self._step, self._evaluations = step, Counter()
        branch = ",".join(map(str, options.get("cond_or_uncond", ())))
        again = self._evaluations[branch]
        self._evaluations[branch] += 1
        self._branch = f"{branch} again {again}" if again else branch
        self._order.clear()
        t, h, w = self.patch
        frames, height, width = x.shape[-3:]
        self._grid = (-(-frames // t), -(-height // h), -(-width // w))  # ComfyUI pads to whole patches

    def _place(self, schedule: Any, sigma: float) -> int:
        """The step at this noise: the last one of the schedule that is not less noisy, after those of other samplers."""
        if schedule is None or len(schedule) < 2:
            return self._step + 1
        reached = int((schedule[:-1] >= sigma * (1 - 1e-5)).sum())
        before = self._steps_before(schedule)
        steps = before + len(schedule) - 1
        self.engine.steps = lambda: steps
        return max(reached - 1, 0) + before

    def _steps_before(self, schedule: Any) -> int:
        """Steps of other samplers: a schedule that begins in the middle is a second half, for which no warm-up is due."""
        if self.first_step >= 0:
            return self.first_step
        return self.warm_up if float(schedule[0]) < 0.98 * self.most_noise else 0

    def _noise_levels(self, schedule: Any) -> list[float] | None:
        """The noise level of every step, those of other samplers before as whole noise."""
        if schedule is None or len(schedule) < 2 or not self.tells_noise:
            return None
        return [1.0] * self._steps_before(schedule) + schedule[:-1].tolist()

    # ---------------------------------------- one attention call

    def override(self, func: Any, q: Any, k: Any, v: Any, heads: int, mask: Any = None, **kw: Any) -> Any:
        """Answer one attention call; `func` is the attention that ComfyUI would have run."""
        options = kw.get("transformer_options") or {}
        if mask is not None or q.shape != k.shape or "block_index" not in options:
            return func(q, k, v, heads, mask=mask, **kw)
        layer = self._layer(options)
        if not kw.get("skip_reshape"):  # [B, N, H * D] -> [B, H, N, D]
            q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        layout = {**kw, "skip_reshape": True, "skip_output_reshape": True}

        def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return func(q, k, v, heads, mask=None, **layout)

        out = dense(q, k, v) if layer is None else self.engine.attend(self._call(layer, q), q, k, v, dense)
        return out if kw.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)

    def _layer(self, options: dict[str, Any]) -> int | None:
        """The layer of a call, None for one that no block of this model explains."""
        kind, index = options.get("block_type", "double"), int(options["block_index"])
        again = self._order[kind, index]
        self._order[kind, index] += 1
        names = [name for name, of in BLOCKS.items() if of == kind and index < self.lists[name]]
        if not names:
            return None
        if not again:
            return sum(self.lists[name] for name in _before(names[0])) + index
        controls = self.lists["vace_blocks"]  # called after the main block that they belong to, in its order
        mine = self._order["vace", 0]
        self._order["vace", 0] += 1
        return sum(self.lists.values()) - controls + mine if mine < controls else None

    def _call(self, layer: int, q: torch.Tensor) -> CallContext:
        beside = q.shape[2] - math.prod(self._grid)  # tokens that are no video: HunyuanVideo's text, after it
        call = CallContext(layer=layer, step=self._step, branch=self._branch, generation=self._generation)
        call.sigma, call.schedule = self._sigma if self.tells_noise else None, self._levels
        if beside >= 0:
            call.grid = self._grid
            call.text = [Text(math.prod(self._grid), beside)] * q.shape[0] if beside else None
        return call


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The transformer options among the arguments of a diffusion model."""
    found = [x for x in (kwargs.get("transformer_options"), *args) if isinstance(x, dict) and "sigmas" in x]
    if not found:
        raise HeartError(
            "this ComfyUI model passes no transformer options to its diffusion model: remove the HEART node"
        )
    return found[0]


def _before(name: str) -> list[str]:
    names = list(BLOCKS)
    return names[: names.index(name)]


def _heads(network: Any) -> int:
    """How many attention heads a diffusion model of ComfyUI has."""
    for owner in (network, getattr(network, "params", None)):
        for name in ("num_heads", "num_attention_heads"):
            if getattr(owner, name, None):
                return int(getattr(owner, name))
    raise HeartError(
        f"{type(network).__name__} does not say how many heads it has: HEART serves ComfyUI's video models"
    )


def _most_noise(patcher: Any) -> float:
    """The noise at which a whole schedule begins, 0 where the model does not tell."""
    sampling = patcher.get_model_object("model_sampling")
    return float(getattr(sampling, "sigma_max", 0.0) or 0.0)
