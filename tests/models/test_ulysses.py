"""Ulysses context parallelism with two processes: equal to one process; ring refused; heads assigned by cost."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models as tiny
import torch
from models_in_parallel import calibration, config, generate, model, on_two_ranks, parallel

import heart_attention as heart
from heart_attention import HeartError
from heart_attention.masks import Text
from heart_attention.models import family_of
from heart_attention.models.attachment import attach, attachment_of
from heart_attention.models.ulysses import _shares

SHIPPED = Path(heart.__file__).parent / "tiny" / "calibrations" / "xattention.heart.json"


def engine():
    from heart_attention.online.engine import Engine

    return Engine(config(), layers=2, heads=4)


# Other families, and options for two ranks: the 13 text tokens of HunyuanVideo-1.5 do not divide by two.
# For all but HunyuanVideo's, diffusers has a plan of its own.
OTHERS = {
    "ltx": {},
    "chronoedit": {},
    "minimax-h3": {},
    "hunyuan": {},
    "hunyuan-1.5": {"ulysses_anything": True},
}


def joint_text_plan():
    """diffusers has no plan for joint text in videos; a user's, like those for images, splits video and text."""
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    angles = ContextParallelInput(split_dim=0, expected_dims=2, split_output=True)
    tokens = ContextParallelInput(split_dim=1, expected_dims=3)
    return {
        "rope": {0: angles, 1: angles},
        "transformer_blocks.0": {"hidden_states": tokens, "encoder_hidden_states": tokens},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }


