"""SVG: classification and masks exact against the golden set, and the laws of a predictor."""

import math

import pytest
import torch
from golden_more import cases

import heart_attention as heart
from heart_attention.backbones.svg import Video
from heart_attention.errors import HeartError
from heart_attention.masks import Text

torch.set_num_threads(1)
small = heart.SVG(rows=16)
GRID = (4, 4, 8)  # frames of 32 tokens


def inputs(n=128, d=16, heads=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, d, generator=g) for _ in range(3)]


def golden_video(about):
    text = Text(about["T"] * about["frame_size"], about["prompt"], about["context"] - about["prompt"])
    return Video(about["T"], about["frame_size"], text if about["context"] else None, about["N"])


def token_mask(video, width):
    """The original's execution mask, token by token, in a head's own layout: the definition beside the block rule."""
    i = torch.arange(video.n)
    apart, reach = (i[:, None] - i).abs(), width * video.frame_tokens
    if video.text is None:
        return (apart <= 128 * math.ceil(reach / 128)) | (i < video.frame_tokens)[None, :]
    real = i < video.tokens + video.text.prompt
    prompt = real & (i >= video.tokens)
    inside = real[:, None] & real[None, :]
    seen = (apart < 128 * math.floor(reach / 128)) | prompt[:, None] | prompt[None, :]
    return inside & seen | ~real[:, None] & ~real[None, :]


@pytest.mark.parametrize("case, config", cases("svg1"))
def test_golden_classes(case, config):
    q, k, v = (case.real(f"{x}_i8")[0] for x in "qkv")
    video, rows, every = golden_video(case.about), case["rows"].long(), torch.arange(case.about["N"])
    assert torch.equal(small.profile(video, every, False), case.bits("profile_spatial", video.n))
    assert torch.equal(small.profile(video, every, True), case.bits("profile_temporal", video.n))
    found = torch.stack([small.errors(q[h], k[h], v[h], video, rows) for h in range(len(q))], 1)
    assert ((found / case["mse"] - 1).abs() <= case.about["tolerance"]["mse_rel"]).all()
    assert torch.equal(found.argmin(0)[case["safe_best"]], case["best"][case["safe_best"]])


@pytest.mark.parametrize("case, config", cases("svg1"))
def test_golden_masks(case, config):
    video, key = golden_video(case.about), config["key"]
    width = video.width(config["sparsity"])
    assert width == pytest.approx(float(case[f"width_{key}"]), rel=1e-9)
    assert torch.equal(token_mask(video, width), case.bits(f"exec_{key}", video.n))
    if f"bsr_{key}" in case:
        assert video.block() == int(case["bsr_block"])
        assert torch.equal(small.blocks(video, config["sparsity"]), case[f"bsr_{key}"])


@pytest.mark.parametrize("case, config", cases("svg1"))
def test_golden_output(case, config):
    """Attention with the first configuration's token mask, in each head's own layout."""
    video = golden_video(case.about)
    order = torch.cat([video.orders(), torch.arange(video.orders().shape[1], video.n).expand(2, -1)], 1)
    mask = token_mask(video, video.width(case.about["configs"][0]["sparsity"]))
    for h, kind in enumerate(case["best"].tolist()):
        q, k, v = (case.real(f"{x}_i8")[0, h][order[kind]] for x in "qkv")
        logits = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~mask, -torch.inf)
        out = torch.empty_like(q)
        out[order[kind]] = logits.softmax(-1) @ v
        assert (out[case["out_rows"].long()] - case["out"][h]).abs().max() <= case.about["tolerance"]["out"]


@pytest.mark.parametrize("kind", [0, 1])
def test_heads_are_told_apart(kind):
    narrow = heart.SVG(rows=64, reach=4.0)  # one block of 128 tokens is the whole video: take a larger one
    frames, per_frame = 16, 64
    frame, place = torch.arange(1024) // per_frame, torch.arange(1024) % per_frame
    code = torch.nn.functional.one_hot(place if kind else frame, per_frame).float() * 12
    v = torch.randn(1, 1, 1024, 8, generator=torch.Generator().manual_seed(3))
    mask = narrow.predict(code[None, None], code[None, None], 0.3, v=v, grid=(frames, 8, 8))
    assert mask.order_of.tolist() == [[kind]]


def test_position_major_is_a_permutation():
    video = Video(3, 10, None, 30)
    spatial, temporal = video.orders()
    assert torch.equal(spatial, torch.arange(30))
    assert torch.equal(video.position_major(temporal), torch.arange(30))


def test_text_is_seen_by_all():
    q, k, v = inputs(148)
    mask = small.predict(q, k, 0.4, text=Text(128, 12, 8), v=v, grid=GRID)
    video, prompt, unused = torch.arange(128), torch.arange(128, 140), torch.arange(140, 148)
    assert mask.rows(video, prompt).all() and mask.rows(prompt, video).all()
    assert not mask.rows(video, unused).any() and mask.rows(unused, unused).all()


def test_every_token_sees_itself():
    q, k, v = inputs(128)
    mask = small.predict(q, k, 0.001, v=v, grid=GRID)
    assert mask.dense_tokens().diagonal(dim1=-2, dim2=-1).all()


def test_keeps_everything_at_one_and_more_with_more():
    q, k, v = inputs(128)
    masks, full = small.predict_many(q, k, (0.1, 0.5, 1.0), v=v, grid=GRID)
    assert full.blocks.all() and masks[2].blocks.all()
    assert (masks[0].density() <= masks[1].density()).all()
    assert torch.equal(masks[0].blocks, small.predict(q, k, 0.1, v=v, grid=GRID).blocks)


def test_needs_grid_and_values():
    q, k, v = inputs(128)
    with pytest.raises(HeartError, match="grid"):
        small.predict(q, k, 0.5, v=v)
    with pytest.raises(HeartError, match="values"):
        small.predict(q, k, 0.5, grid=GRID)


def test_in_the_engine():
    q, k, v = inputs(128)
    engine = heart.Engine(heart.HeartConfig(small, 0.5, dense_steps=0, force_sparse=True), layers=1, heads=2)
    for step in range(3):
        call = {"layer": 0, "step": step, "branch": "cond", "grid": GRID}
        assert heart.attention(q, k, v, call, engine).isfinite().all()
    assert engine.stats()["dense_calls"] == 0


def test_a_mask_without_the_peak_is_still_exact():
    """One key far above all others, outside both masks: one exponential for all masks would leave nothing."""
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(512, 16, generator=g) for _ in range(3))
    rows, video = torch.tensor([0, 3]), Video(8, 64, None, 512)
    backbone = heart.SVG(rows=2, reach=2)
    seen = [backbone.profile(video, rows, temporal) for temporal in (False, True)]
    lone = (~(seen[0] | seen[1])).all(0).nonzero()[0]
    k[lone] = 200 * (q[0] + q[3])
    logits = q[rows] @ k.T / 4
    full = logits.softmax(-1) @ v
    expected = [((logits.masked_fill(~one, -torch.inf).softmax(-1) @ v) - full).square().mean() for one in seen]
    assert torch.allclose(backbone.errors(q, k, v, video, rows), torch.stack(expected), rtol=1e-4)
