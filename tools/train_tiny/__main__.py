"""Train, export and evaluate the embedded model in one go; ``--smoke`` does all of it at a toy scale."""

import argparse
import json
import logging
import tempfile
from pathlib import Path

import torch

from heart_attention import tiny
from heart_attention.tiny.pipeline import WanPipeline

from . import evaluate, export, plan, train


def smoke() -> dict:
    """Everything end to end in well under two minutes, in a temporary folder: the recipe still works."""
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder) / "run", Path(folder) / "weights"
        trainer = train.run(train.Trainer(plan.SMOKE_PLAN), run, report=4)
        export.export(run, out)
        pipe = WanPipeline.from_pretrained(out)
        pipe.set_progress_bar_config(disable=True)
        call = {**tiny.QUICK, "height": 32, "width": 32, "num_frames": 4, "num_inference_steps": 2}
        prompts = tiny.prompts("heldout")[:2]
        found, clips = evaluate.score(pipe, prompts, prompts, call)
        evaluate.contact_sheet(clips, prompts, Path(folder) / "sheet.png")
        density = evaluate.measure_density(pipe, prompts[:1], call, warmup=0)
        noise = evaluate.noise_psnr(pipe, prompts[0], call)
        return {
            "steps": trainer.step,
            "shape": list(clips[0].shape),
            "rates": found,
            "density": density,
            "noise": noise,
        }


def full(folder: Path, seed: int, threads: int, quick: bool) -> None:
    """The whole recipe; goes on from the folder's checkpoint. Hours on one core."""
    torch.set_num_threads(threads)
    train.run(train.Trainer(plan.PLAN, seed, quick), folder)
    export.export(folder, export.PACKAGE / "weights")
    for part in (["check"], ["controls", "--size", "quick"], ["density", "--stride", "5"], ["timing"]):
        evaluate.main(part)


def main(argv: list[str] | None = None) -> None:
    """Run ``python -m tools.train_tiny [--smoke]``."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="toy scale, nothing is kept")
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"), help="checkpoints and log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="train in bfloat16, see train.py")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if args.smoke:
        print(json.dumps(smoke(), indent=1))
    else:
        full(args.out, args.seed, args.threads, args.quick)


if __name__ == "__main__":
    main()
