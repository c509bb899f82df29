"""Parity with the original XAttention and SVG2: the shipped cases always, the full set when HEART_GOLDEN names it.

Every case runs through the PyTorch definition and through the C code (where there is a compiler).
"""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from heart_attention.backbones import SVG2, XAttention
from heart_attention.kernels import eager
from heart_attention.kernels.ops import native as native
from heart_attention.masks import ClusterMask, Text

torch.set_num_threads(1)
SHIPPED = Path(__file__).parent.parent / "golden_data"
FULL = os.environ.get("HEART_GOLDEN")


def cases(*keys):
    """(folder, name) of every case that holds one of the keys; the full set is one skipped test if it is not there."""
    found = [pytest.param(SHIPPED, name, id=name) for name in _names(SHIPPED, keys)]
    if not FULL:
        return found + [pytest.param(None, "", marks=pytest.mark.skip(reason="HEART_GOLDEN is not set"), id="full set")]
    return found + [pytest.param(Path(FULL), name, id=name) for name in _names(Path(FULL), keys)]


def _names(folder, keys):
    return [name for name in manifest(folder) if set(keys) & set(np.load(folder / f"{name}.npz").files)]


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


class Case:
    """One golden file: `real(key)` is an int8 input as fp32 [1, H, ...], `[key]` anything else as it is."""

    def __init__(self, folder, name):
        self.about, self.file = manifest(folder)[name], np.load(folder / f"{name}.npz", allow_pickle=False)

    def __getitem__(self, key):
        return torch.from_numpy(self.file[key])

    def real(self, key):
        return self[key].float()[None] * 2.0 ** -int(self.file["scale_exp"])

    def matching(self, pattern):
        """(key, groups) of every key that matches whole."""
        found = [(key, re.fullmatch(pattern, key)) for key in self.file.files]
        return [(key, match.groups()) for key, match in found if match]


@pytest.fixture(params=["torch", "native"])
def path(request, monkeypatch):
    """Which implementation runs."""
    if request.param == "torch":
        monkeypatch.setattr(native, "reasons_not", lambda *tensors: ["switched off"])
    elif not native.serves(torch.zeros(1, 1)):
        pytest.skip("no compiler")
    return request.param


def number(text):
    return float(text.replace("p", "."))


@pytest.mark.parametrize("folder, name", cases("tau_per_head"))
def test_scores(folder, name, path):
    case = Case(folder, name)
    q, k = case.real("q_i8"), case.real("k_i8")
    found = case.matching(r"scores_b(\d+)_s(\d+)_c(\d+)")
    assert found
    for key, groups in found:
        block, stride, chunk = map(int, groups)
        for pad in [chunk] + ["chunk"] * (chunk == case.about["default_chunk"]):
            scores = XAttention(stride, block, pad).scores(q, k)[0]
            assert scores.shape == case[key].shape
            assert (scores - case[key]).abs().max() <= 2e-6 * block / stride, (key, pad)


