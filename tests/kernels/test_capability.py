"""Which kernel would serve on which GPU generation."""

import json

import pytest

from heart_attention.cli.main import main
from heart_attention.errors import HeartError
from heart_attention.kernels import capability


@pytest.mark.parametrize("gpu", capability.GPUS)
def test_every_call_is_served_and_clusters_with_the_rest_too(gpu):
    rows = capability.table(gpu)
    assert all(row["kernel"] not in (None, "gather", "eager") for row in rows)
    assert any(row["groups"] == "clusters" and row["rest"] == "mean" for row in rows)


@pytest.mark.parametrize("gpu", capability.GPUS)
def test_clusters_with_the_rest_in_equal_groups_have_a_kernel_maintained_by_others(gpu):
    rows = [
        r for r in capability.table(gpu) if r["groups"].startswith("clusters in equal groups") and r["rest"] == "mean"
    ]
    assert {r["groups"] for r in rows} == {f"clusters in equal groups of {size}" for size in (64, 128)}
    assert all({"cudnn", "flashinfer_blocks", "flex"} & {row["kernel"], *row["others"]} for row in rows)


@pytest.mark.parametrize("gpu", capability.GPUS)
def test_a_kernel_maintained_by_others_serves_blocks_of_128(gpu):
    rows = [r for r in capability.table(gpu) if (r["groups"], r["head_size"]) == ("blocks of 128", 128)]
    for row in rows:
        assert {"cudnn", "flashinfer", "flex"} & {row["kernel"], *row["others"]}
    assert {row["kernel"] for row in rows if row["dtype"] == "bfloat16"} == {
        "cudnn" if gpu in ("sm_90", "sm_100", "sm_120") else "triton"
    }


def test_old_and_unknown_gpus():
    assert capability.answers(capability.Call("sm_75", (128, 128), 128))["triton"]
    with pytest.raises(HeartError, match="'h100' names no GPU generation"):
        capability.table("h100")


def test_kernels_by_name_are_never_taken_by_themselves():
    for name in ("cudnn_fp8", "flashinfer_rest"):
        assert all(name not in (r["kernel"], *r["others"]) for r in capability.table("sm_100"))


def test_the_command(capsys):
    assert main(["info", "--gpu", "sm_90"]) == 0
    text = capsys.readouterr().out
    assert "blocks of 128, head size 128, bfloat16, rest drop" in text and "not cudnn: it takes equal blocks" in text
    assert main(["info", "--gpu", "sm_90", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == capability.table("sm_90")
    assert main(["info", "--gpu", "x"]) != 0
