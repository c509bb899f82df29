"""A few-step student of the embedded model: the packaged weights taught to go straight, without guidance.

    python -m tools.train_tiny.student --out runs/student            # goes on where it stopped
    python -m tools.train_tiny.student --out runs/student --export   # into the package

The teacher makes pairs of noise and the clip that its guided sampling leads to. The student learns, at every noise
level on the straight line between the two, the velocity of that line (rectified flow). So one weight serves 4 steps, 8
and any other number, and guidance is in the weights. Pair and training step are pure functions of (seed, number).
"""

import argparse
import csv
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from heart_attention import tiny
from heart_attention.tiny import scene

from . import data, model
from .export import PACKAGE

log = logging.getLogger("student")

TEACHER_STEPS = 10
GUIDANCE = 3.0
EMA = 0.99
STEPS = (4, 8)  # numbers of steps whose noise levels are met more often than others


@dataclass(frozen=True)
class Plan:
    """How many pairs and steps, at which sizes, how fast."""

    pairs: int = 52
    first: int = 12  # pairs before the first step; one more for every `every` steps
    every: int = 8
    steps: int = 320
    lr: tuple[float, float] = (3e-4, 3e-5)  # falls linearly
    sizes: tuple[str, ...] = ("brief", "brief", "brief", "quick") * 2 + ("brief", "brief", "brief", "native")  # in turn


SIZES = {"brief": {**tiny.QUICK, "num_frames": 4}, "quick": tiny.QUICK, "native": tiny.NATIVE}
BATCH = {"brief": 4, "quick": 2, "native": 1}  # pairs a step


def size_of(pair: int, plan: Plan) -> str:
    """Which size a pair has."""
    return plan.sizes[pair % len(plan.sizes)]


@torch.no_grad()
def make_pair(teacher, pair: int, seed: int, size: str, steps: int = TEACHER_STEPS) -> dict[str, torch.Tensor]:
    """Noise and the latents of the clip that the teacher's guided sampling makes of it, with the prompt's embedding."""
    rng = torch.Generator().manual_seed((seed + 1) * 9_000_011 + pair)
    combo = data.TRAIN[int(torch.randint(len(data.TRAIN), (), generator=rng))]
    words = [int(torch.randint(n, (), generator=rng)) for n in (len(scene.TEMPLATES), len(scene.VERBS))]
    call = {**SIZES[size], "num_inference_steps": steps, "guidance_scale": GUIDANCE}
    t, h, w = call["num_frames"], call["height"] // model.PATCH, call["width"] // model.PATCH
    noise = torch.randn(1, model.Z_DIM, t, h, w, generator=rng)
    text, empty = teacher.encode_prompt(scene.caption(combo, *words), max_sequence_length=call["max_sequence_length"])
    clip = teacher(prompt_embeds=text, negative_prompt_embeds=empty, latents=noise, output_type="latent", **call).frames
    return {"noise": noise[0], "clip": clip[0].contiguous(), "text": text[0].contiguous()}


class Pairs:
    """Pairs on disk, each made when it is first asked for."""

    def __init__(self, folder: Path, seed: int, plan: Plan):
        self.folder, self.seed, self.plan = folder / "pairs", seed, plan
        self.folder.mkdir(parents=True, exist_ok=True)
        self.teacher = tiny.load()
        self.held: dict[int, dict[str, torch.Tensor]] = {}

    def get(self, pair: int) -> dict[str, torch.Tensor]:
        """The pair of this number."""
        if pair not in self.held:
            path = self.folder / f"{pair:05d}.safetensors"
            if not path.exists():
                part = path.with_suffix(".part")
                save_file(make_pair(self.teacher, pair, self.seed, size_of(pair, self.plan)), part)
                os.replace(part, path)
            self.held[pair] = load_file(path)
        return self.held[pair]


def noise_levels(count: int, rng: torch.Generator) -> torch.Tensor:
    """Noise levels [count]: half of them those that 4 and 8 steps start from, half anywhere, shifted as in sampling."""
    u = torch.rand(count, generator=rng)
    grid = STEPS[int(torch.randint(len(STEPS), (), generator=rng))]
    on_grid = torch.rand(count, generator=rng) < 0.5
    u = torch.where(on_grid, (u * grid).floor().add(1) / grid, u)
    return model.FLOW_SHIFT * u / (1 + (model.FLOW_SHIFT - 1) * u)


