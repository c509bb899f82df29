"""TMR decided on the device: bit for bit the masks of a decision on the host, without a wait, at the price of predictions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from heart_attention.backbones import SVG2, Lite, XAttention
from heart_attention.config import HeartConfig
from heart_attention.errors import HeartError
from heart_attention.masks import Text
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine
from heart_attention.online.reuse import TMR

H, N, D, STEPS = 4, 96, 16, 6
CASES = {
    "blocks": (XAttention(stride=4, block=16), "drop", 0.6),
    "blocks, rest approximated": (XAttention(stride=4, block=16), "mean", 0.6),
    "clusters": (SVG2(4, 6, init_iters=2), "drop", 0.6),
    "clusters ranked by error": (SVG2(4, 6, init_iters=2, rank="error"), "mean", 0.1),
    "equal groups": (SVG2(4, 6, init_iters=2, rank="error", equal_groups=16), "mean", 0.1),
    "some heads dense": (SVG2(4, 6, init_iters=2), "drop", [0.6, 1.0, 0.7, 1.0]),
}


def generate(case, reuse, batch=1, text=None, seed=0):
    """Outputs of a few steps in which heads drift unevenly, and the record of their masks."""
    backbone, rest, tau = CASES[case]
    engine = Engine(HeartConfig(backbone, tau, reuse, dense_steps=0, force_sparse=True, rest=rest), 1, H)
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, H, N, D, generator=g)
    outs = []
    for step in range(STEPS):
        pace = torch.rand(batch, H, 1, 1, generator=g)
        q, k = q + 0.2 * pace * torch.randn(q.shape, generator=g), k + 0.2 * pace
        call = CallContext(layer=0, layers=1, step=step, branch="c", text=None if text is None else [text] * batch)
        outs.append(engine.attend(call, q, k, v, F.scaled_dot_product_attention).clone())
    return torch.stack(outs), engine.stats(wait=True).to_dict()["records"][0]


@pytest.mark.parametrize("case", CASES)
@given(
    share=st.floats(0.0, 0.5),
    gate=st.sampled_from([(0.0, 1.0), (0.4, 0.8), (0.5, 0.5)]),
    batch=st.integers(1, 2),
    text=st.sampled_from([None, Text(90, 4, 2)]),
    seed=st.integers(0, 5),
)
def test_the_same_masks_as_decided_on_the_host(case, share, gate, batch, text, seed):
    found = {}
    for decide in ("host", "device"):
        found[decide] = generate(case, TMR(relative=share, gate=gate, decide=decide), batch, text, seed)
    assert torch.equal(found["host"][0], found["device"][0])
    for name in ("refreshed", "drift", "density"):
        assert found["host"][1][name] == found["device"][1][name], name


def test_some_heads_reuse_and_some_refresh():
    """What the test above compares is not all of one kind."""
    shares = [sum(row) for row in generate("clusters", TMR(relative=0.3, gate=(0.0, 1.0)))[1]["refreshed"][0]]
    assert any(0 < share < H for share in shares), shares


def test_a_backbone_that_learns_is_refused():
    with pytest.raises(HeartError, match=r"decide='device'.*lite.*decide='host'"):
        Engine(HeartConfig(Lite(), 0.5, TMR(decide="device")), 1, H)


def test_a_place_that_does_not_exist_is_refused():
    with pytest.raises(HeartError, match="decide is 'moon': it must be 'host' or 'device'"):
        TMR(decide="moon")
