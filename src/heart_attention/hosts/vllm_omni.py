r"""HEART as an attention backend of vLLM-Omni's diffusion engine (written against 0.30).

vLLM-Omni has a fixed list of backends whose classes can be replaced. `register` puts `HeartBackend` in the place of
TORCH_SDPA; it runs by itself, in every worker, as a plug-in of the entry-point group `vllm_omni.general_plugins`, when
HEART_VLLM_OMNI names a preset, a config or a calibration:

    HEART_VLLM_OMNI=wan2.1-14b-xattention vllm serve Wan-AI/Wan2.1-T2V-14B-Diffusers --omni \
        --diffusion-attention-config '{"per_role": {"self": {"backend": "TORCH_SDPA"}}}'

Step and noise level come from the forward context, the layer from the module's prefix, grid and prefix tokens from the
metadata's `video_layout`. What the host does not tell is the guidance branch: the n-th call of a layer at one step is branch n.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum, register_diffusion_backend
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available

from ..api import resolve
from ..config import HeartConfig
from ..errors import HeartError
from ..masks import Text
from ..online.call import CallContext
from ..online.engine import Engine

log = logging.getLogger(__name__)

VARIABLE = "HEART_VLLM_OMNI"
SLOT = DiffusionAttentionBackendEnum.TORCH_SDPA
ROLES = ("self", "joint")


def register() -> None:
    """Put HEART in the place of TORCH_SDPA, if the environment asks for it."""
    wanted = os.environ.get(VARIABLE, "").strip()
    if not wanted:
        return
    model.configure(resolve(wanted)[0])
    register_diffusion_backend(SLOT, f"{__name__}.{HeartBackend.__name__}")
    log.info("HEART answers %s with %s", SLOT.name, wanted)


class HeartBackend(AttentionBackend):
    """Sparse attention for video layers; dense attention by PyTorch for all others."""

    accept_output_buffer = True

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        """Masked calls run dense, as SDPA does them."""
        return True

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Any."""
        return []

    @staticmethod
    def get_name() -> str:
        """What logs call it."""
        return "HEART"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """The class that is made for every attention layer."""
        return HeartImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """The host's own."""
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> Any:
        """Diffusion backends have no metadata builder."""
        raise NotImplementedError


class Model:
    """What all layers of a model share: the config, and the engine once the layers are known."""

    def __init__(self) -> None:
        self.configure(None)

    def configure(self, config: HeartConfig | None) -> None:
        """Begin anew, for another model."""
        self.config = None if config is None else config.replace(model=None)
        self.layers: list[HeartImpl] = []
        self.engine: Engine | None = None
        self.generation, self.last_step = 0, -1

    def add(self, layer: HeartImpl) -> tuple[int, int]:
        """A layer's transformer and index: a prefix that comes again belongs to the next transformer (Wan2.2)."""
        known = [x.prefix for x in self.layers]
        transformer = known.count(layer.prefix) if layer.prefix else 0
        index = sum(1 for x in self.layers if x.place[0] == transformer)
        self.layers.append(layer)
        self.engine = None
        return transformer, index

    def serving(self) -> Engine:
        """The engine, made when the first call comes."""
        if self.engine is None:
            if self.config is None:
                raise HeartError(f"HEART has no config in this process: set {VARIABLE} to a preset or a file")
            transformers = 1 + max(x.place[0] for x in self.layers)
            layers = max(x.place[1] for x in self.layers) + 1
            self.engine = Engine(self.config, layers, self.layers[0].heads, transformers)
            self.engine.steps = lambda: _context("total_denoise_steps")
        return self.engine

    def at_step(self, step: int) -> None:
        """A step that is earlier than the last begins a generation."""
        if step < self.last_step:
            self.serving().reset()
            self.generation += 1
            for layer in self.layers:
                layer.step = -1
        self.last_step = step


model = Model()  # a worker process serves one


class HeartImpl(AttentionImpl):
    """One attention layer; q, k, v and the result are [B, N, H, D]."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        role: str = "self",
        **extra_impl_args: Any,
    ) -> None:
        given = {"num_heads": num_heads, "head_size": head_size, "softmax_scale": softmax_scale, "causal": causal}
        self.dense = SDPABackend.get_impl_cls()(
            **given, num_kv_heads=num_kv_heads, prefix=prefix, qkv_layout=qkv_layout
        )
        self.heads, self.prefix = num_heads, prefix
        self.step, self.calls = -1, 0  # of this layer, to tell guidance branches apart
        usual = num_kv_heads in (None, num_heads) and abs(softmax_scale * head_size**0.5 - 1) < 1e-6
        layout = qkv_layout is None or qkv_layout.upper() == "BSND"
        self.served = role in ROLES and usual and layout and not causal
        self.place = model.add(self) if self.served else (0, -1)

    def forward_cuda(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> torch.Tensor:
        """One call on a GPU (ROCm and others come here too)."""
        return self._attend(self.dense.forward_cuda, query, key, value, attn_metadata)

    def forward_xpu(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> torch.Tensor:
        """One call on Intel's devices."""
        return self._attend(self.dense.forward_xpu, query, key, value, attn_metadata)

    def forward_npu(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> torch.Tensor:
        """One call on Ascend devices, for which HEART has no kernel."""
        return self.dense.forward_npu(query, key, value, attn_metadata)

    def _attend(self, dense: Any, query: Any, key: Any, value: Any, metadata: Any) -> torch.Tensor:
        step = _context("denoise_step_idx")
        reason = self._reason_not(step, query, key, metadata)
        if reason:
            _warn_once(reason)
            return dense(query, key, value, metadata)

        def turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return dense(*(x.transpose(1, 2) for x in (q, k, v)), metadata).transpose(1, 2)

        assert step is not None  # `_reason_not` refuses a call without a step
        call = self._call(step, query.shape, metadata)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B, H, N, D]
        return model.serving().attend(call, q, k, v, turned).transpose(1, 2)

    def _reason_not(self, step: int | None, query: Any, key: Any, metadata: Any) -> str:
        if not self.served:
            return "an attention layer that holds no video"
        if step is None:
            return "the pipeline does not tell its denoising step"
        if query.shape != key.shape or query.shape[2] != self.heads:
            return "keys of another length than queries, or heads spread over ranks"
        if metadata is None:
            return ""
        layout = metadata.video_layout
        if metadata.attn_mask is not None or metadata.full_attn_spans is not None or metadata.joint_query is not None:
            return "an attention mask, spans or joint tokens"
        if layout is not None and (layout.video_spans or layout.latent_grid is None):
            return "several videos in one packed sequence"
        if layout is not None and _used(layout) != query.shape[1]:
            return "a packed sequence with padding"
        return ""

    def _call(self, step: int, shape: Any, metadata: Any) -> CallContext:
        model.at_step(step)
        self.calls = self.calls + 1 if step == self.step else 0
        self.step = step
        layout = None if metadata is None else metadata.video_layout
        call = CallContext(*self.place, step=step, branch=str(self.calls), generation=model.generation)
        call.sigma = _context("denoise_timestep")  # from 1 down, where the pipeline tells
        if layout is not None:
            call.grid = tuple(layout.latent_grid)
            call.text = [Text(0, layout.prefix_len)] * shape[0] if layout.prefix_len else None
        return call


def _context(name: str) -> Any:
    """What the host's forward context says, if there is one and it knows the word."""
    return getattr(get_forward_context(), name, None) if is_forward_context_available() else None


def _used(layout: Any) -> int:
    frames, rows, columns = layout.latent_grid
    return (layout.prefix_len or 0) + frames * rows * columns


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning("dense attention in vLLM-Omni: %s", reason)