class Student:
    """The student's transformer, its optimiser, averaged weights and the step that changes them."""

    def __init__(self, pairs: Pairs, plan: Plan, seed: int = 0):
        self.pairs, self.plan, self.seed, self.step = pairs, plan, seed, 0
        self.transformer = tiny.load().transformer.train()
        self.weights = dict(self.transformer.named_parameters())
        self.ema = {n: p.detach().clone() for n, p in self.weights.items()}
        self.optimiser = torch.optim.AdamW(self.weights.values(), lr=plan.lr[0], betas=(0.9, 0.98), weight_decay=0.0)
        weight = model.latent_scale().view(1, -1, 1, 1, 1)
        self.weight = weight / weight.mean()

    def _batch(self, rng: torch.Generator) -> list[dict[str, torch.Tensor]]:
        """Pairs of one size, out of those that are there by now."""
        there = min(self.plan.pairs, self.plan.first + self.step // self.plan.every)
        size = size_of(int(torch.randint(there, (), generator=rng)), self.plan)
        alike = [i for i in range(there) if size_of(i, self.plan) == size]
        picks = torch.randint(len(alike), (BATCH[size],), generator=rng).tolist()
        return [self.pairs.get(alike[i]) for i in picks]

    def loss(self, rng: torch.Generator) -> torch.Tensor:
        """How far the student's velocity is off the straight line from clip to noise."""
        chosen = self._batch(rng)
        noise, clip, text = (torch.stack([p[k] for p in chosen]) for k in ("noise", "clip", "text"))
        sigma = noise_levels(len(chosen), rng)
        s = sigma.view(-1, 1, 1, 1, 1)
        velocity = self.transformer((1 - s) * clip + s * noise, 1000 * sigma, text, return_dict=False)[0]
        return (self.weight * (velocity - (noise - clip)).square()).mean()

    def train_step(self) -> float:
        """Advance by one step; returns the loss."""
        rng = torch.Generator().manual_seed((self.seed + 1) * 11_000_027 + self.step)
        loss = self.loss(rng)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        done, (start, end) = self.step / self.plan.steps, self.plan.lr
        self.optimiser.param_groups[0]["lr"] = min(1, (1 + self.step) / 20) * (start + done * (end - start))
        self.optimiser.step()
        keep = min(EMA, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.values()), list(self.weights.values()), 1 - keep)
        self.step += 1
        return loss.item()

    def state(self) -> dict:
        """Everything needed to go on."""
        weights = {n: p.detach() for n, p in self.weights.items()}
        optimiser = self.optimiser.state_dict()
        return {"step": self.step, "seed": self.seed, "weights": weights, "ema": self.ema, "optimiser": optimiser}

    @torch.no_grad()
    def restore(self, state: dict) -> None:
        """Go on from a state."""
        if state["seed"] != self.seed:
            raise ValueError(f"checkpoint was made with seed {state['seed']}, not {self.seed}")
        self.step, self.ema = state["step"], state["ema"]
        for name, p in self.weights.items():
            p.copy_(state["weights"][name])
        self.optimiser.load_state_dict(state["optimiser"])


def run(student: Student, folder: Path, every: float = 120.0, report: int = 25) -> None:
    """Train to the end of the plan, from the folder's checkpoint where there is one."""
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        student.restore(torch.load(checkpoint, weights_only=True))
        log.info("going on from step %d", student.step)
    losses: list[float] = []
    saved = time.monotonic()
    while student.step < student.plan.steps:
        losses.append(student.train_step())
        if student.step % report == 0:
            log.info("step %d loss %.4f cpu %.0f s", student.step, sum(losses) / len(losses), time.process_time())
            with (folder / "log.csv").open("a", newline="") as file:
                csv.writer(file).writerow([student.step, sum(losses) / len(losses), round(time.process_time(), 1)])
            losses = []
        if time.monotonic() - saved > every or student.step == student.plan.steps:
            part = checkpoint.with_suffix(".part")
            torch.save(student.state(), part)
            os.replace(part, checkpoint)
            saved = time.monotonic()


def export(folder: Path, out: Path) -> Path:
    """Write the averaged weights of ``folder/checkpoint.pt`` in half precision, with the text encoder they were taught with."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    pipe = tiny.load()
    pipe.transformer.load_state_dict(state["ema"])
    pipe.transformer.half().save_pretrained(out / "transformer")
    pipe.text_encoder.half().save_pretrained(out / "text_encoder")
    return out


def main(argv: list[str] | None = None) -> None:
    """Train, or write the checkpoint into the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/student"), help="pairs, log and checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--export", action="store_true", help="write the checkpoint into the package instead of training"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    if args.export:
        log.info("written: %s", export(args.out, PACKAGE / "student"))
        return
    plan = Plan()
    args.out.mkdir(parents=True, exist_ok=True)
    run(Student(Pairs(args.out, args.seed, plan), plan, args.seed), args.out)


if __name__ == "__main__":
    main()
