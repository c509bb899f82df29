"""The embedded pipeline makes as many frames as asked, says nothing untrue, and saves as diffusers' own."""

import json
import logging
import warnings

import pytest
import torch

from heart_attention import tiny

CALL = {"height": 32, "width": 32, "num_inference_steps": 1, "guidance_scale": 1.0, "max_sequence_length": 64}


@pytest.fixture(scope="module")
def pipe():
    return tiny.load()


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_as_many_frames_as_asked_and_no_warning(pipe, frames, caplog):
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        made = pipe("a red circle", num_frames=frames, **CALL).frames[0]
    finally:
        logger.removeHandler(caplog.handler)
    assert made.shape == (frames, 32, 32, 3)
    assert "divisible" not in caplog.text


def test_frames_may_be_given_by_place(pipe):
    assert pipe("a red circle", None, 32, 32, 3, 1, 1.0, max_sequence_length=64).frames[0].shape[0] == 3


def test_it_saves_as_the_pipeline_that_diffusers_knows(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == "WanPipeline"


def test_loading_in_bfloat16_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert tiny.load(torch.bfloat16).transformer.dtype == torch.bfloat16
