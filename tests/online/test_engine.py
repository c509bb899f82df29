"""The engine, call by call: temporal mask reuse against a longhand twin, identity limits, caches, dense fall-back."""

import dataclasses
import functools
import math

import pytest
import torch
import torch.nn.functional as F

from heart_attention import kernels
from heart_attention.backbones import SVG2, XAttention
from heart_attention.config import HeartConfig
from heart_attention.errors import HeartError
from heart_attention.masks import Text
from heart_attention.online import cost_model
from heart_attention.online import engine as engine_module
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine
from heart_attention.online.payoff import Payoff
from heart_attention.online.reuse import TMR, Always, Interval, Warmup
from heart_attention.token_order import tile_order

H, N, D = 5, 96, 16
X = XAttention(stride=4, block=16)
S = SVG2(q_clusters=6, k_clusters=10)
sdpa = F.scaled_dot_product_attention


def config(backbone=X, thresholds=0.6, reuse=None, **kw):
    kw = {"dense_steps": 0, "kernel": "eager", "force_sparse": True, **kw}
    return HeartConfig(backbone, thresholds, reuse or TMR(delta=2.0), **kw)


def trajectory(steps=8, batch=1, seed=0, moves=None, n=N):
    """q, k, v of successive steps: each head drifts at its own pace."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(3, batch, H, n, D, generator=g) * 1.5
    moves = torch.linspace(0.02, 0.3, H).view(H, 1, 1) if moves is None else moves
    walk = torch.zeros(3, batch, H, 1, D)
    for _ in range(steps):
        yield tuple(base + walk)
        walk = walk + moves * torch.randn(3, batch, H, 1, D, generator=g)


def at(step, layer=0, branch="cond", **kw):
    return CallContext(layer=layer, layers=1, step=step, branch=branch, **kw)


def run(engine, tensors, branch="cond", **kw):
    return [engine.attend(at(i, branch=branch, **kw), *qkv, sdpa) for i, qkv in enumerate(tensors)]


def refreshed(engine, branch="cond"):
    """[step][head] of the last generation, as the records tell."""
    found = [r for r in engine.stats().to_dict()["records"] if r["branch"] == branch]
    return found[0]["refreshed"][0]


# ---------------------------------------------------------------- TMR against a longhand twin


def twin(tensors, backbone, tau, delta, low, high):
    """Temporal mask reuse for one batch item, written as the paper's algorithm 1 with the gate after it."""
    anchor, mask, memory, outs, log = {}, None, backbone.new_state(), [], []
    for q, k, v in tensors:
        means = torch.stack((q.mean(2), k.mean(2)))[:, 0]  # [2, H, D]
        want = [h not in anchor or float((means[:, h] - anchor[h]).abs().sum()) > delta for h in range(H)]
        r = sum(want) / H
        take = [False] * H if r < low else [True] * H if r > high else want
        take = [t or h not in anchor for h, t in enumerate(take)]
        for h in range(H):
            if take[h]:
                one = backbone.predict(q[:, h : h + 1], k[:, h : h + 1], tau, memory, heads=[h], key=(0, "cond", 0))
                if mask is None:
                    mask = [None] * H
                mask[h], anchor[h] = one, means[:, h]
        outs.append(
            torch.cat(
                [kernels.run(kernels.plan("eager", m), q[:, [h]], k[:, [h]], v[:, [h]]) for h, m in enumerate(mask)], 1
            )
        )
        log.append([float(t) for t in take])
    return outs, log


@pytest.mark.parametrize("backbone", [X, S], ids=["xattention", "svg2"])
@pytest.mark.parametrize(
    "delta, bounds", [(1.0, (0.4, 0.8)), (2.0, (0.4, 0.8)), (2.0, (0, 1)), (4.0, (0.2, 0.5)), (0.5, (1, 1))]
)
def test_tmr_equals_its_twin_step_by_step(backbone, delta, bounds):
    steps = list(trajectory(10, seed=3))
    engine = Engine(config(backbone, 0.6, TMR(delta=delta, gate=bounds)), 1, H)
    outs = run(engine, steps)
    expected, log = twin(steps, backbone, 0.6, delta, *bounds)
    assert refreshed(engine) == log
    assert any(0 < sum(row) < H for row in log) or bounds != (0, 1)  # the case is a real one
    for got, want in zip(outs, expected):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


