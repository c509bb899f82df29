"""A few-step student of the embedded model: one of its steps, without guidance, does what two guided ones of the teacher do.

    python -m tools.train_tiny.student --out runs/student            # goes on where it stopped
    python -m tools.train_tiny.student --out runs/student --check    # how near it is to its teacher, on new clips
    python -m tools.train_tiny.student --out runs/student --export   # into the package

Progressive distillation with guidance: from a noisy clip the teacher takes two guided Euler steps of half the student's
length; the student learns the velocity that goes there at once. Step lengths are those of 8 and of 4 steps. A training
step is a pure function of (seed, number).
"""

import argparse
import csv
import json
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from heart_attention import tiny

from . import attention, data, model
from .export import PACKAGE

log = logging.getLogger("student")

GUIDANCE = 3.0
EMA = 0.97
GRIDS = (4, 8)  # steps of a generation
TEXT_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """How many steps, how fast, and on which canvases (clips, frames, height and width in tokens), each with its share."""

    steps: int = 800
    lr: tuple[float, float] = (2e-4, 2e-5)  # falls linearly
    mix: tuple[tuple[float, tuple[int, int, int, int]], ...] = (
        (0.8, (2, 4, 12, 12)),
        (0.16, (1, 8, 12, 12)),
        (0.04, (1, 16, 16, 16)),
    )


