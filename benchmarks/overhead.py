"""What it costs to have HEART enabled where every head is dense: microseconds a call."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from ratios import Ratio, add_arguments, settle
from small_wan import small_wan

ROUNDS, SLICE = 3000, 4  # calls are timed a few at a time, so that some slices go undisturbed


def _time(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(SLICE):
        run()
    return (time.perf_counter() - start) / SLICE


def _calls(q: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """One attention call of a model without HEART, with a handler that does nothing, and with the engine."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    import heart_attention as heart
    from heart_attention.models.attachment import attach
    from heart_attention.models.processors import dispatch
    from heart_attention.online.recorder import Recorder

    bare, engine = small_wan(), small_wan()
    attach(bare, Recorder(lambda call: False, "cpu", None, False))
    heart.enable(engine, heart.HeartConfig(backbone=heart.XAttention(), thresholds=1.0))
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "parallel_config": None}
    calls = {"plain": lambda: dispatch_attention_fn(q, q, q, backend=None, **options)}
    for name, model in (("interception", bare), ("heart", engine)):
        text = torch.zeros(1, 2, 8)
        model(torch.zeros(1, 4, 2, 4, 4), torch.tensor([500.0]), text)  # a forward to be in
        tag = model.blocks[1].attn1.processor._attention_backend
        calls[name] = lambda tag=tag, model=model: dispatch(q, q, q, backend=tag, **options)
    return calls


@torch.no_grad()
def passing_through() -> dict[str, float]:
    """Microseconds an attention call takes without HEART, and what is added with every head dense; best of many."""
    calls = _calls(torch.randn(1, 8, 2, 16))
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):  # interleaved: the machine's mood is the same for all
        for name, call in calls.items():
            best[name] = min(best[name], _time(call))
    added = {name: (best[name] - best["plain"]) * 1e6 for name in ("interception", "heart")}
    return {"without HEART": best["plain"] * 1e6, **{f"added by {name}": cost for name, cost in added.items()}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = passing_through()
    if args.json:
        print(json.dumps(result))
        return
    for what, cost in result.items():
        print(f"{what:24} {cost:6.1f} µs a call")
    plain = result["without HEART"]
    shares = {name: 1 + result[f"added by {name}"] / plain for name in ("interception", "heart")}
    settle("overhead", [Ratio(name, share, "of a plain call", False) for name, share in shares.items()], args.store)


if __name__ == "__main__":
    main()
