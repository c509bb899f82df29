"""Quicker attention for training, on CPUs with AVX-512 for bfloat16: a small C kernel, forward and backward.

Training only: figures are of weights that generate in float32. Elsewhere training takes PyTorch's attention.
"""

import ctypes
import functools
import hashlib
import logging
import math
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.nn import functional

log = logging.getLogger("train_tiny")

SOURCE = Path(__file__).with_name("attention.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
HEAD, BLOCK = 32, 64  # what the kernel is written for: head size, and what must divide the number of tokens


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernel, built on first use; None, with a line in the log, where it cannot be had."""
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or "avx512_bf16" not in cpu.read_text():
        log.info("attention: PyTorch's, this CPU has no AVX-512 for bfloat16")
        return None
    compiler = shutil.which("cc")
    if compiler is None:
        log.info("attention: PyTorch's, there is no C compiler")
        return None
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    built = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "train_tiny" / f"{name}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        part = built.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, "-o", str(part), str(SOURCE), "-lm"], check=True)
        part.replace(built)
    return ctypes.CDLL(str(built))


def fits(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Is the kernel written for these [B, N, H, D]?"""
    return q.dtype == torch.bfloat16 and q.shape == k.shape and q.shape[-1] == HEAD


def _at(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


@torch.library.custom_op("train_tiny::attention", mutates_args=())
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, N, H, 32] in bfloat16 over the first `valid` [B] keys, and the log-sums of its rows [B, H, N]."""
    q, k, v, valid = (t.contiguous() for t in (q, k, v, valid.int()))
    b, n, h, d = q.shape
    out, sums = torch.empty_like(q), q.new_empty((b, h, n), dtype=torch.float32)
    library().train_forward(b, n, h, *_at(valid, q, k, v, out, sums), ctypes.c_float(d**-0.5))
    return out, sums


@attention.register_fake
def _(q, k, v, valid):
    b, n, h, _ = q.shape
    return torch.empty(q.shape, dtype=q.dtype), q.new_empty((b, h, n), dtype=torch.float32)


@torch.library.custom_op("train_tiny::attention_backward", mutates_args=())
def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    valid: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v for that of the output."""
    q, k, v, valid, out, grad = (t.contiguous() for t in (q, k, v, valid.int(), out, grad.to(q.dtype)))
    b, n, h, d = q.shape
    found = tuple(torch.empty_like(q) for _ in range(3))
    library().train_backward(b, n, h, *_at(valid, q, k, v, out, grad, sums, *found), ctypes.c_float(d**-0.5))
    return found


@backward.register_fake
def _(q, k, v, valid, out, sums, grad):
    return tuple(torch.empty(q.shape, dtype=q.dtype) for _ in range(3))


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx, grad, _):
    return *backward(*ctx.saved_tensors, grad), None


attention.register_autograd(_gradients, setup_context=_keep)


def over_first_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Attention [B, N, H, D] over the first `valid` [B] keys, of any length."""
    n = q.shape[1]
    q, k, v = (functional.pad(t, (0, 0, 0, 0, 0, -n % BLOCK)) for t in (q, k, v))
    return attention(q, k, v, valid)[0][:, :n]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [B, N, H, D], as Wan's processor has them."""
    one, two = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((one * cos - two * sin, one * sin + two * cos), -1).flatten(-2).type_as(x)


def over_few_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Attention [B, N, H, D] whose matrix is small enough to be written down: fused by the compiler."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    return (torch.softmax(scores, -1).to(v.dtype) @ v).transpose(1, 2)


class QuickAttention:
    """A processor for Wan's attention layers that computes what diffusers' own does, in less time."""

    bias: torch.Tensor | None = None  # [B, 1, 1, keys] of a short text, see PaddedTextAttention

    def __init__(self):
        self.kernel = library() is not None

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        """Attention of [B, N, C] over itself or over a text."""
        other = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.to_q(hidden_states), attn.to_k(other), attn.to_v(other)
        q, k = attn.norm_q(q).to(v.dtype), attn.norm_k(k).to(v.dtype)
        q, k, v = (t.unflatten(-1, (attn.heads, -1)) for t in (q, k, v))
        if rotary_emb is not None:
            q, k = _rotate(q, *rotary_emb), _rotate(k, *rotary_emb)
        if encoder_hidden_states is not None:
            out = over_few_keys(q, k, v, self.bias)
        elif self.kernel and fits(q, k):
            out = over_first_keys(q, k, v, torch.full((len(q),), q.shape[1], dtype=torch.int32))
        else:
            out = functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))


class QuickJointAttention:
    """The same for HunyuanVideo's attention layers: over video and text, whose unused slots come last."""

    def __init__(self):
        self.kernel = library() is not None

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None):
        """Attention of video [B, N, C] and text [B, T, C] over both; what is masked [B, 1, 1, N + T] comes last."""
        n, single = hidden_states.shape[1], attn.add_q_proj is None
        if single:
            hidden_states = torch.cat([hidden_states, encoder_hidden_states], 1)
        q, k, v = _normed(attn, hidden_states, "to_{}", "norm_{}")
        q, k = (torch.cat([_rotate(t[:, :n], *_by_pairs(image_rotary_emb)), t[:, n:]], 1) for t in (q, k))
        if not single:
            text = _normed(attn, encoder_hidden_states, "add_{}_proj", "norm_added_{}")
            q, k, v = (torch.cat(pair, 1) for pair in zip((q, k, v), text, strict=True))
        if self.kernel and fits(q, k):
            out = over_first_keys(q, k, v, attention_mask.flatten(1).sum(1))
        else:
            parts = (t.transpose(1, 2) for t in (q, k, v))
            out = functional.scaled_dot_product_attention(*parts, attn_mask=attention_mask).transpose(1, 2)
        video, text = out.flatten(2).split([n, out.shape[1] - n], 1)
        return (video, text) if single else (attn.to_out[1](attn.to_out[0](video)), attn.to_add_out(text))


def _normed(attn, x: torch.Tensor, names: str, norms: str) -> tuple[torch.Tensor, ...]:
    """q, k and v [B, N, H, D] of tokens [B, N, C], q and k normed."""
    q, k, v = (getattr(attn, names.format(part))(x).unflatten(-1, (attn.heads, -1)) for part in "qkv")
    return getattr(attn, norms.format("q"))(q).to(v.dtype), getattr(attn, norms.format("k"))(k).to(v.dtype), v


def _by_pairs(positions: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """HunyuanVideo's rotary positions [N, D] as Wan has them [1, N, 1, D]."""
    cos, sin = positions
    return cos[None, :, None], sin[None, :, None]


def quicken(transformer: torch.nn.Module) -> None:
    """Let an embedded model's transformer compute in bfloat16, its own attention by the kernel, residuals in float32."""
    if hasattr(transformer, "single_transformer_blocks"):
        for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
            block.attn.set_processor(QuickJointAttention())
        embedders = [transformer.x_embedder, transformer.context_embedder]
    else:
        for block in transformer.blocks:
            block.attn1.set_processor(QuickAttention())
            block.attn2.set_processor(QuickAttention())
        embedders = [transformer.patch_embedding]
    for embedder in embedders:
        embedder.register_forward_hook(lambda module, args, out: out.float())
    plain = transformer.forward

    def forward(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*args, **kwargs)

    transformer.forward = forward
