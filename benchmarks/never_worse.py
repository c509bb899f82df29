"""Every method against plain diffusers, end to end, from 256 to 4,096 tokens and from 4 to 50 steps: is it ever slower?

    python benchmarks/never_worse.py --out runs/never_worse.json [--seconds 150] [--tokens 256,512] [--steps 4,12]

A cell is a method at a size and a number of steps: the median over rounds, each of which generates once without HEART and once
by every method that still needs it, dense first and last in turn. A run goes on where the last one stopped; `--seconds` ends
it, so that an idle machine can be had in pieces. Small cells come first. A cell whose first three pairs all are above 1.15 has
said what it has to say and ends there; every other cell gets all its pairs, and one whose generations are short as many as fit
into ten seconds, since a busy moment decides more of them. The bar is 0.97 of dense in every cell; ratios are only worth
reading from an idle machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

import heart_attention as heart
from heart_attention import tiny
from heart_attention.evaluation import methods
from heart_attention.files import write_json
from ratios import Ratio, add_arguments, settle

BAR = 0.97
CLEAR, ENOUGH = 1.15, 3  # above this in the first pairs no further pair is needed
SECONDS, MOST = 10.0, 41  # of dense generations in a cell, and pairs at most
GRIDS = {256: (4, 64, 64), 512: (8, 64, 64), 1152: (8, 96, 96), 2048: (8, 128, 128), 4096: (16, 128, 128)}
STEPS = (4, 8, 12, 25, 50)
NAMED = ("xattention", "xattention+tmr", "xattention+joint", "svg2", "svg2+tmr", "svg2+joint", "heart")
CLUSTERS = heart.HeartConfig(heart.SVG2(128, 256, rank="error"), 0.1, heart.TMR(relative=0.2), rest="mean")


class Cell(NamedTuple):
    """A method at a size and a number of steps."""

    tokens: int
    steps: int
    method: str

    @property
    def name(self) -> str:
        """As it stands in the file."""
        return f"{self.tokens} tokens, {self.steps} steps, {self.method}"

    @property
    def call(self) -> dict[str, Any]:
        """Arguments for the pipeline."""
        frames, height, width = GRIDS[self.tokens]
        return {
            **tiny.NATIVE,
            "num_frames": frames,
            "height": height,
            "width": width,
            "num_inference_steps": self.steps,
        }


def configs(pipe: Any) -> dict[str, heart.HeartConfig]:
    """Each method as a user gets it: nothing is forced."""
    named = {name: methods.build(name, pipe, "tiny").config for name in NAMED}
    return {"every head dense": heart.HeartConfig(thresholds=1.0), **named, "clusters, rest approximated": CLUSTERS}


def seconds(pipe: Any, call: dict[str, Any]) -> float:
    """Time of one generation."""
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    pipe("a red ball moves to the left over a blue background", generator=generator, output_type="np", **call)
    return time.perf_counter() - start


def a_round(
    pipe: Any, made: dict[str, heart.HeartConfig], todo: list[Cell], turn: int
) -> list[tuple[float, float, Any]]:
    """Of each cell (all of one size and number of steps) dense over HEART, the seconds of dense, and what HEART did."""
    call, dense_first = todo[0].call, turn % 2 == 0
    dense = seconds(pipe, call) if dense_first else 0.0
    mine, told = {}, {}
    for cell in todo if dense_first else todo[::-1]:
        with heart.enabled(pipe, made[cell.method]):
            mine[cell] = seconds(pipe, call)
            told[cell] = heart.stats(pipe).to_dict()
    dense = dense or seconds(pipe, call)
    return [(dense / mine[cell], dense, told[cell]) for cell in todo]


def cells(tokens: list[int], steps: list[int], names: list[str]) -> Iterator[Cell]:
    """The quickest first."""
    for n, s in sorted(((n, s) for n in tokens for s in steps), key=lambda at: at[0] * at[1]):
        yield from (Cell(n, s, name) for name in names)


def settled(row: dict[str, Any], pairs: int) -> bool:
    """Whether a cell has enough pairs."""
    ratios, spent = row["ratios"], row.get("seconds", SECONDS)
    if len(ratios) >= ENOUGH and min(ratios) > CLEAR:
        return True
    return len(ratios) >= pairs and (spent >= SECONDS or len(ratios) >= MOST)


def measure(pipe: Any, todo: list[Cell], pairs: int, out: Path, limit: float) -> dict[str, Any]:
    """Rounds until every cell has enough pairs, in the file after each; stops when the time is over."""
    found = json.loads(out.read_text()) if out.is_file() else {}
    made, end = configs(pipe), time.perf_counter() + limit
    for _, group in groupby(todo, key=lambda cell: (cell.tokens, cell.steps)):
        rows = {c: found.setdefault(c.name, {"ratios": [], "seconds": 0.0}) for c in group}
        warm, turn = False, 0
        while (left := [c for c in rows if not settled(rows[c], pairs)]) and time.perf_counter() < end:
            if not warm:  # a first run builds plans and finds its memory
                a_round(pipe, made, [c._replace(steps=min(c.steps, 6)) for c in left], turn)
                warm = True
            for cell, (ratio, spent, told) in zip(left, a_round(pipe, made, left, turn), strict=True):
                rows[cell]["ratios"].append(ratio)
                rows[cell]["seconds"] += spent
                rows[cell] |= {"calls": told["calls"], "dense_calls": told["dense_calls"]}
            turn += 1
            write_json(out, {name: value for name, value in found.items() if value["ratios"]})
    return found


def table(found: dict[str, Any], todo: list[Cell]) -> str:
    """Medians, one line a cell, those below the bar marked."""
    lines = []
    for cell in todo:
        ratios = found.get(cell.name, {}).get("ratios")
        if ratios:
            middle = statistics.median(ratios)
            row = found[cell.name]
            lines.append(
                f"{cell.tokens:>6,} {cell.steps:>4}  {cell.method:<28} {middle:6.3f}×  ({min(ratios):.3f} to {max(ratios):.3f},"
                f" {len(ratios)} pairs, {row['dense_calls']}/{row['calls']} calls dense)" + " BELOW" * (middle < BAR)
            )
    return "\n".join(lines)


def ratios(found: dict[str, Any], todo: list[Cell], args: argparse.Namespace) -> list[Ratio]:
    """The median of every cell that has all its pairs."""
    whole = {cell.name: found[cell.name] for cell in todo if settled(found.get(cell.name, {"ratios": []}), args.pairs)}
    return [
        Ratio(f"{name}, {args.threads} threads", statistics.median(row["ratios"]), "of dense")
        for name, row in whole.items()
    ]


def main() -> None:
    """Measure what is missing and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/never_worse.json"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--tokens", default=",".join(map(str, GRIDS)))
    parser.add_argument("--steps", default=",".join(map(str, STEPS)))
    parser.add_argument("--methods", default="", help="those whose names hold one of these words; all by default")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("heart_attention").setLevel(
        logging.ERROR
    )  # calibrations say at every size that they are of another
    pipe = tiny.load()
    pipe.set_progress_bar_config(disable=True)
    names = [n for n in configs(pipe) if any(word in n for word in args.methods.split(","))]
    todo = list(cells([int(n) for n in args.tokens.split(",")], [int(s) for s in args.steps.split(",")], names))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = measure(pipe, todo, args.pairs, args.out, args.seconds)
    print(table(found, todo))
    settle("never_worse", ratios(found, todo, args), args.store)


if __name__ == "__main__":
    main()
