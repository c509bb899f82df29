"""EAR: exact against the golden set, and the laws of its routing."""

import pytest
import torch
from golden_more import cases

import heart_attention as heart
from heart_attention.backbones.ear import Clustered
from heart_attention.errors import HeartError
from heart_attention.kernels import eager
from heart_attention.masks import ClusterMask, Text

torch.set_num_threads(1)
small = heart.EAR(q_clusters=4, k_clusters=9, init_iters=5)


def inputs(n=96, d=16, heads=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, n, d, generator=g) for _ in range(3)]


def means(x, labels, count):
    return torch.stack(
        [x[labels == c].mean(0) if (labels == c).any() else torch.zeros(x.shape[1]) for c in range(count)]
    )


def clustered(case, h):
    """A golden head: labels are given, centroids are means, an empty key cluster has a centroid of its own."""
    q, k, v = (case.real(f"{x}_i8")[0, h] for x in "qkv")
    q_labels, k_labels = case["q_labels"][h].long(), case["k_labels"][h].long()
    q_centroids, k_centroids = means(q, q_labels, case.about["Cq"]), means(k, k_labels, case.about["Ck"])
    sizes = torch.bincount(k_labels, minlength=case.about["Ck"])
    if "k_empty_i8" in case:
        k_centroids = torch.where(sizes[:, None] > 0, k_centroids, case.real("k_empty_i8")[0, h])
    return Clustered(q_centroids, k_centroids, torch.bincount(q_labels, minlength=case.about["Cq"]), k_labels, k, v)


@pytest.mark.parametrize("case, config", cases("svg_ear"))
def test_golden(case, config):
    backbone, key = heart.EAR(min_ratio=config["ratio"], gamma=config["gamma"]), config["key"]
    maps = []
    for h in range(case.about["H"]):
        routing = backbone.routing(clustered(case, h))
        safe = case[f"safe_{key}"][h]
        found = backbone.select(routing, config["top_p"])
        assert torch.equal(found[safe], case[f"map_{key}"][h][safe])
        assert torch.equal(backbone.budget(routing, config["top_p"])[safe], case[f"budget_{key}"][h][safe])
        if config["gamma"] == 1:
            wrong = (routing.score - case["score"][h]).abs()[case["score_ok"][h]]
            assert wrong.max() <= case.about["tolerance"]["score"]
        maps.append(found)
    assert torch.stack(maps).shape == case[f"map_{key}"].shape


@pytest.mark.parametrize("case, config", cases("svg_ear"))
def test_golden_output(case, config):
    """The original's compensation is `rest="mean"`."""
    q, k, v = (case.real(f"{x}_i8") for x in "qkv")
    mask = ClusterMask(case[f"map_{config['key']}"][None], case["q_labels"][None], case["k_labels"][None])
    out = eager.KERNEL.run(eager.KERNEL.plan(mask, rest="mean"), q, k, v)
    wrong = out[0][:, case["out_rows"].long()] - case[f"out_{config['key']}"]
    assert wrong.abs().max() <= case.about["tolerance"]["out"]


def test_error_by_its_words():
    """Token by token in fp64."""
    q, k, v = inputs(40)
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    labels = torch.arange(40) % 5
    centroids, values = means(k, labels, 5).double(), means(v, labels, 5).double()
    head = Clustered(q[:3], centroids.float(), torch.tensor([7, 20, 13]), labels, k, v)
    score = heart.EAR().routing(head).score
    for a in range(3):
        for b in range(5):
            c = torch.exp(q[a].double() @ centroids[b] / 4)
            tokens = (labels == b).nonzero().view(-1).tolist()
            parts = [(torch.exp(q[a].double() @ k[t].double() / 4) * v[t].double() - c * values[b]) for t in tokens]
            error = sum(part.square().sum() for part in parts)
            assert score[a, b].item() == pytest.approx((error.log() - (head.q_sizes[a] * 8).log()).item(), abs=1e-4)


def test_large_logits_stay_finite():
    q, k, v = inputs(96)
    mask = small.predict(q * 60, k * 60, 0.5, v=v)
    assert mask.kept().any(-1).any() and mask.density().isfinite().all()


def test_keeps_everything_at_one():
    q, k, v = inputs()
    assert small.predict(q, k, 1.0, v=v).density().eq(1).all()


def test_many_is_one_by_one():
    q, k, v = inputs()
    masks, full = small.predict_many(q, k, (0.2, 0.6, 1.0), v=v, key=(0, "", 0))
    assert full.density().eq(1).all() and masks[2].density().eq(1).all()
    for mask, tau in zip(masks, (0.2, 0.6)):
        assert torch.equal(mask.map, small.predict(q, k, tau, v=v, key=(0, "", 0)).map)


def test_text_is_never_left_out():
    q, k, v = inputs(96)
    text = Text(80, 10, 6)
    mask = small.predict(q, k, 0.1, text=text, v=v)
    video, prompt, unused = torch.arange(80), torch.arange(80, 90), torch.arange(90, 96)
    assert mask.rows(video, prompt).all() and mask.rows(prompt, video).all()
    assert not mask.rows(video, unused).any() and mask.rows(unused, unused).all()


def test_needs_values():
    q, k, _ = inputs()
    with pytest.raises(HeartError, match="values"):
        small.predict(q, k, 0.5)


def test_settings_survive_a_file():
    backbone = heart.EAR(gamma=0.5)
    assert heart.backbones.from_dict(backbone.to_dict()) == backbone
    for wrong in ({"gamma": -1}, {"rank": "error"}, {"min_ratio": None}):
        with pytest.raises(HeartError, match=next(iter(wrong))):
            heart.EAR(**wrong)


def test_in_the_engine():
    q, k, v = inputs(128)
    config = heart.HeartConfig(small, 0.5, dense_steps=0, force_sparse=True, rest="mean")
    engine = heart.Engine(config, layers=1, heads=2)
    for step in range(3):
        out = heart.attention(q, k, v, (0, step, "cond"), engine)
    assert out.isfinite().all()
    assert engine.stats()["dense_calls"] == 0
