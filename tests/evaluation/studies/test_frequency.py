"""Perturbations that lie in one band only, of the right size, the same for both guidance branches."""

import pytest
import torch

from heart_attention.calibration.measure.velocity_error import BANDS, band_energies
from heart_attention.evaluation.studies import frequency


@pytest.mark.parametrize("band", range(4))
def test_noise_lies_in_its_band_and_has_its_size(band):
    like = torch.randn(1, 3, 9, 8, 12, generator=torch.Generator().manual_seed(1))
    noise = frequency.band_noise(like, band, 0.1, torch.Generator().manual_seed(2))
    shares = torch.tensor(band_energies(noise))
    assert shares[band] / shares.sum() == pytest.approx(1.0, abs=1e-6)
    assert noise.norm() / like.norm() == pytest.approx(0.1, rel=1e-4)


def test_perturbed_pipeline(tiny_pipe, small_call, tmp_path):
    call = {**small_call, "num_inference_steps": 3}
    prompts = ["a red circle moves right on a blue background"]
    before = list(tiny_pipe.transformer._forward_hooks)
    found = frequency.measure(tiny_pipe, call, prompts, 0.3, names=("psnr",))
    assert list(tiny_pipe.transformer._forward_hooks) == before
    assert set(found) == set(BANDS) and all(5 < found[b]["psnr"] < 60 for b in BANDS)
    assert "Paper: LL 28.19" in frequency._paragraph(found, found, 0.3)
