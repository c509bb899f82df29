"""Settings: one definition, from which plan, file and command line follow; wrong ones are one sentence."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from models_for_tests import CALL

from heart_attention import backbones
from heart_attention.backbones import XAttention
from heart_attention.calibration.points import points_of
from heart_attention.calibration.solve.budget import Budget
from heart_attention.calibration.workflow.settings import METHODS, Settings, default_of, options
from heart_attention.errors import HeartError


def settings(**more) -> Settings:
    return Settings(XAttention(stride=4, block=8), ("a red ball", "a cat"), CALL, **more)


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"method": "magic"}, "method is 'magic': it must be one of joint"),
        ({"velocity": "raw"}, "velocity is 'raw'.*guided, cond"),
        ({"mean": "median"}, "plain, relative"),
        ({"candidates": (0.5, 1.5)}, "lie in 0"),
        ({"shared": 0.0, "budget": "sparsity=0.5"}, "shared threshold"),
        ({"budget": "shared=0"}, "shared threshold"),
        ({"budget": "speed=2"}, "a budget is shared"),
        ({"start": "dense"}, "shared, isolated"),
        ({"contexts": 0}, "contexts is 0"),
        ({"rounds": 1.5}, "rounds is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"order": "spiral"}, "order is 'spiral'"),
    ],
)
def test_wrong_settings_are_one_sentence(wrong, told):
    with pytest.raises(HeartError, match=told) as caught:
        settings(**wrong)
    assert "\n" not in str(caught.value)


def test_gradients_do_not_go_through_first_order_terms():
    points = points_of(backbones.by_name("pisa"), (0.5,), rest="first-order")
    with pytest.raises(HeartError, match="use the method isolated or probes"):
        settings(points=points)
    assert settings(points=points, method="isolated").taus == (0.5,)


def test_there_must_be_prompts():
    with pytest.raises(HeartError, match="no prompts"):
        Settings(XAttention(), (), CALL)


def test_the_papers_and_our_defaults():
    probes, joint = settings(method="probes"), settings(method="joint")
    assert probes.taus == (0.85, 0.9, 0.95) and (probes.strata, probes.mean, probes.realised) == (
        "paper",
        "plain",
        False,
    )
    assert joint.taus == (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
    assert (joint.strata, joint.mean, joint.realised) == ("sparse", "relative", True)
    assert dataclasses.replace(joint, candidates=(0.5,)).taus == (0.5, 0.9)
    assert joint.budget == Budget("shared", 0.9) and settings(budget="shared=0.7").shared == 0.7


def test_every_field_is_in_the_plan_as_json():
    planned = settings().planned()
    assert set(planned) == {f.name for f in dataclasses.fields(Settings)}
    assert json.loads(json.dumps(planned))["budget"] == "shared=0.9"
    for changed in (settings(seed=1), settings(kernel="eager"), settings(gamma=1.0), settings(budget="sparsity=0.5")):
        assert changed.planned() != planned


def test_what_the_file_records():
    assert set(settings().saved()) >= {"shared", "strata", "velocity", "mean", "dense_steps", "order", "scale_clusters"}
    assert "prompts" not in settings().saved() and "kernel" not in settings().saved()


def test_options_have_defaults_that_pass():
    for name, option in options().items():
        default = default_of(name)
        assert option.help and (default is None or option.choices is None or default in option.choices)
    assert options()["method"].choices == METHODS
    assert options()["candidates"].parse("0.5, 0.9") == (0.5, 0.9)
    with pytest.raises(HeartError, match="separated by commas"):
        options()["candidates"].parse("a")


def test_the_command_line_reads_options_without_torch():
    code = "import sys; import heart_attention.calibration.workflow.settings; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


@pytest.mark.parametrize(
    "name, rest, shared", [("xattention", "drop", 0.9), ("ear", "mean", 0.9), ("pisa", "mean", 0.15)]
)
def test_a_backbone_brings_its_rest_and_its_threshold(name, rest, shared):
    made = Settings(backbones.by_name(name), ("a",), CALL)
    assert (made.rest, made.shared) == (rest, shared)
    assert {point.rest for point in made.candidate_points} == {rest}
