"""The few-step student that the package carries."""

from pathlib import Path

import pytest
import torch

from heart_attention import tiny
from heart_attention.calibration import fingerprint
from heart_attention.errors import HeartError
from heart_attention.evaluation import pipelines


def test_it_is_small_and_not_the_model():
    files = [path for path in Path(tiny.path("student")).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6e6
    student, model = tiny.load("student").transformer, tiny.load().transformer
    assert student.config.num_layers == model.config.num_layers and student.dtype == torch.float32
    assert fingerprint.values_digest(student) != fingerprint.values_digest(model)


def test_no_packaged_file_says_where_it_was_made():
    told = [path for path in Path(tiny.path()).parent.rglob("*.json") if '"_name_or_path": "/' in path.read_text()]
    assert not told


def test_four_steps_without_guidance_give_what_was_asked():
    pipe = pipelines.load("tiny-student", device="cpu")
    call = pipelines.call_arguments("tiny-student", pipe, quick=True)
    assert (call["num_inference_steps"], call["guidance_scale"]) == (4, 1.0) and pipelines.name_of(
        pipe
    ) == "tiny-student"
    prompt = tiny.prompts("heldout")[0]
    frames = pipe(prompt, generator=torch.Generator().manual_seed(0), output_type="np", **call).frames[0]
    found = tiny.check(frames, prompt)
    assert len(frames) == call["num_frames"] and found["background"] and found["colour"] and found["motion"]


def test_a_dtype_alone_still_means_the_model():
    pipe = tiny.load(torch.bfloat16)
    assert pipe.transformer.dtype == torch.bfloat16 and pipelines.name_of(pipe) == "tiny"


def test_another_name_is_one_sentence():
    with pytest.raises(HeartError, match="no embedded model 'teacher'"):
        tiny.load("teacher")
