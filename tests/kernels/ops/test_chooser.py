"""Who computes an operation: the first way that serves, and reasons for all others."""

import pytest
import torch

from heart_attention.kernels import ops
from heart_attention.kernels.ops import kmeans, means, scores
from heart_attention.kernels.ops.chooser import OPS, Op, Way

torch.set_num_threads(1)


def test_every_operation_is_listed_with_its_ways():
    found = ops.available()
    assert {"block scores", "token means", "k-means", "attention backward"} <= set(found)
    for ways in found.values():
        assert list(ways)[-1] == "torch" and ways["torch"] == []
        if not torch.cuda.is_available() and "triton" in ways:
            assert ways["triton"]


def test_without_a_compiler_pytorch_serves_and_says_why(monkeypatch):
    monkeypatch.setenv("HEART_NO_COMPILER", "1")
    for name, ways in ops.available().items():
        assert all("HEART_NO_COMPILER" in reason for reason in ways.get("c", [])), name
    x = torch.ones(2, 3)
    assert kmeans.lloyd_heads.choose([x], [x], 1).name == "torch"
    assert means.token_means.choose(x[None, None].bfloat16()).name == "torch"
    assert scores.block_scores.choose([x], [x], None, 1, 1).name == "torch"


def test_the_first_that_serves_is_taken(monkeypatch):
    monkeypatch.setattr("heart_attention.kernels.ops.chooser.OPS", {})
    refuse = lambda x=None: [] if x is None or x > 0 else ["it takes positive numbers"]  # noqa: E731
    op = Op("double", Way("c", lambda x: ("c", 2 * x), refuse), Way("torch", lambda x: ("torch", x + x)))
    assert op(3) == ("c", 6) and op(-3) == ("torch", -6)
    assert op.available() == {"c": [], "torch": []}
    assert "double" not in OPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", ["tokens", "heads"])
def test_token_means_of_all_types(dtype, layout):
    x = torch.randn(2, 300, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x.transpose(1, 2) if layout == "tokens" else x.transpose(1, 2).contiguous()
    found = means.token_means(x)
    assert found.dtype == torch.float32 and (found - x.double().mean(2)).abs().max() < 1e-6
    assert (means.torch_token_means(x) - found).abs().max() < 1e-6