@pytest.mark.parametrize("folder, name", cases("tau_per_head"))
def test_masks(folder, name, path):
    """Exact: every fp32 row of the golden set is further from a flip than fp32 rounding."""
    case = Case(folder, name)
    q, k = case.real("q_i8"), case.real("k_i8")
    found = case.matching(r"mask_b(\d+)_s(\d+)_c(\d+)_t(0p\d+|ph)")
    assert found
    for key, (block, stride, chunk, tau) in found:
        block, stride, chunk = int(block), int(stride), int(chunk)
        thresholds = case["tau_per_head"] if tau == "ph" else number(tau)
        blocks = -(-q.shape[2] // block)
        for pad in [chunk] + ["chunk"] * (chunk == case.about["default_chunk"]):
            mask = XAttention(stride, block, pad).predict(q, k, thresholds)
            assert torch.equal(mask.blocks[0], case[key][:, :blocks, :blocks]), (key, pad)


@pytest.mark.parametrize("folder, name", cases("tau_per_head"))
def test_masked_padding_where_nothing_is_padded(folder, name, path):
    """Without padding, all three ways of padding are one."""
    case = Case(folder, name)
    n = case.about["N"] // 128 * 128
    q, k = (case.real(key)[:, :, :n] for key in ("q_i8", "k_i8"))
    masked, zeros = XAttention(pad="block").scores(q, k), XAttention(pad=128).scores(q, k)
    assert torch.equal(masked, zeros)


def start(case, x, side):
    return torch.stack([x[0, h, case[f"init_{side}_idx"][h].long()] for h in range(x.shape[1])])[None]


@pytest.mark.parametrize("folder, name", cases("q_labels_it2"))
def test_labels(folder, name, path):
    case = Case(folder, name)
    for side in "qk":
        x = case.real(f"{side}_i8")
        for iters in (2, 5):
            labels, centroids, sizes = SVG2().cluster(x, start(case, x, side), iters)
            assert torch.equal(labels[0], case[f"{side}_labels_it{iters}"])
            assert torch.equal(sizes[0], case[f"{side}_sizes_it{iters}"].long())
            assert (centroids[0] - case[f"{side}_centroids_it{iters}"]).abs().max() <= 1e-5
        later, centroids, _ = SVG2().cluster(case.real(f"{side}2_i8"), centroids, 2)  # warm start, next step
        assert torch.equal(later[0], case[f"{side}_labels_step2"])
        assert (centroids[0] - case[f"{side}_centroids_step2"]).abs().max() <= 1e-5


def given_clusters(case):
    """Centroids and sizes that the maps of a case are made from."""
    if "qcent_i8" in case.file.files:
        return case.real("qcent_i8"), case.real("kcent_i8"), case["q_sizes"][None], case["k_sizes"][None]
    return tuple(case[f"{key}_it5"][None] for key in ("q_centroids", "k_centroids", "q_sizes", "k_sizes"))


@pytest.mark.parametrize("folder, name", cases("map_p0p90_r0p10"))
def test_maps(folder, name):
    case = Case(folder, name)
    found = case.matching(r"map_p(0p\d+)_r(0p\d+)")
    assert found
    q_centroids, k_centroids, q_sizes, k_sizes = given_clusters(case)
    for key, (tau, ratio) in found:
        kept = SVG2(min_ratio=number(ratio)).map(q_centroids, k_centroids, k_sizes, number(tau))[0]
        safe = case[key.replace("map", "safe")]
        assert torch.equal(kept[safe], case[key][safe]), key
        assert ((kept != case[key]).sum(-1) <= 1).all()  # elsewhere at most one cluster on the boundary
        pairs = torch.einsum("hqk,hq,hk->h", kept.double(), q_sizes[0].double(), k_sizes[0].double())
        density = pairs / (q_sizes[0].sum(-1).double() * k_sizes[0].sum(-1).double())
        if safe.all():
            assert (density - case[key.replace("map", "density")].double()).abs().max() < 1e-6


def attention(mask, q, k, v):
    return eager.KERNEL.run(eager.KERNEL.plan(mask), q, k, v)


@pytest.mark.parametrize("folder, name", cases("wan_out_step2"))
def test_whole_attention(folder, name, path):
    """Cluster, map, attend: two denoising steps with the centroids carried over, as in the original's Wan core."""
    case = Case(folder, name)
    backbone, state, found = SVG2(), SVG2().new_state(), {}
    for side in "qk":
        x = case.real(f"{side}_i8")
        found[side] = backbone.cluster(x, start(case, x, side), 5)[1]
    for h in range(case.about["H"]):
        state.centroids[0, h] = (found["q"][0, h], found["k"][0, h])
    counts = {"q_clusters": found["q"].shape[2], "k_clusters": found["k"].shape[2]}
    q, k, v = (case.real(key) for key in ("q2_i8", "k2_i8", "v_i8"))
    mask = SVG2(**counts).predict(q, k, 0.9, state)
    assert torch.equal(mask.map[0], case["s2_map_p0p90_r0p10"])
    assert (mask.density()[0] - case["s2_density_p0p90_r0p10"]).abs().max() < 1e-6
    assert (attention(mask, q, k, v)[0] - case["wan_out_step2"]).abs().max() <= 5e-6


@pytest.mark.parametrize("folder, name", cases("hunyuan_out"))
def test_joint_text(folder, name, path):
    """HunyuanVideo: video, prompt and unused slots in one sequence."""
    case = Case(folder, name)
    about = case.about
    q, k, v = (case.real(key) for key in ("q_i8", "k_i8", "v_i8"))
    backbone = SVG2(case["q_centroids"].shape[1], case["k_centroids"].shape[1])
    state = backbone.new_state()
    for h in range(about["H"]):
        state.centroids[0, h] = tuple(x[0, h, case[f"init_{side}_idx"][h].long()] for x, side in ((q, "q"), (k, "k")))
    text = Text(about["T"] * about["frame"], about["prompt"], about["ctx"] - about["prompt"])
    mask = backbone.predict(q, k, 0.9, state, text)
    assert torch.equal(mask.map[0], case["map_ext"])
    for sizes, key in zip(mask.sizes(), ("q_sizes_ext", "k_sizes_ext")):
        assert torch.equal(sizes[0], case[key].long())
    assert (mask.density()[0] - case["density_ext"]).abs().max() < 1e-6
    assert isinstance(mask, ClusterMask)
    assert (attention(mask, q, k, v)[0] - case["hunyuan_out"]).abs().max() <= 5e-6
