"""Pipelines with two transformers: each calibrated at the steps it serves, both enabled together."""

import pytest
from models_for_tests import CALL, wan_pipe, wan_transformer

import heart_attention as heart
from heart_attention import HeartError, XAttention
from heart_attention.calibration import experts
from heart_attention.calibration.workflow import calibrate, plan

BACKBONE = XAttention(stride=4, block=8)


@pytest.fixture(scope="module")
def pair():
    """A Wan2.2-like pipeline: the first transformer until the boundary, the second from there on."""
    pipe = wan_pipe(layers=2)
    pipe.register_modules(transformer_2=wan_transformer(layers=2, seed=1))
    pipe.register_to_config(boundary_ratio=0.8)
    return pipe


def settings(name, **more):
    given = {"method": "isolated", "candidates": (0.5, 0.9), "contexts": 2, "dense_steps": 1}
    return calibrate.Settings(BACKBONE, ("a red ball", "a cat"), CALL, transformer=name, **(given | more))


@pytest.fixture(scope="module")
def files(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    made = {n: calibrate.run(pair, settings(n), folder / n) for n in experts.NAMES}
    return {n: c.save(folder / f"{n}.heart.json") for n, c in made.items()}


def test_each_step_is_served_by_one(pair):
    (first, before), (after, last) = (experts.served(pair, n, CALL["num_inference_steps"]) for n in experts.NAMES)
    assert (first, last, after) == (0, CALL["num_inference_steps"] - 1, before + 1)


@pytest.mark.parametrize("method", ["probes", "isolated"])
@pytest.mark.parametrize("name", experts.NAMES)
def test_draws_stay_within_the_served_steps(pair, name, method):
    wanted = settings(name, method=method, held_out=("a dog",), held_out_contexts=2)
    first, last = experts.served(pair, name, wanted.steps)
    found = plan.draw_contexts(wanted, 2, 2, (first, last))
    steps = {s for _, s in [*found.probes, *found.calibration, *found.held_out]}
    assert steps and all(first <= s <= last for s in steps)


def test_files_say_which_transformer_they_are_of(pair, files):
    for name, path in files.items():
        made = heart.Calibration.load(path)
        assert made.settings["transformer"] == name
        assert tuple(made.settings["served"]) == experts.served(pair, name, CALL["num_inference_steps"])
        served = range(made.settings["served"][0], made.settings["served"][1] + 1)
        assert all(step in served for _, step in made.verification["calibration"]["contexts"])


def test_both_serve_together_in_any_order(pair, files):
    first, second = (heart.Calibration.load(files[n]) for n in experts.NAMES)
    both = experts.load([files["transformer_2"], files["transformer"]])
    assert (both.thresholds == [first.thresholds, second.thresholds]).all()
    with heart.enabled(pair, [files["transformer_2"], files["transformer"]], force_sparse=True):
        pair(prompt="a red ball", output_type="latent", **CALL)
        assert 0 < heart.stats(pair).to_dict()["density"] < 1
    assert heart.HeartConfig(backbone=BACKBONE, thresholds=[second, first]).thresholds == both


def test_what_does_not_fit_is_one_sentence(pair, files, tmp_path):
    first = files["transformer"]
    with pytest.raises(HeartError, match="of transformer alone"):
        heart.enable(pair, first)
    with pytest.raises(HeartError, match="one of transformer and one of transformer_2"):
        heart.enable(pair, [first, first])
    with pytest.raises(HeartError, match="the model has one"):
        heart.enable(pair.transformer, list(files.values()))
    with pytest.raises(HeartError, match="has no transformer_2"):
        calibrate.run(wan_pipe(layers=2), settings("transformer_2"), tmp_path)
    with pytest.raises(HeartError, match="two transformers"):
        calibrate.run(pair, settings(None), tmp_path)