def test_anchor_is_the_last_refresh_not_the_previous_step():
    """A slow walk: no step moves by more than δ, but they add up and the head must refresh."""
    g = torch.Generator().manual_seed(0)
    base = torch.randn(3, 1, H, N, D, generator=g)
    shift = torch.zeros(3, 1, H, 1, D)
    shift[0, ..., 0] = 0.75  # L1 moves by exactly 0.75 a step
    steps = [tuple((torch.zeros_like(base) if i == 0 else 0) + base * 0 + i * shift) for i in range(7)]
    engine = Engine(config(reuse=TMR(delta=2.0, gate=(0, 1))), 1, H)
    run(engine, steps)
    assert [row[0] for row in refreshed(engine)] == [1, 0, 0, 1, 0, 0, 1]  # 0.75, 1.5 reuse; 2.25 > 2 refreshes


def test_forced_reuse_keeps_anchors_and_forced_refresh_renews_all():
    def step(amounts):
        x = torch.zeros(3, 1, H, N, D)
        x[0, 0, :, :, 0] = torch.tensor(amounts).view(H, 1)
        return tuple(x)

    engine = Engine(config(reuse=TMR(delta=1.0, gate=(0.4, 0.7))), 1, H)
    steps = [
        step([0.0, 0, 0, 0, 0]),
        step([1.5, 0, 0, 0, 0]),  # 1 of 5 < 0.4: forced reuse; head 0's anchor must stay at 0
        step([1.5, 1.5, 0, 0, 0]),  # head 0 still counts from 0: 2 of 5, head-wise
        step([1.5, 3.0, 1.5, 1.5, 1.5]),  # 4 of 5 > 0.7: all, also head 0 which did not move
        step([2.25, 3.0, 1.5, 1.5, 1.5]),  # head 0 moved 0.75 since
        step([2.75, 4.5, 2.75, 1.5, 1.5]),  # 1.25 since the forced refresh: with heads 1, 2 that is 3 of 5
    ]
    run(engine, steps)
    assert refreshed(engine) == [
        [1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0],
    ]


def test_delta_zero_reuses_on_equal_features_only():
    q, k, v = next(trajectory(1))
    engine = Engine(config(reuse=TMR(delta=0.0)), 1, H)
    run(engine, [(q, k, v), (q.clone(), k.clone(), v + 1), (q + 1e-3, k, v)])
    assert refreshed(engine) == [[1] * H, [0] * H, [1] * H]


