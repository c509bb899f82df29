"""Thresholds out to and in from other tools."""

from __future__ import annotations

import argparse
import csv
import io
import json

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel, WanTransformer3DModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from heart_attention import XAttention
from heart_attention.calibration import export, file
from heart_attention.calibration.file import Calibration
from heart_attention.calibration.solve import solver
from heart_attention.cli import calibrate
from heart_attention.errors import HeartError

TAU = (0.85, 0.9, 0.95)
BACKBONE = XAttention(block=64).to_dict()
WAN = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
WAN |= {"text_dim": 8, "ffn_dim": 16, "freq_dim": 8}


@pytest.fixture(scope="module")
def wan():
    torch.manual_seed(0)
    return WanTransformer3DModel(**WAN)


@pytest.fixture(scope="module")
def made(wan) -> Calibration:
    rng = np.random.default_rng(1)
    E, S = rng.lognormal(-15, 2, (3, 2, 3)), np.sort(rng.random((3, 2, 3)))[..., ::-1]
    found = solver.solve(E, S, thresholds=TAU)
    return Calibration(found.thresholds, BACKBONE, "probes", file.fingerprint(wan), TAU, E, S, solver=found.to_dict())


# ---------------------------------------- ModelOpt's block


def test_the_block_has_modelopts_form(made, wan):
    block = export.modelopt_block(made)
    assert set(block) == {"config_groups", "producer"} and block["producer"]["name"] == "heart-attention"
    modules = dict(wan.named_modules())
    for i, (name, group) in enumerate(block["config_groups"].items()):
        assert name == f"group_{i}" and group["sparse_algo"] == "xattention"
        assert all(target in modules for target in group["targets"])
        assert group["threshold"] == made.thresholds[i].tolist()
        assert group["block"] == 64
    json.dumps(block, allow_nan=False)


def test_readers_of_softmax_skipping_pass_over_it(made):
    """What ModelOpt's and TensorRT-LLM's readers look for must not be there, or they would take it for theirs."""
    block = export.modelopt_block(made)
    assert "threshold_scale_factor" not in block and "target_sparsity" not in block
    for group in block["config_groups"].values():
        assert group["sparse_algo"] not in ("softmax_skip", "skip_softmax")
        assert not set(group) & {"threshold_scale_factor", "target_sparsity", "ignore", "disabled_until_timestep"}


def test_into_a_real_config_json_and_back(made, wan, tmp_path):
    wan.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    before = json.loads(path.read_text())
    export.write_modelopt(made, path)
    after = json.loads(path.read_text())
    assert {k: v for k, v in after.items() if k != export.KEY} == before
    back = export.read_table(path, {"name": "svg2"})
    assert np.array_equal(back.thresholds, made.thresholds) and back.backbone == BACKBONE
    again = WanTransformer3DModel.from_pretrained(tmp_path)  # diffusers still reads it, and it is still the model
    assert file.fingerprint(again) == file.fingerprint(wan)
    back.check(again)


def test_models_with_two_kinds_of_block_need_the_config():
    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1, num_single_layers=2,
        num_refiner_layers=1, text_embed_dim=8, pooled_projection_dim=8, rope_axes_dim=(2, 2, 4),
    )  # fmt: skip
    two = Calibration(np.full((3, 2), 0.9), BACKBONE, model=file.fingerprint(model))
    names = export.layer_names(two, dict(model.config))
    assert names == ["transformer_blocks.0.attn", *(f"single_transformer_blocks.{i}.attn" for i in range(2))]
    assert all(n in dict(model.named_modules()) for n in names)
    with pytest.raises(HeartError, match="two kinds of block"):
        export.modelopt_block(two)
    with pytest.raises(HeartError, match="more than the calibration's"):
        export.layer_names(two, {"num_layers": 9})


