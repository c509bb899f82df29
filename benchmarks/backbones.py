"""What temporal mask reuse and calibration do for every backbone on the embedded model.

    python benchmarks/backbones.py --work DIR [--minutes 10] [--parts velocity,video] [--size native|quick]
    python benchmarks/backbones.py --work DIR --table

Every figure is one JSON file in the work folder, so a run goes on where the last one stopped; `--minutes` ends it early,
and the dearest question comes last. Four rows for each backbone: `published` (its authors' settings), `fitted` (settings
that suit 4,096 tokens, the preset of the embedded model), `+tmr` (reuse of masks on top), `+ebc` (a threshold for every
head on top, from `--method isolated`: the paper's objective, one head sparse at a time, estimated by one backward pass a
context instead of probes).

- velocity: the spectral error of the guided velocity, the dense generation's inputs replayed step by step with all state
  that the method keeps; the mean over the sparse steps. Also for random weights, the control.
- video: PSNR against the dense video of the same prompt and seed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import heart_attention as heart
from heart_attention import tiny
from heart_attention.backbones import registry
from heart_attention.calibration.measure import velocity_error
from heart_attention.evaluation.metrics import compare
from heart_attention.evaluation.tables import interval
from heart_attention.files import write_json
from heart_attention.online.reuse import Always
from heart_attention.presets import preset

ROWS = ("fitted", "published", "tmr", "ebc")
ORDER = ("sparge", "svg", "exact", "radial", "lite", "pisa", "ear", "band", "xattention", "svg2")
GUIDANCE = 3.0
DENSE_STEPS = 5  # in every row, as in the paper
CALIBRATION = {"method": "isolated", "contexts": 3, "held_out_contexts": 0}


class Cell(NamedTuple):
    """One figure: what is measured, with which weights, on which backbone and row, for which prompt."""

    part: str
    weights: str  # "trained" or "random"
    prompt: int
    backbone: str
    row: str

    @property
    def name(self) -> str:
        """Its file's."""
        return "-".join(map(str, self))