def test_policies_over_steps_with_warm_up():
    def pattern(policy, steps=9):
        engine = Engine(config(reuse=policy, dense_steps=2), 1, H)
        run(engine, trajectory(steps))
        return [row[0] for row in refreshed(engine)]

    assert pattern(Always()) == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert pattern(TMR(delta=-1.0)) == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert pattern(TMR(delta=math.inf)) == [0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert pattern(Interval(3)) == [0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert pattern(Warmup(4)) == [0, 0, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("backbone", [X, S], ids=["xattention", "svg2"])
def test_always_equals_no_reuse_bit_for_bit(backbone):
    steps = list(trajectory(4))
    memory = backbone.new_state()
    for i, out in enumerate(run(Engine(config(backbone, reuse=Always()), 1, H), steps)):
        q, k, v = steps[i]
        mask = backbone.predict(q, k, 0.6, memory, key=(0, "cond", 0))
        assert torch.equal(out, kernels.run(kernels.plan("eager", mask), q, k, v))


def test_reuse_skips_clustering(monkeypatch):
    calls = []
    original = SVG2.predict
    monkeypatch.setattr(SVG2, "predict", lambda self, *a, **kw: calls.append(1) or original(self, *a, **kw))
    run(Engine(config(S, reuse=TMR(delta=math.inf)), 1, H), trajectory(6))
    assert len(calls) == 1


def test_cached_plans_are_reused_with_their_masks(monkeypatch):
    plans = []
    kernel = kernels.get("eager")
    original = type(kernel).plan
    monkeypatch.setattr(
        type(kernel), "plan", lambda self, mask, rest="drop": plans.append(1) or original(self, mask, rest)
    )
    run(Engine(config(reuse=Interval(3)), 1, H), trajectory(6))
    assert len(plans) == 2


@pytest.mark.parametrize("backbone", [X, SVG2(q_clusters=4, k_clusters=6)])
def test_plans_too_large_to_keep_are_made_at_each_call(backbone, monkeypatch):
    tensors = list(trajectory(4))
    keeps, saves = Engine(config(backbone), 1, H), Engine(config(backbone), 1, H)
    want = run(keeps, tensors)
    monkeypatch.setattr(engine_module, "PLAN_BYTES", 0)
    got = run(saves, tensors)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert keeps.memory()["plans"] > 0 and saves.memory()["plans"] == 0
    assert saves.memory()["masks"] == keeps.memory()["masks"] > 0


def test_full_token_drift_sees_what_means_hide():
    q, k, v = next(trajectory(1))
    swapped = q.flip(2)  # same mean, other tokens
    for kind, expected in (("mean", 0.0), ("tokens", 1.0)):
        engine = Engine(config(reuse=TMR(delta=1.0, drift=kind)), 1, H)
        run(engine, [(q, k, v), (swapped, k, v)])
        assert refreshed(engine)[1][0] == expected


def test_relative_delta_does_not_depend_on_scale():
    logs = []
    for scale in (2.0**-10, 1.0, 2.0**10):
        engine = Engine(config(reuse=TMR(relative=0.3, gate=(0, 1))), 1, H)
        run(engine, [(q * scale, k * scale, v) for q, k, v in trajectory(8, seed=5)])
        logs.append(refreshed(engine))
    assert logs[0] == logs[1] == logs[2]
    assert 0 < sum(map(sum, logs[0][1:])) < H * 7


def test_per_layer_delta():
    engine = Engine(config(reuse=TMR(delta=[0.0, math.inf])), 2, H)
    for i, qkv in enumerate(trajectory(3)):
        for layer in (0, 1):
            engine.attend(at(i, layer), *qkv, sdpa)
    assert [[row[0] for row in rows] for rows in engine.stats()["records"][0]["refreshed"]] == [[1, 1, 1], [1, 0, 0]]


# ---------------------------------------------------------------- identity limits


def test_tau_one_everywhere_is_the_dense_backend_itself():
    q, k, v = next(trajectory(1))
    seen = []
    dense = lambda *qkv: seen.append(qkv) or sdpa(*qkv)  # noqa: E731
    engine = Engine(config(thresholds=1.0), 1, H)
    assert torch.equal(engine.attend(at(7), q, k, v, dense), sdpa(q, k, v))
    assert len(seen) == 1
    assert engine.stats()["dense_reasons"] == {"every threshold is 1": 1}


@pytest.mark.parametrize("kernel", ["eager", "auto"])
@pytest.mark.parametrize("backbone", [X, S], ids=["xattention", "svg2"])
@pytest.mark.parametrize("text", [None, Text(80, 10, 6)], ids=["video", "joint"])
def test_mixed_layers_give_dense_heads_all_tokens_in_one_call(backbone, kernel, text):
    q, k, v = next(trajectory(1))
    tau = [0.5, 1.0, 0.7, 1.5, 0.6]
    engine = Engine(config(backbone, tau, kernel=kernel), 1, H)
    out = engine.attend(at(0, text=[text] if text else None), q, k, v, sdpa)
    mask = None
    if text:
        mask = torch.zeros(N, N, dtype=torch.bool)
        mask[:90, :90] = True
        mask[90:, 90:] = True
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out[:, [1, 3]], expected[:, [1, 3]], rtol=0, atol=1e-5)
    assert (out[:, [0, 2, 4]] - expected[:, [0, 2, 4]]).abs().amax((2, 3)).min() > 1e-4
    density = engine.stats()["records"][0]["density"][0][0]
    assert density[0] < 1 and density[2] < 1
    if text is None:
        assert density[1] == density[3] == 1


@pytest.mark.parametrize("order", ["raster", "tiles"])
def test_all_ones_masks_equal_dense(order):
    class Everything(XAttention):
        def predict(self, *a, **kw):
            mask = super().predict(*a, **kw)
            return dataclasses.replace(mask, blocks=torch.ones_like(mask.blocks))

    q, k, v = next(trajectory(1))
    out = Engine(config(Everything(stride=4, block=16), kernel="auto", order=order), 1, H).attend(
        at(0, grid=(4, 4, 6)), q, k, v, sdpa
    )
    torch.testing.assert_close(out, sdpa(q, k, v), rtol=0, atol=1e-5)


def test_output_is_laid_out_for_the_model():
    q, k, v = next(trajectory(1))
    out = Engine(config(), 1, H).attend(at(0), q, k, v, sdpa)
    assert out.transpose(1, 2).is_contiguous()


# ---------------------------------------------------------------- batches, branches, generations


@pytest.mark.parametrize("backbone", [X, S], ids=["xattention", "svg2"])
def test_a_batch_of_two_is_two_single_runs(backbone):
    one, two = list(trajectory(7, seed=1)), list(trajectory(7, seed=2))
    both = [tuple(torch.cat(pair) for pair in zip(a, b)) for a, b in zip(one, two)]
    make = lambda: Engine(config(backbone, reuse=TMR(delta=1.5, gate=(0.3, 0.7))), 1, H)  # noqa: E731
    outs = run(make(), both)
    singles = [run(make(), x) for x in (one, two)]
    for i, out in enumerate(outs):
        assert torch.equal(out, torch.cat([singles[0][i], singles[1][i]]))


def test_prompts_of_different_lengths_in_one_batch():
    one, two = list(trajectory(4, seed=1)), list(trajectory(4, seed=2))
    texts = [Text(80, 10, 6), Text(80, 4, 12)]
    both = [tuple(torch.cat(pair) for pair in zip(a, b)) for a, b in zip(one, two)]
    outs = run(Engine(config(), 1, H), both, text=texts)
    singles = [run(Engine(config(), 1, H), x, text=[t]) for x, t in ((one, texts[0]), (two, texts[1]))]
    for i, out in enumerate(outs):
        assert torch.equal(out, torch.cat([singles[0][i], singles[1][i]]))


def test_prompts_of_different_lengths_that_run_dense_cost_one_dense_call():
    texts = [Text(N - 10, 10 - i, i) for i in range(4)]
    batches = []

    def dense(q, k, v):
        batches.append(q.shape[0])
        return sdpa(q, k, v)

    engine = Engine(config(force_sparse=False), 1, H, costs=costs(100.0))
    (qkv,) = trajectory(steps=1, batch=4)
    out = engine.attend(at(0, text=texts), *qkv, dense)
    assert torch.equal(out, sdpa(*qkv)) and batches == [4]
    assert engine.stats()["calls"] == 4  # told for every item


def test_guidance_branches_do_not_mix():
    cond, uncond = list(trajectory(5, seed=1)), list(trajectory(5, seed=2))
    together = Engine(config(), 1, H)
    for i in range(5):
        for branch, steps in (("cond", cond), ("uncond", uncond)):
            together.attend(at(i, branch=branch), *steps[i], sdpa)
    for branch, steps in (("cond", cond), ("uncond", uncond)):
        alone = Engine(config(), 1, H)
        run(alone, steps, branch=branch)
        assert refreshed(together, branch) == refreshed(alone, branch)


@pytest.mark.parametrize("backbone", [X, S], ids=["xattention", "svg2"])
def test_two_generations_in_a_row_are_equal(backbone):
    steps = list(trajectory(5))
    engine = Engine(config(backbone), 1, H)
    first = run(engine, steps)
    engine.reset()
    again = run(engine, steps)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert engine.stats()["generations"] == 2


def test_a_new_generation_number_drops_the_cache_even_without_reset():
    steps = list(trajectory(3))
    engine = Engine(config(reuse=TMR(delta=math.inf)), 1, H)
    run(engine, steps)
    engine.attend(at(3, generation=1), *steps[0], sdpa)
    assert refreshed(engine)[-1] == [1] * H


@pytest.mark.parametrize("change", ["tokens", "dtype", "thresholds", "batch", "text"])
def test_what_masks_depend_on_drops_the_cache(change):
    q, k, v = next(trajectory(1))
    engine = Engine(config(reuse=TMR(delta=math.inf)), 1, H)
    text = None
    engine.attend(at(0), q, k, v, sdpa)
    if change == "tokens":
        q, k, v = next(trajectory(1, n=N - 7))
    elif change == "dtype":
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    elif change == "thresholds":
        engine.set_thresholds(0.3)
    elif change == "batch":
        q, k, v = (torch.cat([x, x]) for x in (q, k, v))
    else:
        text = [Text(80, 10, 6)]
    out = engine.attend(at(1, text=text), q, k, v, sdpa)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert refreshed(engine)[1] == [1] * H


def test_wan22_experts_have_their_own_state_and_thresholds():
    table = [[[0.5] * H], [[0.9] * H]]
    engine = Engine(config(thresholds=table, reuse=TMR(delta=math.inf)), 1, H, transformers=2)
    steps = list(trajectory(4))
    for i, t in enumerate((0, 0, 1, 1)):
        engine.attend(at(i, transformer=t), *steps[i], sdpa)
    first, second = engine.stats()["records"]
    assert first["refreshed"] == second["refreshed"] == [[[1.0] * H, [0.0] * H]]
    assert max(first["density"][0][0]) < min(second["density"][0][0])


# ---------------------------------------------------------------- tokens: text, order, heads on ranks


def test_pooling_leaves_out_what_the_predictor_does_not_see():
    q, k, v = next(trajectory(1))
    text = [Text(80, 10, 6)]
    for backbone, first_unseen in ((X, 90), (S, 80)):
        for spoil, expected in ((slice(first_unseen, N), 0.0), (slice(0, first_unseen), 1.0)):
            engine = Engine(config(backbone, reuse=TMR(delta=1.0)), 1, H)
            moved = q.clone()
            moved[:, :, spoil] += 100
            for i, x in enumerate((q, moved)):
                engine.attend(at(i, text=text), x, k, v, sdpa)
            assert refreshed(engine)[1][0] == expected


@pytest.mark.parametrize("text", [None, Text(72, 14, 10), Text(0, 24, 0)], ids=["video", "text last", "text first"])
def test_tile_order_predicts_and_attends_on_permuted_tokens(text):
    grid = (3, 4, 6) if text else (4, 4, 6)
    q, k, v = next(trajectory(1))
    engine = Engine(config(thresholds=0.5, order="tiles", reuse=Always()), 1, H)
    out = engine.attend(at(0, grid=grid, text=[text] if text else None), q, k, v, sdpa)
    order = tile_order(grid, 16)
    if text:
        order = torch.cat([text.video_index(N)[order], torch.arange(text.start, text.start + text.prompt)])
    part = [x[:, :, order] for x in (q, k, v)]
    mask = X.predict(part[0], part[1], 0.5)
    expected = sdpa(q, k, v)
    expected[:, :, order] = kernels.run(kernels.plan("eager", mask), *part)
    seen = torch.arange(N)[order.sort().values]
    torch.testing.assert_close(out[:, :, seen], expected[:, :, seen], rtol=0, atol=2e-6)


def test_heads_on_two_ranks_decide_as_one_process():
    """Each rank sees its heads; counts are added up over ranks, thresholds and seeds follow the true head."""
    steps = list(trajectory(8, seed=3))
    tau = [0.5, 0.6, 0.7, 0.8, 0.9]
    make = lambda: Engine(config(S, tau, TMR(delta=1.5, gate=(0.5, 0.9))), 1, H)  # noqa: E731
    whole = make()
    expected = run(whole, steps)
    ranks, split = [make(), make()], [[0, 1, 3], [2, 4]]
    for i, qkv in enumerate(steps):
        counts = []  # first pass: what each rank counts; second: with the sum
        for rank in (0, 1):
            probe = CallContext(layer=0, step=i, branch="cond", heads=split[rank], heads_total=H)
            count = _wanted(ranks[rank], probe, [x[:, split[rank]] for x in qkv])
            counts.append(count)
        for rank in (0, 1):
            call = CallContext(layer=0, step=i, branch="cond", heads=split[rank], heads_total=H)
            call.all_reduce = functools.partial(torch.full_like, fill_value=sum(counts))
            out = ranks[rank].attend(call, *[x[:, split[rank]] for x in qkv], sdpa)
            assert torch.equal(out, expected[i][:, split[rank]])


def _wanted(engine, call, qkv):
    """How many heads of this rank are beyond δ, from a copy of its state."""
    from heart_attention.online import reuse

    state = engine._states.get((0, 0, "cond", 0))
    if state is None:
        return qkv[0].shape[1]
    drift = reuse.drift(state.anchor, reuse.features(qkv[0], qkv[1], "mean"))
    return int((drift > engine.config.reuse.delta).sum())


# ---------------------------------------------------------------- dense fall-back


def costs(kernel_rate, later=0.0, first=0.0):
    """A table made up so that sparse pays below a density of 1/kernel_rate; masks cost `later`, a first one `first`."""
    line, free = cost_model.Line, cost_model.Line(0, 0.0)
    parts = cost_model.Costs(line(0, 1.0), line(0, kernel_rate), line(later, 0.0), free, line(first, 0.0), free)
    return cost_model.CostTable("made up", "a test", 0.0, {"block": {16: parts}, "cluster": {16: parts}})


def test_dense_when_sparse_cannot_pay_and_it_says_why():
    steps = list(trajectory(8))
    engine = Engine(config(force_sparse=False), 1, H, costs=costs(100.0))
    outs = run(engine, steps)
    assert all(torch.equal(out, sdpa(*qkv)) for out, qkv in zip(outs, steps))
    assert engine.stats()["dense_reasons"] == {"not worth it: too few tokens": 8}
    assert engine.stats()["time"]["prediction"] == 0


@pytest.mark.parametrize("rate, looked", [(1.5, True), (1.7, False)])
def test_a_look_is_taken_where_likely_masks_would_gain_a_quarter(rate, looked):
    """At half the pairs, 1.5 times as dear each: 0.75 of dense, which is worth a look; 0.85 is not."""
    engine = Engine(config(force_sparse=False), 1, H, costs=costs(rate))
    run(engine, trajectory(2))
    assert (engine.stats()["time"]["prediction"] > 0) is looked


def test_too_few_tokens_are_asked_about_once(monkeypatch):
    """Shapes alone decide it, so a model at a small size runs as without HEART; other thresholds are another question."""
    asked = []
    original = Payoff._likely_shares
    monkeypatch.setattr(Payoff, "_likely_shares", lambda self, *a: asked.append(1) or original(self, *a))
    engine = Engine(config(force_sparse=False), 1, H, costs=costs(100.0))
    for _ in range(3):
        run(engine, trajectory(8))
    assert len(asked) == 1
    engine.set_thresholds(0.5)
    run(engine, trajectory(8))
    assert len(asked) == 2


def test_dense_when_masks_keep_too_much_looks_again_ever_less_often(monkeypatch):
    calls = []
    original = XAttention.predict
    monkeypatch.setattr(XAttention, "predict", lambda self, *a, **kw: calls.append(1) or original(self, *a, **kw))
    engine = Engine(config(force_sparse=False, thresholds=0.95, reuse=Always()), 1, H, costs=costs(1.5))
    outs = run(engine, steps := list(trajectory(16)))
    assert all(torch.equal(out, sdpa(*qkv)) for out, qkv in zip(outs, steps))
    assert engine.stats()["dense_reasons"] == {"not worth it: the masks keep too much": 16}
    assert len(calls) == 4  # at calls 0, 2, 5, 10


def test_sparse_where_it_pays_and_where_it_is_forced():
    for kw, expected in (({"costs": costs(1.0)}, 0), ({"costs": costs(100.0)}, 3)):
        engine = Engine(config(force_sparse=False), 1, H, **kw)
        run(engine, trajectory(3))
        assert engine.stats()["dense_calls"] == expected
    forced = Engine(config(force_sparse=True), 1, H, costs=costs(100.0))
    run(forced, trajectory(3))
    assert forced.stats()["dense_calls"] == 0


def test_a_first_mask_that_the_steps_left_cannot_win_back_is_not_made():
    steps = list(trajectory(8))
    dense = cost_model.pairs(tuple(steps[0][0].shape))
    clusters = SVG2(4, 6, init_iters=10000, step_iters=1, min_ratio=0.1)
    # half of each of the 8 calls is to be won, and a first clustering counts twice
    for start, length, sparse in ((1.95, 8, True), (2.05, 8, False), (2.05, None, True), (2.05, 9, True)):
        table = costs(1.0, later=1e-3 * dense, first=start * dense)
        chosen = config(clusters, 0.3, force_sparse=False, dense_steps=0)
        engine = Engine(chosen, 1, H, costs=table)
        engine.steps = lambda length=length: length
        run(engine, steps)
        reasons = engine.stats()["dense_reasons"]
        assert ("not worth it: the first clustering would not be won back" in reasons) is not sparse
        assert not sparse or not reasons


def test_gradients_cross_shapes_and_dense_layers_run_dense():
    q, k, v = next(trajectory(1))
    engine = Engine(config(dense_layers=1), 2, H)
    engine.attend(at(0), q, k, v, sdpa)
    engine.attend(at(0, 1), q, k[:, :, :50], v[:, :, :50], sdpa)
    out = engine.attend(at(0, 1), q.clone().requires_grad_(), k, v, sdpa)
    out.sum().backward()
    assert engine.stats()["dense_reasons"] == {
        "dense layer": 1,
        "keys and queries of different shapes": 1,
        "gradients are wanted": 1,
    }


def test_without_a_kernel_auto_runs_dense_and_a_named_one_raises():
    q, k, v = (x.double() for x in next(trajectory(1)))
    serves = [name for name in kernels.names() if not kernels.get(name).reasons_not(None, q)]
    engine = Engine(config(kernel="auto"), 1, H)
    out = engine.attend(at(0), q, k, v, sdpa)
    torch.testing.assert_close(out.shape, q.shape)
    assert bool(engine.stats()["dense_calls"]) == (not serves)
    with pytest.raises(HeartError, match="no kernel 'nonsense'"):
        Engine(config(kernel="nonsense"), 1, H)


# ---------------------------------------------------------------- memory


def test_cache_memory_is_reported_and_small():
    n, heads, dim = 4096, 2, 64
    q, k, v = torch.randn(3, 1, heads, n, dim).bfloat16()
    x = Engine(config(XAttention(stride=16, block=128)), 1, heads)
    s = Engine(config(SVG2(q_clusters=20, k_clusters=64, init_iters=1)), 1, heads)
    for engine in (x, s):
        engine._run = lambda request, state, dense: request.q  # the kernel itself is not what is measured
        engine.attend(at(0), q, k, v, sdpa)
    pairs = heads * (n // 128) ** 2
    assert x.memory()["masks"] <= 1.1 * pairs / 8
    assert x.memory()["anchors"] == 2 * heads * dim * 2
    assert s.memory()["masks"] <= 2 * heads * n * 2 + 1.1 * heads * 20 * 64 / 8
    assert s.memory()["centroids"] == heads * (20 + 64) * dim * 4


def test_memory_after_many_generations_is_that_after_two():
    import gc

    import psutil

    engine = Engine(config(dataclasses.replace(S, init_iters=2), reuse=TMR(delta=1.5)), 1, H)
    steps = list(trajectory(3))

    def held():
        gc.collect()
        tensors = sum(o.nbytes for o in gc.get_objects() if isinstance(o, torch.Tensor))
        return tensors, psutil.Process().memory_info().rss

    for generation in range(50):
        run(engine, steps)
        engine.reset()
        if generation == 1:
            before = held()
    after = held()
    assert after[0] == before[0]
    assert after[1] - before[1] < 2**20
    assert not engine._states and engine.memory()["masks"] > 0  # dropped, but still told