def test_block_refusals(made, tmp_path):
    with pytest.raises(HeartError, match="no known names"):
        export.modelopt_block(Calibration([[0.9]], BACKBONE))
    with pytest.raises(HeartError, match="2 layer names for 3"):
        export.modelopt_block(made, ["a", "b"])
    path = tmp_path / "config.json"
    path.write_text('{"_class_name": "CogVideoXTransformer3DModel"}')
    with pytest.raises(HeartError, match="CogVideoX"):
        export.write_modelopt(made, path)
    theirs = {"config_groups": {"group_0": {"sparse_algo": "softmax_skip", "targets": ["Attention"]}}}
    with pytest.raises(HeartError, match="softmax_skip"):
        export.from_modelopt(theirs)
    for bad in (None, {}, {"config_groups": {}}, {"config_groups": {"group_0": 3}}):
        with pytest.raises(HeartError, match="config_groups"):
            export.from_modelopt(bad)
    with pytest.raises(HeartError, match="lacks 'group_0'"):
        export.from_modelopt({"config_groups": {"group_1": {"sparse_algo": "svg2", "threshold": [0.9]}}})


# ---------------------------------------- tables


def table(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_text(text)
    return export.read_table(path, BACKBONE)


def test_csv_round_trip(made, tmp_path):
    back = table(tmp_path, export.to_csv(made))
    for name in ("thresholds", "candidates", "E", "S"):
        assert np.array_equal(getattr(back, name), getattr(made, name))
    bare = Calibration(made.thresholds, BACKBONE)
    assert np.array_equal(table(tmp_path, export.to_csv(bare)).thresholds, made.thresholds)


def test_points_of_several_kinds_go_to_csv_only():
    points = [
        {"backbone": BACKBONE, "threshold": 0.9, "rest": "drop", "order": [["raster", "4x4x4"]]},
        {"backbone": {"name": "svg2"}, "threshold": 0.3, "rest": "mean", "order": "raster"},
    ]
    mixed = Calibration(
        points=points, choice=[[[0, 1]], [[1, 1]]], E=np.ones((2, 1, 2, 2)), S=np.full((2, 1, 2, 2), 0.5),
        phases={"sigmas": [0.5], "weights": [1, 2], "steps": [3, 4]},
    )  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(export.to_csv(mixed))))
    assert len(rows) == 8 and rows[2] == {
        "phase": "0", "backbone": "xattention", "order": "4x4x4", "rest": "drop", "layer": "0", "head": "1",
        "threshold": "0.9", "error": "1.0", "sparsity": "0.5", "chosen": "0",
    }  # fmt: skip
    for refused in (export.thresholds_json, lambda c: export.modelopt_block(c, ["a"])):
        with pytest.raises(HeartError, match="several kinds or phases"):
            refused(mixed)


def test_a_measured_table_is_solved(made, tmp_path):
    rows = [row[:5] for row in csv.reader(io.StringIO(export.to_csv(made)))]  # without the column chosen
    back = table(tmp_path, "\n".join(",".join(row) for row in rows))
    assert np.array_equal(back.thresholds, made.thresholds) and back.solver["proven"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "0.9,0.8\n0.7,1\n"),
        ("t.csv", "9e-1 , 0.8\n\n0.7,1\n"),
        ("t.csv", "Layer,head,Threshold\n1,1,1\n1,0,0.7\n0,1,0.8\n0,0,0.9\n"),
        ("t.json", "[[0.9, 0.8], [0.7, 1]]"),
        ("t.json", '{"thresholds": [[0.9, 0.8], [0.7, 1.0]]}'),
        (
            "t.json",
            json.dumps([{"layer": i // 2, "head": i % 2, "threshold": t} for i, t in enumerate((0.9, 0.8, 0.7, 1))]),
        ),
    ],
)
def test_the_forms_of_a_table(tmp_path, name, text):
    assert table(tmp_path, text, name).thresholds.tolist() == [[0.9, 0.8], [0.7, 1.0]]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "", "empty"),
        ("t.csv", "0.9,x\n0.8,0.7\n", "lacks the column layer"),
        ("t.csv", "0.9,0.8\n0.8,x\n", "row 2 has 'x'"),
        ("t.csv", "0.9,0.8\n0.8\n", "rectangular"),
        ("t.csv", "0.9,1.8\n", "must lie above 0 and up to 1"),
        ("t.csv", "nan,0.8\n", "lacks the column"),
        ("t.csv", "layer,head\n0,0\n", "lacks the column threshold"),
        ("t.csv", "layer,head,threshold\n0,0\n", "does not have 3 cells"),
        ("t.csv", "layer,head,threshold\n0,0,0.9\n1,1,0.9\n", "not all of 2 layers × 2 heads"),
        ("t.csv", "layer,head,threshold\n0,0,0.9\n0,0,0.9\n", "a second time"),
        ("t.csv", "layer,head,threshold\n0,0,0.9\n0,0,0.8\n", "need the columns error and sparsity"),
        ("t.csv", "layer,head,threshold\n0.5,0,0.9\n", "not a whole number"),
        ("t.csv", "layer,head,threshold\n0,0,inf\n", "not finite"),
        ("t.csv", "layer,head,threshold,error,sparsity\n0,0,0.9,1,0.5\n0,1,0.8,1,0.5\n", "same candidate"),
        ("t.csv", "layer,head,threshold,error,sparsity,chosen\n0,0,0.9,1,0.5,0\n", "exactly one row"),
        ("t.json", "[[0.9], [0.8, 0.7]]", "rectangular"),
        ("t.json", "{", "not valid JSON"),
        ("t.json", "3", "has shape"),
        ("t.json", f'[{{"layer": 0, "head": 0, "threshold": {10**400}}}]', "not a number"),
        ("t.json", '{"config_groups": {"group_0": {"sparse_algo": ["svg2"]}}}', "no backbone's name"),
        (
            "t.json",
            json.dumps({"config_groups": {str(i): {"sparse_algo": f"{i}\x1b" * 9999} for i in range(2)}}),
            "one backbone",
        ),
        ("t.json", '{"a": 1}', "rectangular"),
    ],
)
def test_bad_tables_are_refused_with_the_files_name(tmp_path, name, text, words):
    with pytest.raises(HeartError, match=words) as caught:
        table(tmp_path, text, name)
    assert name in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) <= 300


