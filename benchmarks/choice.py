"""What choosing among backbones gains over the best single one: held-out velocity error at equal budgets of time.

    python benchmarks/choice.py --work DIR [--budgets 0.2,0.3] [--phases 4] [--contexts 8] [--steps 50] [--rounds 1]

Each set of points is calibrated jointly by itself on the same contexts of the embedded model, under the same budget (a share
of a whole generation's dense attention, dense steps included), and verified on held-out contexts with all heads sparse. Every
calibration is a work folder in DIR, so that a stopped run goes on; dense trajectories are shared.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

import heart_attention as heart
from heart_attention import tiny
from heart_attention.calibration.workflow.defaults import default_points
from ratios import Ratio, add_arguments, settle

SETS = {"all points": ("svg2", "xattention", "band"), "clusters": ("svg2",), "blocks": ("xattention",)}


def share(work: Path, folder: Path) -> None:
    """Link the dense trajectories that other calibrations of this benchmark have recorded."""
    if not (folder / "plan.json").exists():
        (folder / "trajectories").mkdir(parents=True, exist_ok=True)
        for path in work.glob("*/trajectories/*"):
            if not (folder / "trajectories" / path.name).exists():
                os.link(path, folder / "trajectories" / path.name)


def calibrated(pipe: Any, name: str, budget: float, args: argparse.Namespace) -> dict[str, float] | None:
    """Held-out errors of one set of points under a budget, None where no assignment is that quick."""
    work = Path(args.work)
    folder = work / f"{name} {budget:g}"
    share(work, folder)
    points = tuple(point for point in default_points(pipe) if point.backbone.name in SETS[name])
    try:
        made = heart.calibrate(
            pipe, prompts=tiny.prompts("calibration")[: args.prompts], held_out=tiny.prompts("heldout")[: args.held_out],
            call={**tiny.NATIVE, "num_inference_steps": args.steps}, work=folder, points=points, scale_clusters=True,
            phases=args.phases, budget=f"time={budget}", contexts=args.contexts, held_out_contexts=args.contexts,
            rounds=args.rounds, progress=lambda stage, done, total, left: print(f"\r{stage}: {done}/{total}", end=" "),
        )  # fmt: skip
    except heart.HeartError as error:
        print(f"\n{name}, time {budget:g}: {error}")
        return None
    held = made.verification["held_out"]
    return {"error": held["chosen"]["error"], "cost": held["chosen"]["cost"], "shared": held["shared"]["error"]}


def main() -> None:
    """Calibrate every set at every budget and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", default="runs/choice", help="folder of the calibrations")
    parser.add_argument("--sets", default="all points,clusters", help=f"of {', '.join(SETS)}")
    parser.add_argument("--budgets", default="0.2,0.3", help="shares of a generation's dense attention time")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--held-out", type=int, default=4)
    for name, value in (("phases", 4), ("contexts", 8), ("steps", 50), ("rounds", 1), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pipe = tiny.load()
    pipe.set_progress_bar_config(disable=True)
    budgets, sets = [float(b) for b in args.budgets.split(",")], args.sets.split(",")
    rows, told = [], []
    for budget in budgets:
        found = {name: calibrated(pipe, name, budget, args) for name in sets}
        single = [row["error"] for name, row in found.items() if row and name != "all points"]
        for name, row in found.items():
            if row and single and name == "all points":
                told.append(
                    Ratio(f"{name} at time {budget:g}", row["error"] / min(single), "of the best single", False)
                )
            if row:
                over = f"{row['error'] / min(single):.2f}" if single and name == "all points" else ""
                rows.append(
                    f"{budget:>6.2f}  {name:<12}{row['cost']:>7.3f}{row['error']:>11.5f}{row['shared']:>14.5f}{over:>12}"
                )
    print(f"\n{'time':>6}  {'points':<12}{'cost':>7}{'held out':>11}{'shared 0.9':>16}{'over single':>12}")
    print("\n".join(rows))
    settle("choice", told, args.store)


if __name__ == "__main__":
    main()
