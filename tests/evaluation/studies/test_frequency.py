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


def test_a_perturbed_pipeline_is_given_back_and_its_harm_is_measured(tiny_pipe, small_call):
    call = {**small_call, "num_inference_steps": 3}
    before = list(tiny_pipe.transformer._forward_hooks)
    text = "a red circle moves right on a blue background"
    weak, strong = (frequency.measure(tiny_pipe, text, 0, call, size, ["psnr"], 0) for size in (0.03, 0.3))
    assert list(tiny_pipe.transformer._forward_hooks) == before and set(weak) == set(BANDS)
    for band in BANDS:  # ten times the noise takes off up to 20 dB; a nonlinear model leaves some of that
        assert 8 < weak[band]["psnr"] - strong[band]["psnr"] < 26, band


def test_prompts_are_averaged_and_the_paragraph_says_whose_order_it_is(tmp_path):
    def of(*psnr):
        return {band: {"psnr": value} for band, value in zip(BANDS, psnr)}

    made = frequency.run([of(28, 29, 30, 31), of(30, 31, 32, 33)], [of(40, 40, 40, 40)], tmp_path)
    assert made["trained"]["LL"]["psnr"] == 29 and made["control"]["HH"]["psnr"] == 40
    assert "LL < LH < HL < HH, the paper's order" in made["finding"] and "Paper: LL 28.19" in made["finding"]
    other = frequency.run([of(31, 30, 29, 28)], None, tmp_path)
    assert "HH < HL < LH < LL, not the paper's order" in other["finding"] and "Random" not in other["finding"]