def test_lines_may_end_as_on_any_system(tmp_path):
    for end in ("\n", "\r\n", "\r"):
        (tmp_path / "t.csv").write_bytes(f"0.9,0.8{end}0.7,1{end}".encode())
        assert export.read_table(tmp_path / "t.csv", BACKBONE).thresholds.tolist() == [[0.9, 0.8], [0.7, 1.0]]


def test_files_that_are_no_tables(tmp_path):
    with pytest.raises(HeartError, match="there is no file"):
        export.read_table(tmp_path / "none.csv", BACKBONE)
    with pytest.raises(HeartError, match="File name too long"):
        export.read_table(tmp_path / ("x" * 5000 + ".csv"), BACKBONE)
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(HeartError, match="not a text file"):
        export.read_table(tmp_path / "b.csv", BACKBONE)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(alphabet='0123456789.,-e\n"; layerhdtso\x00', max_size=60))
def test_random_text_is_refused_or_a_table(tmp_path, text):
    try:
        made = table(tmp_path, text)
    except HeartError:
        return
    assert ((made.thresholds > 0) & (made.thresholds <= 1)).all()


# ---------------------------------------- heart show --export, --import


def heart(*argv) -> int:
    parser = argparse.ArgumentParser()
    calibrate.register(parser.add_subparsers(required=True))
    args = parser.parse_args([str(a) for a in argv])
    return args.func(args)


def test_on_the_command_line(made, wan, tmp_path, capsys):
    path = made.save(tmp_path / "a.heart.json")
    heart("show", path, "--export", "csv", "--out", tmp_path / "t.csv")
    heart("show", "--import", tmp_path / "t.csv", "--out", tmp_path / "b.heart.json", "--backbone", "xattention")
    assert np.array_equal(Calibration.load(tmp_path / "b.heart.json").thresholds, made.thresholds)
    capsys.readouterr()
    heart("show", path, "--export", "modelopt")
    assert export.KEY in json.loads(capsys.readouterr().out)
    heart("show", path, "--export", "json")
    assert json.loads(capsys.readouterr().out)["thresholds"] == made.thresholds.tolist()
    wan.save_pretrained(tmp_path)
    heart("show", path, "--export", "modelopt", "--config", tmp_path / "config.json")
    assert export.KEY in json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(HeartError, match="goes with --export modelopt"):
        heart("show", path, "--config", tmp_path / "config.json")