def noise_levels(count: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where steps of 4 or 8 begin, have their middle and end: σ [count] each, on the grids that sampling uses."""
    grid = torch.tensor(GRIDS)[torch.randint(len(GRIDS), (count,), generator=rng)]
    place = (torch.rand(count, generator=rng) * grid).floor()
    u = torch.stack([1 - (place + part) / grid for part in (0.0, 0.5, 1.0)])
    return tuple(model.FLOW_SHIFT * u / (1 + (model.FLOW_SHIFT - 1) * u))


@dataclass
class Lesson:
    """Noisy latents with captions, and the velocity that goes where the teacher goes."""

    noisy: torch.Tensor  # [B, Z, T, H, W]
    sigma: torch.Tensor  # [B]
    text: torch.Tensor  # [B, tokens, TEXT_DIM]
    velocity: torch.Tensor  # as noisy


class Teacher:
    """The packaged model, with guidance."""

    def __init__(self, seed: int, quick: bool = False):
        self.pipe, self.seed = tiny.load(), seed
        if quick:
            attention.quicken(self.pipe.transformer)
        self.codec = model.fit_codec()
        self.empty = self._text([""])

    @torch.no_grad()
    def _text(self, captions: list[str]) -> torch.Tensor:
        return self.pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS)[0]

    def _guided(self, x: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        both = torch.cat([text, self.empty.expand_as(text)])
        said, unsaid = self.pipe.transformer(x.repeat(2, 1, 1, 1, 1), 1000 * sigma.repeat(2), both)[0].chunk(2)
        return unsaid + GUIDANCE * (said - unsaid)

    @torch.no_grad()
    def lesson(self, step: int, canvas: tuple[int, int, int, int], rng: torch.Generator) -> Lesson:
        """Clips of this step with noise, and the mean velocity of two guided steps from there."""
        b, t, h, w = canvas
        clips = data.batch(self.seed + 5, step, b, t, (8 * h, 8 * w))
        x = model.encode(clips.video, self.codec)
        begin, middle, end = noise_levels(b, rng)
        first, half, last = (s.view(-1, 1, 1, 1, 1) for s in (begin, middle, end))
        noisy = (1 - first) * x + first * torch.randn(x.shape, generator=rng)
        text = self._text(clips.captions)
        there = noisy + (half - first) * self._guided(noisy, begin, text)
        there = there + (last - half) * self._guided(there, middle, text)
        return Lesson(noisy, begin, text, (noisy - there) / (first - last))


class Student:
    """The student's transformer, its optimiser, averaged weights and the step that changes them."""

    def __init__(self, teacher: Teacher, plan: Plan, seed: int = 0, quick: bool = False):
        self.teacher, self.plan, self.seed, self.step = teacher, plan, seed, 0
        self.transformer = tiny.load().transformer.train()
        if quick:
            attention.quicken(self.transformer)
        self.weights = dict(self.transformer.named_parameters())
        self.ema = {n: p.detach().clone() for n, p in self.weights.items()}
        self.optimiser = torch.optim.AdamW(self.weights.values(), lr=plan.lr[0], betas=(0.9, 0.98), weight_decay=0.0)
        weight = model.latent_scale().view(1, -1, 1, 1, 1)
        self.weight = weight / weight.mean()

    def loss(self, lesson: Lesson) -> torch.Tensor:
        """How far the student's velocity is off the teacher's, colour counting most."""
        velocity = self.transformer(lesson.noisy, 1000 * lesson.sigma, lesson.text, return_dict=False)[0]
        return (self.weight * (velocity - lesson.velocity).square()).mean()

    def train_step(self) -> float:
        """Advance by one step; returns the loss."""
        rng = torch.Generator().manual_seed((self.seed + 1) * 11_000_027 + self.step)
        shares = torch.tensor([share for share, _ in self.plan.mix])
        canvas = self.plan.mix[int(torch.multinomial(shares, 1, generator=rng))][1]
        loss = self.loss(self.teacher.lesson(self.step, canvas, rng))
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        done, (start, end) = self.step / self.plan.steps, self.plan.lr
        self.optimiser.param_groups[0]["lr"] = min(1, (1 + self.step) / 10) * (start + done * (end - start))
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
        self.use(state["weights"])
        self.optimiser.load_state_dict(state["optimiser"])

    @torch.no_grad()
    def use(self, weights: dict[str, torch.Tensor]) -> None:
        """Take these weights."""
        for name, p in self.weights.items():
            p.copy_(weights[name])


def _save(student: Student, folder: Path) -> None:
    part = folder / "checkpoint.part"
    torch.save(student.state(), part)
    os.replace(part, folder / "checkpoint.pt")


def run(student: Student, folder: Path, seconds: float = math.inf, every: float = 120.0, report: int = 10) -> None:
    """Train to the end of the plan, or for so many seconds of CPU time, from the folder's checkpoint if there is one."""
    if (folder / "checkpoint.pt").exists():
        student.restore(torch.load(folder / "checkpoint.pt", weights_only=True))
        log.info("going on from step %d", student.step)
    losses: list[float] = []
    saved = time.monotonic()
    while student.step < student.plan.steps and time.process_time() < seconds:
        losses.append(student.train_step())
        if student.step % report == 0:
            mean = sum(losses) / len(losses)
            log.info("step %d loss %.5f cpu %.0f s", student.step, mean, time.process_time())
            with (folder / "log.csv").open("a", newline="") as file:
                csv.writer(file).writerow([student.step, mean, round(time.process_time(), 1)])
            losses = []
        if time.monotonic() - saved > every:
            _save(student, folder)
            saved = time.monotonic()
    _save(student, folder)


@torch.no_grad()
def check(student: Student, folder: Path, lessons: int = 12) -> dict[str, float]:
    """Loss on new clips: of the teacher without guidance, which is where the student began, and of its averaged weights."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    drawn = [
        student.teacher.lesson(1_000_000 + i, (2, 4, 12, 12), torch.Generator().manual_seed(77 + i))
        for i in range(lessons)
    ]
    begin = sum(student.loss(lesson).item() for lesson in drawn) / lessons
    student.use(state["ema"])
    end = sum(student.loss(lesson).item() for lesson in drawn) / lessons
    return {"step": state["step"], "teacher_without_guidance": begin, "student": end}


def export(folder: Path, out: Path) -> Path:
    """Write the averaged weights of ``folder/checkpoint.pt`` in half precision, with the text encoder they were taught with."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    pipe = tiny.load()
    pipe.transformer.load_state_dict(state["ema"])
    pipe.transformer.half().save_pretrained(out / "transformer")
    pipe.text_encoder.half().save_pretrained(out / "text_encoder")
    config = out / "transformer" / "config.json"
    settings = json.loads(config.read_text())
    settings.pop("_name_or_path", None)  # where the teacher lay on this machine
    config.write_text(json.dumps(settings, indent=2) + "\n")
    return out


def main(argv: list[str] | None = None) -> None:
    """Train, check, or write the checkpoint into the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/student"), help="log and checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many seconds of CPU time")
    parser.add_argument("--quick", action="store_true", help="bfloat16, see train.py")
    parser.add_argument("--check", action="store_true", help="only measure how near the checkpoint is to the teacher")
    parser.add_argument("--export", action="store_true", help="only write the checkpoint into the package")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    if args.export:
        log.info("written: %s", export(args.out, PACKAGE / "student"))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    student = Student(Teacher(args.seed, args.quick), Plan(), args.seed, args.quick)
    if args.check:
        log.info("%s", check(student, args.out))
    else:
        run(student, args.out, args.seconds)


if __name__ == "__main__":
    main()
