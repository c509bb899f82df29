"""Measuring a table of costs at toy sizes."""

import torch

from heart_attention import kernels
from heart_attention.backbones import SVG2
from heart_attention.cli import main
from heart_attention.config import HeartConfig
from heart_attention.online import cost_model
from heart_attention.online.cost_model import PARTS, CostTable
from heart_attention.online.engine import Engine
from heart_attention.tuning import costs


def test_a_measured_table_can_be_kept_and_read(monkeypatch):
    monkeypatch.setattr(costs, "SIZES", {"cpu": (64, 128)})
    table = costs.measure(head_sizes=(16,), kernel="gather", rounds=1)
    assert table.kind == "cpu-portable"
    assert set(table.entries) == {"xattention", "svg2", "svg2-error", "block", "cluster"}
    assert CostTable.from_dict(table.to_dict()) == table
    assert all(getattr(table.entries["svg2"][16], part).rate >= 0 for part in PARTS)


def test_the_command_writes_a_table_that_a_config_takes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(costs, "SIZES", {"cpu": (64, 128)})
    path = str(tmp_path / "costs.json")
    words = [
        "tune-costs",
        "--out",
        path,
        "--head-sizes",
        "16",
        "--rounds",
        "1",
        "--kernel",
        "gather",
        "--device",
        "cpu",
    ]
    assert main.main(words) == 0
    table = cost_model.load(path)
    assert table.digest in capsys.readouterr().out
    assert Engine(HeartConfig(cost_table=path), 1, 2).payoff.costs == table
    assert main.main([*words, "--rounds", "0"]) == 1


def test_svg2_is_measured_with_its_usual_share_of_clusters(monkeypatch):
    seen = set()
    original = SVG2.predict
    monkeypatch.setattr(SVG2, "predict", lambda self, *a, **kw: seen.add(self.q_clusters) or original(self, *a, **kw))
    costs.measure_costs(torch.device("cpu"), torch.float32, 16, SVG2().scaled_to(4096), kernels.get("gather"), rounds=1)
    assert seen == {SVG2().scaled_to(n).q_clusters for n in costs.SIZES["cpu"]}
