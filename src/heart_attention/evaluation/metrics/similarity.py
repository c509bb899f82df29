"""PSNR and SSIM of two videos, uint8 [T, H, W, 3], computed in float64 / float32 as the usual references do."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from ...errors import HeartError

PEAK = 255.0
IDENTICAL_DB = 100.0  # what an identical frame counts, so that a mean stays finite
C1, C2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2  # SSIM's stabilisers for 8-bit data


def checked_pair(video, reference) -> tuple[np.ndarray, np.ndarray]:
    """Both videos as arrays, after making sure that they can be compared."""
    video, reference = np.asarray(video), np.asarray(reference)
    if video.shape != reference.shape:
        raise HeartError(
            f"videos of shapes {list(video.shape)} and {list(reference.shape)} cannot be compared: use equal sizes"
        )
    if video.ndim != 4 or video.shape[-1] != 3 or video.dtype != np.uint8 or reference.dtype != np.uint8:
        raise HeartError(f"metrics need uint8 [T, H, W, 3], not {video.dtype} {list(video.shape)}: see video.to_uint8")
    return video, reference


def _decibel(mse: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.where(mse == 0, IDENTICAL_DB, np.minimum(10 * np.log10(PEAK**2 / mse), IDENTICAL_DB))


def _frame_mse(video: np.ndarray, reference: np.ndarray) -> np.ndarray:
    difference = video.astype(np.int32) - reference.astype(np.int32)
    return (difference.astype(np.float64) ** 2).mean(axis=(1, 2, 3))


def psnr(video, reference) -> float:
    """Mean over frames of each frame's PSNR."""
    return float(_decibel(_frame_mse(*checked_pair(video, reference))).mean())


def psnr_pooled(video, reference) -> float:
    """PSNR of the mean squared error over the whole video."""
    return float(_decibel(_frame_mse(*checked_pair(video, reference)).mean()))


def _ssim(video, reference, window: torch.Tensor) -> float:
    video, reference = checked_pair(video, reference)
    size = window.shape[0]
    if min(video.shape[1:3]) < size:
        raise HeartError(f"SSIM needs frames of at least {size}×{size} pixels, not {video.shape[1]}×{video.shape[2]}")
    total = 0.0
    for a, b in zip(video, reference):  # a frame at a time keeps memory small
        x = torch.from_numpy(a).to(torch.float64).permute(2, 0, 1)[:, None]  # [3, 1, H, W]
        y = torch.from_numpy(b).to(torch.float64).permute(2, 0, 1)[:, None]
        stacked = torch.cat([x, y, x * x, y * y, x * y])
        rows = F.conv2d(stacked, window.view(1, 1, -1, 1))  # separable: rows, then columns
        ux, uy, uxx, uyy, uxy = F.conv2d(rows, window.view(1, 1, 1, -1)).chunk(5)
        numerator = (2 * ux * uy + C1) * (2 * (uxy - ux * uy) + C2)
        denominator = (ux * ux + uy * uy + C1) * (uxx - ux * ux + uyy - uy * uy + C2)
        total += (numerator / denominator).mean().item()
    return total / len(video)


def ssim(video, reference) -> float:
    """SSIM with the Gaussian 11×11 window, σ 1.5, of the original paper; valid region only."""
    offsets = torch.arange(11, dtype=torch.float64) - 5
    window = torch.exp(-(offsets**2) / (2 * 1.5**2))
    return _ssim(video, reference, window / window.sum())


def ssim_box(video, reference) -> float:
    """SSIM with a uniform 11×11 window; valid region only."""
    return _ssim(video, reference, torch.full((11,), 1 / 11, dtype=torch.float64))