class Bench:
    """The embedded model with a work folder."""

    def __init__(self, work: Path, size: str, steps: int) -> None:
        self.work = work / f"{size}-{steps}"
        self.call = {**(tiny.QUICK if size == "quick" else tiny.NATIVE), "num_inference_steps": steps}
        self.call["guidance_scale"] = GUIDANCE
        self.pipes: dict[str, Any] = {}

    def pipe(self, weights: str) -> Any:
        """The pipeline with trained or with random weights."""
        if weights not in self.pipes:
            self.pipes[weights] = tiny.load() if weights == "trained" else tiny.load_random()
            self.pipes[weights].set_progress_bar_config(disable=True)
        return self.pipes[weights]

    def path(self, name: str) -> Path:
        """Where a cell's figures lie."""
        return self.work / "cells" / f"{name}.json"

    def generate(self, weights: str, prompt: int) -> np.ndarray:
        """A video of a held-out prompt, uint8 [T, H, W, 3]."""
        text, generator = tiny.prompts("heldout")[prompt], torch.Generator().manual_seed(prompt)
        frames = self.pipe(weights)(text, generator=generator, output_type="np", **self.call).frames[0]
        return (frames * 255).round().astype(np.uint8)

    def reference(self, weights: str, prompt: int) -> dict[str, Any]:
        """The dense video and every forward's inputs and output, made once."""
        path = self.work / f"dense-{weights}-{prompt}.pt"
        if not path.is_file():
            forwards: list[tuple[dict, torch.Tensor]] = []
            keep = lambda _, args, given, out: forwards.append((_plain(given), out[0].clone()))  # noqa: E731
            hook = self.pipe(weights).transformer.register_forward_hook(keep, with_kwargs=True)
            try:
                video = self.generate(weights, prompt)
            finally:
                hook.remove()
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"video": torch.from_numpy(video), "forwards": forwards}, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        return torch.load(path, weights_only=True)

    # ---------------------------------------- rows

    def config(self, cell: Cell) -> Any:
        """The config of a row; every row runs sparse even where dense would be quicker."""
        pipe = self.pipe(cell.weights)
        base = published(cell.backbone) if cell.row == "published" else preset(cell.backbone, pipe)
        if cell.row == "ebc":
            base = base.replace(thresholds=heart.Calibration.load(self.calibrated(cell)))
        return base.replace(
            force_sparse=True, dense_steps=DENSE_STEPS, **({} if cell.row == "tmr" else {"reuse": Always()})
        )

    def calibrated(self, cell: Cell) -> Path:
        """The calibration of a backbone; all of them share the dense trajectories."""
        folder = self.work / "calibrations"
        out = folder / f"{cell.weights}-{cell.backbone}.heart.json"
        if out.is_file():
            return out
        own, shared = folder / f"{cell.weights}-{cell.backbone}", folder / f"trajectories-{cell.weights}"
        for made in (own, shared):
            made.mkdir(parents=True, exist_ok=True)
        if not (own / "trajectories").exists():
            (own / "trajectories").symlink_to(shared.resolve())
        config = preset(cell.backbone, self.pipe(cell.weights))
        heart.calibrate(
            self.pipe(cell.weights), cell.backbone, prompts=tiny.prompts("calibration")[:3], held_out=[],
            call=self.call, out=out, work=own, rest=config.rest, budget=f"shared={config.thresholds!r}", **CALIBRATION,
        )  # fmt: skip
        return out

    # ---------------------------------------- figures

    def measure(self, cell: Cell) -> dict[str, Any]:
        """A cell's figures."""
        began, config = time.process_time(), self.config(cell)
        found = self.velocity(cell, config) if cell.part == "velocity" else self.video(cell, config)
        return {**cell._asdict(), **found, "cpu_s": time.process_time() - began}

    def velocity(self, cell: Cell, config: Any) -> dict[str, Any]:
        """Errors of the guided velocity at each sparse step of the dense generation."""
        pipe, first, errors = self.pipe(cell.weights), DENSE_STEPS, []
        forwards = self.reference(cell.weights, cell.prompt)["forwards"][2 * first :]
        with heart.enabled(pipe, config.replace(dense_steps=0)), torch.no_grad():
            for pair in zip(forwards[::2], forwards[1::2]):
                made = [_forward(pipe.transformer, name, given) for name, (given, _) in zip(("cond", "uncond"), pair)]
                dense = _guided(*(out for _, out in pair))
                errors.append(velocity_error.spectral(_guided(*made), dense))
            stats = heart.stats(pipe).to_dict()
        return {"error": float(np.mean(errors)), "errors": errors, **_figures(stats)}

    def video(self, cell: Cell, config: Any) -> dict[str, Any]:
        """PSNR of a free generation against the dense video."""
        pipe, dense = self.pipe(cell.weights), self.reference(cell.weights, cell.prompt)["video"].numpy()
        with heart.enabled(pipe, config):
            made = self.generate(cell.weights, cell.prompt)
            stats = heart.stats(pipe).to_dict()
        return {**compare(made, dense, ["psnr"]), **_figures(stats)}


def published(name: str) -> Any:
    """A backbone with its authors' settings; cluster counts are fitted to the tokens, as theirs are to 32,760."""
    cls = registry.find(name)
    return heart.HeartConfig(name, cls.default_threshold, rest=cls.default_rest, scale_clusters=True)


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if torch.is_tensor(v) else v for k, v in given.items() if k != "return_dict"}


def _forward(transformer: Any, name: str, given: dict[str, Any]) -> torch.Tensor:
    with transformer.cache_context(name):
        return transformer(**given, return_dict=False)[0]


def _guided(cond: torch.Tensor, uncond: torch.Tensor) -> torch.Tensor:
    return uncond + GUIDANCE * (cond - uncond)


def _figures(stats: dict[str, Any]) -> dict[str, Any]:
    names = ("density", "cost", "refresh_rate", "time", "kernels", "fallbacks")
    return {name: stats[name] for name in names}


# ---------------------------------------- which cells


def cells(parts: list[str], prompts: int) -> Iterator[Cell]:
    """All cells, the most telling first; one that was measured is passed over, so some are named twice."""
    rows = ("fitted", "tmr", "ebc")
    if "velocity" in parts:
        yield from (Cell("velocity", "trained", 0, name, row) for row in ROWS for name in ORDER)
        yield from (Cell("velocity", "random", 0, name, row) for row in ("fitted", "tmr") for name in ORDER)
    if "video" in parts:
        yield from (Cell("video", "trained", 0, name, row) for name in ORDER[:5] for row in rows)
    if "velocity" in parts:
        yield from (Cell("velocity", "random", 0, name, row) for row in ("ebc", "published") for name in ORDER)
    if "video" in parts:
        yield from (Cell("video", "trained", p, name, row) for p in range(prompts) for name in ORDER for row in rows)


