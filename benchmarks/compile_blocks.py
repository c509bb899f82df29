"""What compiling the repeated blocks gains on the embedded model: time of a step outside video attention, on a CPU.

Steps with and without `compile_blocks` take turns in one process, so that the machine's mood is the same for both. Time
outside attention is the forward's time without that of the attention calls, which are opaque to the compiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

import heart_attention as heart
from heart_attention import tiny
from heart_attention.models.attachment import attachment_of
from heart_attention.models.regional_compile import compile_blocks
from ratios import Ratio, add_arguments, settle

BAR = 0.85


def _inputs(config: Any, size: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    latents = torch.randn(1, config.in_channels, *size, generator=g)
    text = torch.randn(1, 64, config.text_dim, generator=g)
    return {"hidden_states": latents, "timestep": torch.tensor([500]), "encoder_hidden_states": text}


class _Attention:
    """Adds up the time of the attention calls of a transformer under HEART."""

    def __init__(self, transformer: Any, clock: Any) -> None:
        attachment = attachment_of(transformer)
        assert attachment is not None
        self.seconds, self.clock, self.attend = 0.0, clock, attachment.attend
        attachment.attend = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = self.clock()
        out = self.attend(*args, **kwargs)
        self.seconds += self.clock() - began
        return out


def _forward(transformer: Any, attention: _Attention, inputs: dict) -> tuple[torch.Tensor, float, float]:
    """Output, seconds outside attention, seconds in all."""
    attention.seconds, began = 0.0, attention.clock()
    with torch.no_grad():
        out = transformer(**inputs, return_dict=False)[0]
    whole = attention.clock() - began
    return out, whole - attention.seconds, whole


def measure(size: tuple[int, int, int], rounds: int, clock: Any) -> dict[str, Any]:
    """Seconds of a forward with plain and with compiled blocks, taken in turns."""
    plain, compiled = (tiny.load().transformer.eval() for _ in range(2))
    for model in (plain, compiled):
        heart.enable(model, "xattention", thresholds=1.0)
    clocks = {"plain": _Attention(plain, clock), "compiled": _Attention(compiled, clock)}
    models, inputs = {"plain": plain, "compiled": compiled}, _inputs(plain.config, size)
    compile_blocks(compiled)
    began = time.perf_counter()
    outs = {name: _forward(model, clocks[name], inputs)[0] for name, model in models.items()}
    first = time.perf_counter() - began
    times: dict[str, list] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(_forward(model, clocks[name], inputs)[1:])
    difference = float((outs["plain"] - outs["compiled"]).abs().max() / outs["plain"].abs().max())
    return {**_ratios(times), "first_s": first, "largest_difference": difference}


def _ratios(times: dict[str, list]) -> dict[str, float]:
    middle = {name: [statistics.median(x) for x in zip(*pairs)] for name, pairs in times.items()}
    outside = [c[0] / p[0] for p, c in zip(times["plain"], times["compiled"])]
    return {
        "outside_attention_plain_s": middle["plain"][0],
        "outside_attention_compiled_s": middle["compiled"][0],
        "outside_attention_ratio": statistics.median(outside),
        "worst_round": max(outside),
        "whole_ratio": middle["compiled"][1] / middle["plain"][1],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="16x32x32", help="latent frames x height x width (native 16x32x32)")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, where others share the machine")
    parser.add_argument("--json", action="store_true")
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1 if args.cpu_time else args.threads)
    t, h, w = (int(x) for x in args.size.split("x"))
    result = measure((t, h, w), args.rounds, time.process_time if args.cpu_time else time.perf_counter)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        print(f"{name:32} {value:.3g}")
    print(f"bar {BAR}: {'kept' if result['outside_attention_ratio'] <= BAR else 'missed'}")
    threads = f"{args.size}, {torch.get_num_threads()} threads"
    shares = {"outside attention": "outside_attention_ratio", "whole forward": "whole_ratio"}
    ratios = [Ratio(f"{name}, {threads}", result[key], "of plain blocks", False) for name, key in shares.items()]
    settle("compile_blocks", ratios, args.store)


if __name__ == "__main__":
    main()
