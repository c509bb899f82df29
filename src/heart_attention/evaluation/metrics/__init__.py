"""How near two videos are and how good they look; each metric's name says its convention."""

from ...errors import HeartError
from .similarity import psnr, psnr_pooled, ssim, ssim_box

__all__ = ["CONVENTIONS", "check", "compare", "psnr", "psnr_pooled", "ssim", "ssim_box"]

# Column name -> the convention behind it, printed under every table that has the column.
CONVENTIONS = {
    "psnr": "mean over frames of 10·log10(255²/MSE) on uint8 RGB, identical frames count 100 dB",
    "psnr_pooled": "10·log10(255²/MSE) with the MSE of the whole video",
    "ssim": "Gaussian window 11×11, σ 1.5, per RGB channel, valid region, mean over frames",
    "ssim_box": "uniform window 11×11, otherwise as ssim (the way of Sparse-VideoGen's evaluation)",
    "lpips_alex": "LPIPS 0.1, AlexNet, inputs in [-1, 1], mean over frames",
    "lpips_vgg": "LPIPS 0.1, VGG16, inputs in [-1, 1], mean over frames",
    "lpips_vgg01": "LPIPS 0.1, VGG16, inputs left in [0, 1] (the way of Sparse-VideoGen's evaluation)",
    "vmaf": "libvmaf v0.6.1 of the bundled ffmpeg, mean over frames, yuv420p",
}


def check(names) -> None:
    """Raise if a metric is unknown or lacks its weights: better now than after the first generation."""
    from . import lpips

    unknown = [name for name in names if name not in CONVENTIONS]
    if unknown:
        raise HeartError(f"unknown metric {unknown[0]!r}: choose from {', '.join(CONVENTIONS)}")
    for name in names:
        if name.startswith("lpips"):
            lpips.weights("alex" if name == "lpips_alex" else "vgg")


def compare(video, reference, names=("psnr", "ssim")) -> dict[str, float]:
    """The named metrics of `video` against `reference`, both uint8 [T, H, W, 3]."""
    from . import lpips, similarity, vmaf

    functions = {
        "psnr": similarity.psnr,
        "psnr_pooled": similarity.psnr_pooled,
        "ssim": similarity.ssim,
        "ssim_box": similarity.ssim_box,
        "lpips_alex": lambda a, b: lpips.lpips(a, b, "alex"),
        "lpips_vgg": lambda a, b: lpips.lpips(a, b, "vgg"),
        "lpips_vgg01": lambda a, b: lpips.lpips(a, b, "vgg", unit_range=True),
        "vmaf": vmaf.vmaf,
    }
    check(names)
    return {name: functions[name](video, reference) for name in names}
