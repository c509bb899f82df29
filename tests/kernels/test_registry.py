"""Choosing kernels, reasons, refusing what does not fit."""

import pytest
import torch

from heart_attention import kernels
from heart_attention.errors import HeartError
from heart_attention.kernels import eager, registry
from heart_attention.masks import BlockMask


@pytest.fixture
def mask():
    return BlockMask.full(1, 2, 100, 32)


def test_every_kernel_is_listed_with_its_reasons():
    found = kernels.available()
    ours = ["cudnn", "flashinfer_blocks", "flashinfer", "triton", "flex", "cudnn_fp8", "flashinfer_rest"]
    ours += ["cpu", "gather", "eager"]
    assert list(found) == kernels.names() == ours
    assert found["gather"] == [] and found["eager"] == []
    if not torch.cuda.is_available():
        assert found["flashinfer"] and found["triton"]


def test_auto_takes_the_first_that_serves(mask):
    q = torch.zeros(1, 2, 100, 16)
    able = [kernels.get(name) for name in kernels.names() if not kernels.get(name).reasons_not(mask, q)]
    first = next(kernel.name for kernel in able if not kernel.reasons_not_auto(mask, q))
    assert kernels.choose(mask, q).name == first
    assert kernels.plan("auto", mask).kernel in kernels.names()


def test_auto_falls_back_without_a_compiler(mask, monkeypatch):
    monkeypatch.setenv("HEART_NO_COMPILER", "1")
    assert kernels.choose(mask, torch.zeros(1, 2, 100, 16)).name == "gather"


def test_unknown_name(mask):
    with pytest.raises(
        HeartError, match="no kernel 'fast': choose one of auto, cudnn, flashinfer_blocks, flashinfer, triton, flex"
    ):
        kernels.plan("fast", mask)


def test_a_name_of_any_length_is_one_short_sentence():
    with pytest.raises(HeartError, match="no kernel 'xxx") as caught:  # of a config's file
        kernels.get("x" * 100_000)
    assert len(str(caught.value)) <= 300


def test_named_kernel_that_cannot_serve_lists_all_reasons(mask, monkeypatch):
    monkeypatch.setenv("HEART_NO_COMPILER", "1")
    with pytest.raises(HeartError, match=r"kernel cpu \(HEART_NO_COMPILER is set.*; .*not float16\) cannot serve"):
        kernels.choose(mask, torch.zeros(1, 2, 100, 16, dtype=torch.float16), "cpu")


def test_module_that_cannot_be_imported_is_a_reason(mask, monkeypatch):
    monkeypatch.setitem(registry.MODULES, "triton", "no_such_module")
    assert "cannot be imported" in kernels.available()["triton"][0]
    with pytest.raises(HeartError, match="cannot be imported"):
        kernels.plan("triton", mask)


def test_none_serves_lists_everyone(mask, monkeypatch):
    for name in kernels.names():
        monkeypatch.setitem(registry.MODULES, name, f"missing_{name}")
    with pytest.raises(HeartError) as raised:
        kernels.choose(mask)
    assert all(name in str(raised.value) for name in kernels.names())


def test_shapes_types_and_places_that_do_not_match(mask):
    plan = kernels.plan("gather", mask)
    q = torch.zeros(1, 2, 100, 16)
    with pytest.raises(HeartError, match=r"k has shape \(1, 2, 99, 16\)"):
        kernels.run(plan, q, q[:, :, 1:], q)
    with pytest.raises(HeartError, match=r"q has shape \(1, 3, 100, 16\)"):
        kernels.run(plan, *[torch.zeros(1, 3, 100, 16)] * 3)
    with pytest.raises(HeartError, match=r"v is torch.bfloat16"):
        kernels.run(plan, q, q, q.bfloat16())
    with pytest.raises(HeartError, match="out has shape"):
        kernels.run(plan, q, q, q, out=q[:, :, 1:])


def test_cpu_has_no_backward_and_says_so(mask):
    q = torch.zeros(1, 2, 100, 16, requires_grad=True)
    assert any("backward" in reason for reason in kernels.get("cpu").reasons_not(mask, q))
    with torch.no_grad():
        assert not any("backward" in reason for reason in kernels.get("cpu").reasons_not(mask, q))


@pytest.mark.parametrize("name", ["gather", "eager"])
def test_gradients_of_the_portable_kernels(name):
    generator = torch.Generator().manual_seed(0)
    mask = BlockMask(torch.rand(1, 2, 4, 4, generator=generator) < 2, 16, 60, 60, torch.randperm(60))
    q, k, v = (torch.randn(1, 2, 60, 8, generator=generator, requires_grad=True) for _ in range(3))
    weight = torch.randn(1, 2, 60, 8, generator=generator)
    found = torch.autograd.grad((kernels.run(kernels.plan(name, mask), q, k, v) * weight).sum(), (q, k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.dense_tokens())
    for a, b in zip(found, torch.autograd.grad((dense * weight).sum(), (q, k, v))):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_eager_refuses_long_sequences():
    n = eager.LIMIT + 1
    q = torch.zeros(1, 1, n, 1)
    long = BlockMask.full(1, 1, n, 128)
    with pytest.raises(HeartError, match="at most 8192 tokens, not 8193"):
        kernels.run(kernels.plan("eager", long), q, q, q)
    with pytest.raises(HeartError, match="at most 8192"):
        kernels.choose(long, q, "eager")


class Plain:
    """A kernel as people wrote them before there was a rest: no base class, no `rest`."""

    name = "plain"

    def reasons_not(self, mask=None, q=None):
        return []

    def plan(self, mask):
        return kernels.make_plan(mask, self.name)

    def run(self, plan, q, k, v, out=None, scale=None):
        return torch.zeros_like(q)


class WithRest(Plain):
    """The same with `rest`, still without the base class."""

    name = "with rest"

    def reasons_not(self, mask=None, q=None, rest="drop"):
        return [f"not today ({rest})"] if rest == "mean" else []

    def plan(self, mask, rest="drop"):
        return kernels.make_plan(mask, self.name, rest=rest)


def test_kernels_of_users(mask, monkeypatch):
    import heart_attention as heart

    monkeypatch.setattr(registry, "REGISTERED", {})
    heart.register_kernel(Plain())
    kernels.register(WithRest())
    assert kernels.names()[:2] == ["plain", "with rest"]
    q = torch.ones(1, 2, 100, 16)
    mass = torch.ones(1, 2)
    assert not kernels.run(kernels.plan("auto", mask), q, q, q, mass=mass).any() and not mass.any()
    assert kernels.get("plain").reasons_not(mask, q, "mean") == [
        "it has no parameter `rest`, so it only drops what a mask leaves out"
    ]
    assert kernels.get("with rest").reasons_not(mask, q, "mean") == ["not today (mean)"]
    assert kernels.choose(mask, q, rest="mean").name not in ("plain", "with rest")
    with pytest.raises(HeartError, match="does not give log-sums"):
        kernels.get("plain").run_part(mask, q, q, q)
    with pytest.raises(HeartError, match="known already"):
        kernels.register(Plain())