def run(bench: Bench, wanted: Iterator[Cell], minutes: float, only: list[str]) -> None:
    """Measure what is missing, until the time is over."""
    end = time.monotonic() + 60 * minutes
    for cell in wanted:
        if bench.path(cell.name).is_file() or (only and cell.backbone not in only):
            continue
        if time.monotonic() > end:
            print(f"time is over before {cell.name}: call it again")
            return
        found = bench.measure(cell)
        write_json(bench.path(cell.name), found)
        shown = {k: found[k] for k in ("error", "psnr", "density", "refresh_rate", "cpu_s") if k in found}
        print(cell.name, json.dumps(shown), flush=True)


# ---------------------------------------- tables


HEADINGS = (
    "backbone", "published: density, error", "fitted: density, error", "+tmr: refreshed, error", "+ebc: density, error",
    "random weights: fitted, +tmr, +ebc", "PSNR dB (prompts)", "+tmr dB", "+ebc dB",
    "+tmr: prediction time",
)  # fmt: skip


def table(bench: Bench) -> str:
    """What was measured, as Markdown: one line for each backbone."""
    found = {}
    for path in sorted((bench.work / "cells").glob("*.json")):
        cell = json.loads(path.read_text())
        found[cell["part"], cell["weights"], cell["backbone"], cell["row"], cell["prompt"]] = cell
    lines = [HEADINGS, ("---", *("---:",) * (len(HEADINGS) - 1)), *(_line(found, name) for name in ORDER)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(found: dict[tuple, dict], name: str) -> list[str]:
    def velocity(row: str, weights: str = "trained") -> dict[str, Any]:
        return found.get(("velocity", weights, name, row, 0), {})

    measured = [
        ", ".join([_text(velocity(row).get(first), ".2f"), _text(velocity(row).get("error"), ".1e")])
        for row, first in (("published", "density"), ("fitted", "density"), ("tmr", "refresh_rate"), ("ebc", "density"))
    ]
    control = ", ".join(_text(velocity(row, "random").get("error"), ".1e") for row in ("fitted", "tmr", "ebc"))
    psnr = {row: {k[4]: c["psnr"] for k, c in found.items() if k[:1] + k[2:4] == ("video", name, row)} for row in ROWS}
    base = psnr["fitted"]
    gains = [_interval([x - base[p] for p, x in psnr[row].items() if p in base]) for row in ("tmr", "ebc")]
    whole = f"{np.mean(list(base.values())):.1f} ({len(base)})" if base else "–"
    return [f"`{name}`", *measured, control, whole, *gains, _prediction(found, name)]


def _prediction(found: dict[tuple, dict], name: str) -> str:
    """Time of drift, prediction and planning with reuse over that without, the median over prompts."""
    spent = {
        row: {k[4]: sum(c["time"][part] for part in ("drift", "prediction", "planning")) for k, c in found.items()
              if k[:1] + k[2:4] == ("video", name, row)}
        for row in ("fitted", "tmr")
    }  # fmt: skip
    ratios = [spent["tmr"][p] / spent["fitted"][p] for p in spent["fitted"] if p in spent["tmr"]]
    return f"{np.median(ratios):.2f}" if ratios else "–"


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _interval(gains: list[float]) -> str:
    """Mean of paired differences, with its 95 % interval where there are several."""
    if len(gains) < 2:
        return f"{gains[0]:+.2f}" if gains else "–"
    mean, half = interval(gains)
    return f"{mean:+.2f} ± {half:.2f}"


def main() -> None:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of all figures, videos and calibrations")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no new figure after so long")
    parser.add_argument("--parts", default="velocity,video")
    parser.add_argument("--size", choices=("native", "quick"), default="native")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--only", default="", help="these backbones alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print what was measured")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = Bench(args.work, args.size, args.steps)
    if args.table:
        print(table(bench))
        return
    run(bench, cells(args.parts.split(","), args.prompts), args.minutes, [x for x in args.only.split(",") if x])


if __name__ == "__main__":
    main()
