"""A deeper model from a trained one, the same function at first: new layers add nothing until they have learned.

python -m tools.train_tiny.grow --layers 9 --out runs/deep     # a checkpoint to train on from, of the packaged weights
"""

import argparse
from pathlib import Path

import torch

from heart_attention import tiny

from . import model

Weights = dict[str, torch.Tensor]  # by parameter name, as in a checkpoint
BLOCKS = "transformer.blocks."
# What a block adds to its input goes through these; at zero it adds nothing.
OUTPUTS = ("attn1.to_out.0", "attn2.to_out.0", "ffn.net.2")


def sources(old: int, new: int) -> list[tuple[int, bool]]:
    """For each of the new layers: the old one it copies, and whether it is an addition. Additions are spread evenly."""
    if not old <= new <= 2 * old:
        raise ValueError(f"{old} layers can grow to between {old} and {2 * old}, not to {new}")
    place = [i * old // new for i in range(new)]
    return [(p, i > 0 and place[i - 1] == p) for i, p in enumerate(place)]


def deepen(weights: Weights, old: int, new: int) -> Weights:
    """Weights of a transformer with `new` layers that computes what the one with `old` layers does."""
    grown = {n: w.clone() for n, w in weights.items() if not n.startswith(BLOCKS)}
    for place, (source, added) in enumerate(sources(old, new)):
        prefix = f"{BLOCKS}{source}."
        for name, w in weights.items():
            if name.startswith(prefix):
                part = name.removeprefix(prefix)
                silent = added and part.startswith(OUTPUTS)
                grown[f"{BLOCKS}{place}.{part}"] = torch.zeros_like(w) if silent else w.clone()
    return grown


def packaged() -> Weights:
    """The packaged weights, by the names that a checkpoint has."""
    pipe = tiny.load()
    named = [(f"transformer.{n}", p) for n, p in pipe.transformer.named_parameters()]
    named += [(f"text_encoder.{n}", p) for n, p in pipe.text_encoder.named_parameters()]
    return {n: p.detach().clone() for n, p in named}


def state(weights: Weights, step: int, seed: int = 0) -> dict:
    """A checkpoint that begins with these weights at this step of the plan, its optimisers fresh."""
    return {"step": step, "seed": seed, "weights": weights, "ema": weights, "optimisers": None}


def main(argv: list[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--step", type=int, default=14750, help="of the plan, where training goes on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    grown = deepen(packaged(), model.LAYERS, args.layers)
    torch.save(state(grown, args.step), args.out / "checkpoint.pt")


if __name__ == "__main__":
    main()