def other_run(name, handler, **degrees):
    """A few steps with two prompts of different lengths."""
    case = tiny.every_model()[name]
    wider = {"cross_attention_dim": 4 * tiny.DIM} if name == "ltx" else {}
    attach(transformer := case.build(num_attention_heads=4, **wider), handler)
    if degrees:
        parallel(transformer, joint_text_plan() if name.startswith("hunyuan") else None, **degrees)
    onward = 1 if family_of(transformer).rising else -1  # the way its timestep goes while it denoises
    given = [case.inputs(900.0 + onward * step, batch=2, seed=step // 2) for step in range(4)]
    if name == "ltx":  # diffusers 0.42 itself fails on its text mask under context parallelism
        given = [{**x, "encoder_attention_mask": None} for x in given]
    return torch.stack([tiny.run(transformer, x) for x in given])


def decisions(handler):
    """(layer, step, head) -> refreshed, of this rank's heads."""
    found = {}
    for row in handler.recorder.rows:
        for i, head in enumerate(row.heads or range(4) if row.refreshed is not None else ()):
            found[row.layer, row.step, head] = row.refreshed[i]
    return found


def work(rank, folder):
    """What each of two processes does; results go to files, the parent compares."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results = {}
    results["plain"] = generate(parallel(model(), ulysses_degree=2))
    attach(seen_model := parallel(model(), ulysses_degree=2), seen := tiny.Seen())
    results["seen"] = generate(seen_model)
    results["places"] = [(w.head_offset, w.heads_total, w.heads, shape) for w, shape in seen.calls[:1]]
    results["passed"] = seen.passed
    attach(one := model(), handler := engine())  # enabled first, made parallel afterwards
    results["engine"] = generate(parallel(one, ulysses_degree=2))
    results["decisions"] = decisions(handler)
    heart.enable(
        assigned := parallel(model(), ulysses_degree=2), config(thresholds=calibration()), head_assignment="cost"
    )
    results["by cost"] = generate(assigned)
    handler = attachment_of(assigned).handler
    results["decisions by cost"] = decisions(handler)
    results["assignment"] = {row.layer: row.heads for row in handler.recorder.rows if row.heads}
    for name, options in OTHERS.items():
        results[name] = other_run(name, seen := tiny.Seen(), ulysses_degree=2, **options)
        results[name, "seen"] = [shape for _, shape in seen.calls[:1]], seen.passed
        results[name, "engine"] = other_run(name, handler := engine(), ulysses_degree=2, **options)
        results[name, "decisions"] = decisions(handler)
    attach(uneven := tiny.wan(num_attention_heads=3), tiny.Seen())
    results["uneven"] = generate(parallel(uneven, ulysses_degree=2, ulysses_anything=True))
    ring = parallel(model(), ring_degree=2)
    try:
        attach(ring, tiny.Seen())
    except HeartError as error:
        results["ring"] = str(error)
    attach(late := model(), tiny.Seen())
    try:
        generate(parallel(late, ring_degree=2))
    except HeartError as error:
        results["late ring"] = str(error)
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results():
    return on_two_ranks(work)


def test_two_ranks_equal_one_process(results):
    expected = generate(model())
    for found in results:
        assert torch.equal(found["seen"], found["plain"])
        assert torch.allclose(found["seen"], expected, atol=1e-6)
        assert found["passed"] == []
    n = tiny.VIDEO
    assert [found["places"] for found in results] == [
        [(0, 4, None, (1, 2, n, tiny.DIM))],
        [(2, 4, None, (1, 2, n, tiny.DIM))],
    ]


@pytest.mark.parametrize(("what", "how"), [("engine", "decisions"), ("by cost", "decisions by cost")])
def test_thresholds_and_gate_go_over_all_heads(results, what, how):
    attach(transformer := model(), handler := engine())
    expected = generate(transformer)
    for found in results:
        assert torch.allclose(found[what], expected, atol=1e-5)
    together = {**results[0][how], **results[1][how]}
    assert len(together) == len(results[0][how]) + len(results[1][how])  # no head on two ranks
    assert together == decisions(handler)
    at = {place: [together[(*place, head)] for head in range(4)] for place in ((0, 3), (1, 3), (1, 5))}
    # one head of four drifts: below the gate over all ranks, though it is half of its own rank's heads
    assert at == {(0, 3): [0, 0, 0, 0], (1, 3): [0, 0, 1, 1], (1, 5): [1, 1, 1, 1]}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_over_ranks_equal_one_process(results, name):
    expected = other_run(name, seen := tiny.Seen()), other_run(name, handler := engine())
    _, (batch, _, n, dim) = seen.calls[0]
    for found in results:
        assert torch.allclose(found[name], expected[0], atol=1e-5)
        assert torch.allclose(found[name, "engine"], expected[1], atol=1e-5)
        assert found[name, "seen"] == ([(batch, 2, n, dim)], [])
    assert not torch.allclose(expected[0], expected[1], atol=1e-4)  # it was sparse
    together = {**results[0][name, "decisions"], **results[1][name, "decisions"]}
    assert together == decisions(handler) and len(together) == 2 * len(results[0][name, "decisions"])


def test_text_that_lies_otherwise_is_not_taken_for_known():
    layer = SimpleNamespace(info=SimpleNamespace(kind="joint"))

    def shares(text, tokens, item_by_item=False):
        family = SimpleNamespace(item_by_item=item_by_item, packed=False)
        return _shares(SimpleNamespace(sequence=(32, text), family=family), layer, tokens)

    assert shares([Text(32, 2, 4), Text(32, 3, 3)], [19, 19]) == [[16, 3], [16, 3]]
    assert shares([Text(0, 5)], [19, 18]) == [[3, 16], [2, 16]]  # text before video
    assert shares([Text(32, 6)], [22, 22]) == []  # every rank has all the text
    assert shares([Text(8, 6)], [19, 19]) == []  # text amid video
    assert shares([Text(32, 6), Text(32, 4)], [19, 19]) == []  # lengths differ
    assert shares([Text(32, 6)], [19, 19], item_by_item=True) == [] == shares(None, [19, 19])


def test_heads_go_where_they_were_assigned(results):
    assert [found["assignment"] for found in results] == [{0: [0, 2], 1: [0, 1]}, {0: [1, 3], 1: [2, 3]}]
    for found in results:
        assert torch.equal(found["by cost"], found["engine"])  # who computes a head changes nothing


def test_uneven_heads(results):
    expected = generate(tiny.wan(num_attention_heads=3))
    for found in results:
        assert torch.allclose(found["uneven"], expected, atol=1e-6)


def test_ring_is_refused_with_what_to_use(results):
    for found in results:
        for key in ("ring", "late ring"):
            assert "ring_degree=2" in found[key] and "ulysses_degree=2" in found[key]
