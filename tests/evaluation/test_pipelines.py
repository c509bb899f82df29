"""Loading: arguments judged early, frame rates, and what is done when memory is short."""

import logging
from types import SimpleNamespace

import pytest
import torch

from heart_attention import HeartError
from heart_attention.evaluation import pipelines


def test_the_embedded_model_is_known_by_name_and_rate(tiny_pipe):
    assert pipelines.name_of(tiny_pipe) == "tiny" and pipelines.frame_rate(tiny_pipe) == 8


@pytest.mark.parametrize("kind, rate", [("WanTransformer3DModel", 16), ("HunyuanVideoTransformer3DModel", 24),
                                        ("SomeTransformer", 16)])  # fmt: skip
def test_videos_have_the_models_frame_rate(kind, rate):
    transformer = type(kind, (torch.nn.Module,), {})()
    pipe = SimpleNamespace(transformer=transformer, config=SimpleNamespace(_name_or_path="owner/name"))
    assert pipelines.frame_rate(pipe) == rate


class Pipe(SimpleNamespace):
    """Records what is done to it."""

    def to(self, device):
        self.done.append(f"to {device}")
        return self

    def enable_model_cpu_offload(self, device):
        self.done.append("offload")


@pytest.mark.parametrize(
    "free, done", [(1 << 40, ["to cuda"]), (10 << 30, ["tiles", "to cuda"]), (1 << 20, ["tiles", "offload"])]
)
def test_short_memory_is_met_and_said(free, done, caplog):
    pipe = Pipe(done=[], components={"t": torch.nn.Linear(8, 8), "s": object()})
    pipe.vae = SimpleNamespace(enable_tiling=lambda: pipe.done.append("tiles"))
    with caplog.at_level(logging.WARNING):
        pipelines.place(pipe, "cuda", free)
    assert pipe.done == done and bool(caplog.records) == (len(done) > 1)


@pytest.mark.parametrize("words, sentence", [
    (("tiny", "float8", None), "--dtype is 'float8'"),
    (("tiny", None, "abacus"), "--device is 'abacus'"),
    (("nonsense", None, "cpu"), "there is no model"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(words, sentence):
    with pytest.raises(HeartError, match=sentence):
        pipelines.check(*words)


def test_prompts_of_a_suite_and_of_a_file(tmp_path, monkeypatch):
    from heart_attention.evaluation.metrics import vbench

    monkeypatch.setattr(vbench, "prompts", lambda dimension: [f"of {dimension}"])
    assert pipelines.read_prompts("vbench:color") == ["of color"] and pipelines.read_prompts("vbench") == ["of None"]
    (tmp_path / "p.txt").write_text("# no\n\na cat\n")
    assert pipelines.read_prompts(str(tmp_path / "p.txt")) == ["a cat"]
