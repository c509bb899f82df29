"""How heads answer to their thresholds: tables of the right shape, with and without the control."""

import numpy as np
from models_for_tests import CALL, wan_pipe

from heart_attention import HeartConfig, XAttention
from heart_attention.evaluation.studies import common, response


def test_errors_fall_and_sparsity_falls_as_the_threshold_rises():
    config = HeartConfig(XAttention(stride=4, block=8), dense_steps=1)
    found = response.answers(wan_pipe(layers=2), config, CALL, "a cat", [2])
    assert found["sparsity"].shape == (2, 2, len(response.TAUS))
    assert (np.diff(found["sparsity"], axis=-1) <= 1e-9).all()
    assert found["attention"][..., -1].mean() <= found["attention"][..., 0].mean()


def test_the_study_covers_the_backbones_that_were_measured(tmp_path, monkeypatch):
    config = HeartConfig(XAttention(stride=4, block=8), dense_steps=1)
    monkeypatch.setattr(common, "configs", lambda pipe, names: dict.fromkeys(names, config))
    planned = response.plan(CALL, ["a cat"], 0, True)
    assert [more["backbone"] for _, more in planned] == ["xattention", "svg2"]
    trained, control = (
        [response.measure(pipe, "a cat", p, **more) for p, more in planned]
        for pipe in (wan_pipe(layers=1), wan_pipe(layers=1, seed=5))
    )
    made = response.run(trained, control, tmp_path)
    assert set(made["trained"]) == set(made["control"]) == {"xattention", "svg2"}
    assert "xattention: at the same threshold" in made["finding"] and "Random weights" in made["finding"]
    alone = response.run(trained, None, tmp_path)
    assert alone["control"] is None and "Random weights" not in alone["finding"]
