"""PSNR and SSIM against scikit-image and torchmetrics, and their laws."""

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torchmetrics.functional.image import peak_signal_noise_ratio as torchmetrics_psnr
from torchmetrics.functional.image import structural_similarity_index_measure as torchmetrics_ssim

from heart_attention import HeartError
from heart_attention.evaluation import metrics


@pytest.fixture
def pair():
    random = np.random.default_rng(0)
    smooth = np.cumsum(random.normal(size=(3, 24, 33, 3)), axis=2)
    video = ((smooth - smooth.min()) / np.ptp(smooth) * 255).astype(np.uint8)
    noisy = np.clip(video + random.normal(scale=12, size=video.shape), 0, 255).astype(np.uint8)
    return noisy, video


def test_psnr_equals_scikit_image(pair):
    expected = np.mean([peak_signal_noise_ratio(b, a) for a, b in zip(*pair)])
    assert metrics.psnr(*pair) == pytest.approx(expected, abs=1e-9)
    assert metrics.psnr_pooled(*pair) == pytest.approx(peak_signal_noise_ratio(pair[1], pair[0]), abs=1e-9)


@pytest.mark.parametrize("function, options", [
    (metrics.ssim, {"gaussian_weights": True, "sigma": 1.5}),
    (metrics.ssim_box, {"win_size": 11}),
])  # fmt: skip
def test_ssim_equals_scikit_image(pair, function, options):
    options |= {"use_sample_covariance": False, "data_range": 255, "channel_axis": 2}
    expected = np.mean([structural_similarity(a, b, **options) for a, b in zip(*pair)])
    assert function(*pair) == pytest.approx(expected, abs=1e-9)


def channels_first(video: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(video).permute(0, 3, 1, 2).double()


def test_psnr_equals_torchmetrics(pair):
    a, b = map(channels_first, pair)
    each = torchmetrics_psnr(a, b, data_range=255.0, reduction="none", dim=(1, 2, 3))
    assert metrics.psnr(*pair) == pytest.approx(each.mean().item(), abs=1e-6)
    assert metrics.psnr_pooled(*pair) == pytest.approx(torchmetrics_psnr(a, b, data_range=255.0).item(), abs=1e-6)


@pytest.mark.parametrize("function, options", [
    (metrics.ssim, {"gaussian_kernel": True, "sigma": 1.5}),
    (metrics.ssim_box, {"gaussian_kernel": False, "kernel_size": 11}),
])  # fmt: skip
def test_ssim_equals_torchmetrics(pair, function, options):
    _, full = torchmetrics_ssim(*map(channels_first, pair), data_range=255.0, return_full_image=True, **options)
    valid = full[..., 5:-5, 5:-5]  # torchmetrics mirrors at the border and averages over it too
    assert function(*pair) == pytest.approx(valid.mean().item(), abs=1e-6)


def test_identical_videos_are_perfect(pair):
    video = pair[0]
    assert metrics.compare(video, video, ("psnr", "psnr_pooled", "ssim", "ssim_box")) == {
        "psnr": 100.0, "psnr_pooled": 100.0, "ssim": pytest.approx(1.0), "ssim_box": pytest.approx(1.0),
    }  # fmt: skip


def test_every_metric_names_its_convention():
    assert {"psnr", "ssim", "ssim_box", "lpips_alex", "lpips_vgg", "lpips_vgg01", "vmaf"} <= set(metrics.CONVENTIONS)


@pytest.mark.parametrize("video, sentence", [
    (np.zeros((2, 24, 33, 3), np.uint8), "cannot be compared"),
    (np.zeros((3, 24, 33, 3), np.float32), "uint8"),
])  # fmt: skip
def test_bad_input_is_one_sentence(pair, video, sentence):
    with pytest.raises(HeartError, match=sentence):
        metrics.psnr(video, pair[1])


def test_unknown_metric_lists_the_known(pair):
    with pytest.raises(HeartError, match="unknown metric 'fid'.*psnr"):
        metrics.compare(*pair, ("fid",))


def test_tiny_frames_are_refused_by_ssim():
    video = np.zeros((1, 8, 8, 3), np.uint8)
    with pytest.raises(HeartError, match="at least 11×11"):
        metrics.ssim(video, video)
