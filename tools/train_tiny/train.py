"""Flow-matching training on one or two CPU cores, with checkpoints and exact resume.

A step is a pure function of (seed, step, state): which canvas, which clips, which noise. Stopped and started
again, training goes on as if it had not stopped.
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
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch.nn import functional

from heart_attention.tiny import scene

from . import data, model, words
from .muon import Muon

log = logging.getLogger("train_tiny")

Canvas = tuple[int, int, int, int]  # clips in the batch, then tokens in time, height, width (8 x 8 pixels each)


@dataclass(frozen=True)
class Phase:
    """A stretch of training: up to which step, the learning rate from its begin to its end, canvases with weights."""

    until: int
    lr: tuple[float, float]
    mix: tuple[tuple[float, Canvas], ...]
    world: data.World = data.LIT
    shifts: tuple[float, ...] = (model.FLOW_SHIFT,)  # of the noise levels, sample by sample in turn
    teach: words.Lesson | None = None  # before it begins
    focus: float = 0.0  # how much more the loss near the object counts, at no noise


# Small canvases teach what things look like; long and wide ones teach the rotary positions that small canvases
# never reach, at a fraction of the cost of the native size, which only comes at the end.
SMALL, CUBE, LONG, WIDE = (8, 4, 8, 8), (4, 8, 8, 8), (2, 16, 8, 8), (2, 4, 16, 16)
SIX, MIDDLE, ROW, FIELD, LARGE = (4, 6, 10, 10), (2, 8, 12, 12), (2, 12, 8, 8), (1, 4, 20, 20), (1, 12, 20, 20)
NATIVE = (1, 16, 16, 16)
DECAY_MIX = ((0.1, SMALL), (0.35, SIX), (0.35, MIDDLE), (0.08, FIELD), (0.12, LARGE))
TEN, SIXTEEN = (8, 4, 10, 10), (2, 8, 16, 16)
HIGH_NOISE = (model.FLOW_SHIFT, 9.0)  # what moves where is decided early in sampling
MIDDLE_NOISE = (model.FLOW_SHIFT, 1.3)
ALL_NOISE = (model.FLOW_SHIFT, 1.3, 9.0)
LIT_MIX = ((0.15, SMALL), (0.1, CUBE), (0.4, SIX), (0.35, MIDDLE))
GROWN_MIX = ((0.2, SMALL), (0.15, CUBE), (0.3, SIX), (0.3, MIDDLE), (0.05, FIELD))
LAST_MIX = ((0.2, SMALL), (0.2, CUBE), (0.25, SIX), (0.27, MIDDLE), (0.08, NATIVE))
# The first 3,600 steps knew slow shapes without afterglow: colours were learned there, directions were not.
PLAN = (
    Phase(100, (0.0, 3e-3), ((1.0, SMALL),), data.SLOW),
    Phase(2500, (3e-3, 3e-3), ((0.74, SMALL), (0.14, CUBE), (0.06, LONG), (0.06, WIDE)), data.SLOW),
    Phase(3600, (3e-3, 2.5e-3), ((0.3, SMALL), (0.4, CUBE), (0.12, LONG), (0.08, WIDE), (0.1, MIDDLE)), data.SLOW),
    Phase(4500, (2.5e-3, 2.2e-3), ((0.55, SMALL), (0.25, MIDDLE), (0.1, ROW), (0.1, FIELD)), data.FAST),
    Phase(4690, (2.2e-3, 1.98e-3), ((0.3, SMALL), (0.46, MIDDLE), (0.1, ROW), (0.1, FIELD), (0.04, LARGE)), data.FAST),
    Phase(5123, (1.84e-3, 1.01e-3), DECAY_MIX, data.CENTRED),
    # Grounds that move with the shape taught shapes, but no directions either.
    Phase(7195, (2e-3, 2e-3), ((0.6, SMALL), (0.25, MIDDLE), (0.1, CUBE), (0.05, FIELD)), data.BELT, HIGH_NOISE),
    Phase(7835, (2.5e-3, 2.5e-3), ((0.85, TEN), (0.15, SIXTEEN)), data.FAST_BELT, HIGH_NOISE),
    Phase(7892, (2.5e-3, 2.5e-3), ((0.85, TEN), (0.15, SIXTEEN)), data.COARSE_BELT, (1.3,)),
    Phase(8642, (2.5e-3, 2.5e-3), ((0.95, SMALL), (0.05, MIDDLE)), data.COARSE_BELT, (1.3,)),
    # Sharp heads and a clean ground.
    Phase(
        10400, (2.5e-3, 2.5e-3), ((0.5, SMALL), (0.3, CUBE), (0.17, MIDDLE), (0.03, FIELD)), data.STILL, MIDDLE_NOISE
    ),
    Phase(11200, (2.5e-3, 1e-4), ((0.35, SMALL), (0.3, CUBE), (0.25, MIDDLE), (0.1, LARGE)), data.STILL, MIDDLE_NOISE),
    # Light, by which every token knows where and when it is; then the words that had not been heard so far.
    Phase(11920, (2.5e-3, 2.5e-3), ((0.45, SMALL), (0.25, CUBE), (0.15, SIX), (0.15, MIDDLE)), data.LIT_SHORT),
    Phase(12238, (2.5e-3, 2.5e-3), LIT_MIX, data.LIT_WIDE),
    Phase(12659, (2.5e-3, 2.5e-3), LIT_MIX, data.LIT_NARROW, HIGH_NOISE),
    Phase(12950, (2.5e-3, 2.5e-3), LIT_MIX, data.LIT, HIGH_NOISE, teach=words.Lesson(tuple(scene.MOTIONS))),
    Phase(14150, (2.5e-3, 2.5e-3), GROWN_MIX, data.LIT, ALL_NOISE),
    Phase(14750, (2.5e-3, 1e-4), LAST_MIX, data.LIT, ALL_NOISE),
)
# From the packaged weights, deepened (grow.py): larger shapes on a calmer ground, at and near the native size.
HALF, BRIEF = (1, 8, 16, 16), (4, 4, 12, 12)
NATIVE_MIX = ((0.3, WIDE), (0.3, MIDDLE), (0.2, HALF), (0.2, NATIVE))
BROAD_MIX = ((0.35, BRIEF), (0.25, WIDE), (0.2, MIDDLE), (0.12, HALF), (0.08, NATIVE))
SHAPE_LESSON = words.Lesson(scene.SHAPES, MIDDLE_NOISE, BRIEF, focus=5.0)
DEEP_PLAN = (
    *PLAN,
    Phase(14800, (0.0, 1.5e-3), NATIVE_MIX, data.CALM, MIDDLE_NOISE, focus=5.0),
    Phase(14900, (1.5e-3, 1.5e-3), NATIVE_MIX, data.CALM, MIDDLE_NOISE, focus=5.0),
    Phase(15100, (1.5e-3, 1.5e-3), BROAD_MIX, data.CALM, MIDDLE_NOISE, focus=5.0),
    # Circle, square and ring had one embedding between them.
    Phase(17000, (1.5e-3, 1.5e-3), BROAD_MIX, data.CALM, MIDDLE_NOISE, SHAPE_LESSON, focus=5.0),
    Phase(18000, (1.5e-3, 1e-4), NATIVE_MIX, data.CALM, MIDDLE_NOISE, focus=5.0),
)
PLANS = {"shipped": (PLAN, 6), "deep": (DEEP_PLAN, 9)}  # with the number of layers
TINY_CANVAS = (2, 4, 4, 4)
SMOKE_PLAN = (Phase(4, (0.0, 1e-3), ((1.0, TINY_CANVAS),)), Phase(12, (1e-3, 1e-4), ((1.0, TINY_CANVAS),)))

CAPTION_DROPOUT = 0.1
EMA = 0.998
GAIN_LR = 4.0  # QK-norm gains learn faster, so that attention can become as sharp as it wants to be
TEXT_LENGTHS = (64, 512)  # prompt lengths the pipeline may pad to


def phase_at(plan: tuple[Phase, ...], step: int) -> tuple[Phase, float, float]:
    """The phase a step belongs to, the learning rate there, and how much of the phase is over (0 at its begin)."""
    begin = 0
    for phase in plan:
        if step < phase.until:
            part = (step - begin) / (phase.until - begin)
            return phase, phase.lr[0] + part * (phase.lr[1] - phase.lr[0]), part
        begin = phase.until
    raise ValueError(f"step {step} lies beyond the plan, which ends at {begin}")


class PaddedTextAttention(WanAttnProcessor):
    """Cross-attention to a few text positions that equals cross-attention to the pipeline's 64 or 512.

    The pipeline pads prompt embeddings with zeros, all of which give one and the same key: n of them weigh as one
    with log(n) added to its logit. So training can do without computing them.
    """

    bias: torch.Tensor | None = None  # [B, 1, 1, CAPTION_TOKENS]

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        return super().__call__(attn, hidden_states, encoder_hidden_states, self.bias, rotary_emb)


def padding_bias(lengths: torch.Tensor, total: int, window: int) -> torch.Tensor:
    """Logit bias [B, 1, 1, window] that lets the window's padding stand for padding up to `total` positions."""
    pads = torch.log((total - lengths) / (window - lengths))  # [B]
    is_pad = torch.arange(window)[None] >= lengths[:, None]
    return torch.where(is_pad, pads[:, None], 0.0)[:, None, None]


class Trainer:
    """Model, optimisers, averaged weights and the step that changes them."""

    def __init__(self, plan: tuple[Phase, ...] = PLAN, seed: int = 0, layers: int = model.LAYERS):
        self.plan, self.seed, self.step = plan, seed, 0
        self.transformer, self.text_encoder, self.tokenizer = model.initialise(seed, layers)
        self.codec = model.fit_codec(seed)
        self.cross = PaddedTextAttention()
        for block in self.transformer.blocks:
            block.attn2.set_processor(self.cross)
        self.named = [(f"transformer.{n}", p) for n, p in self.transformer.named_parameters()]
        self.named += [(f"text_encoder.{n}", p) for n, p in self.text_encoder.named_parameters()]
        self.ema = {n: p.detach().clone() for n, p in self.named}
        self.optimisers = self._optimisers()
        # Colour counts for more than the faint edge components, most of which is noise at any level.
        weight = model.latent_scale(seed).view(1, -1, 1, 1, 1)
        self.weight = weight / weight.mean()

    def _optimisers(self) -> list[torch.optim.Optimizer]:
        matrices, gains, rest = [], [], []
        for name, p in self.named:
            if ".attn1.norm_" in name:
                gains.append(p)
            elif ".blocks." in name and name.startswith("transformer") and p.ndim == 2:
                matrices.append(p)
            else:
                rest.append(p)
        groups = [{"params": rest, "factor": 1.0}, {"params": gains, "factor": GAIN_LR}]
        return [Muon(matrices, weight_decay=0.01), torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)]

    def _set_lr(self, lr: float) -> None:
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr * group.get("factor", 1.0)

    def _text(self, captions: list[str], rng: torch.Generator, dropout: float) -> torch.Tensor:
        window = model.CAPTION_TOKENS
        kept = [c if torch.rand((), generator=rng) >= dropout else "" for c in captions]
        tokens = self.tokenizer(kept, padding="max_length", max_length=window, truncation=True, return_tensors="pt")
        mask = tokens.attention_mask
        total = TEXT_LENGTHS[int(torch.randint(len(TEXT_LENGTHS), (), generator=rng))]
        self.cross.bias = padding_bias(mask.sum(1), total, window)
        return self.text_encoder(tokens.input_ids, mask).last_hidden_state * mask[..., None]  # [B, window, TEXT_DIM]

    def loss(self, canvas: Canvas, rng: torch.Generator, phase: Phase) -> torch.Tensor:
        """The loss of this step's batch on a canvas."""
        b, t, h, w = canvas
        clips = data.batch(self.seed, self.step, b, t, (8 * h, 8 * w), phase.world)
        shift = torch.tensor([phase.shifts[(self.step + i) % len(phase.shifts)] for i in range(b)])
        return self.flow_loss(clips, shift, rng, focus=phase.focus)

    def flow_loss(
        self,
        clips: data.Batch,
        shift: torch.Tensor,
        rng: torch.Generator,
        dropout: float = CAPTION_DROPOUT,
        focus: float = 0.0,
    ) -> torch.Tensor:
        """Flow matching: predict noise minus clip at noise levels shifted as in sampling, by `shift` [B].

        `focus` makes what is near the object count more, the less the noise: where noise leaves open where the
        object is, a weight that knows would teach the model to see objects everywhere.
        """
        x = model.encode(clips.video, self.codec)
        b = len(x)
        # Stratified over the batch: less noise in the gradient.
        u = (torch.arange(b) + torch.rand(b, generator=rng)) / b
        sigma = shift * u / (1 + (shift - 1) * u)
        noise = torch.randn(x.shape, generator=rng)
        s = sigma.view(-1, 1, 1, 1, 1)
        text = self._text(clips.captions, rng, dropout)
        velocity = self.transformer((1 - s) * x + s * noise, 1000 * sigma, text, return_dict=False)[0]
        weight = self.weight
        if focus:
            near = functional.avg_pool3d(clips.near, (1, model.PATCH, model.PATCH))  # [B, 1, T, H/4, W/4]
            weight = weight * (1 + focus * (1 - s) * near)
        return (weight * (velocity - (noise - x)).square()).mean()

    def train_step(self) -> tuple[float, Canvas]:
        """Advance by one step; returns the loss and the canvas it was taken on."""
        phase, lr, over = phase_at(self.plan, self.step)
        if phase.teach and over == 0:
            words.teach(self, phase.teach, phase.world)
        rng = torch.Generator().manual_seed((self.seed + 1) * 7_000_003 + self.step)
        weights = torch.tensor([w for w, _ in phase.mix])
        canvas = phase.mix[int(torch.multinomial(weights, 1, generator=rng))][1]
        loss = self.loss(canvas, rng, phase)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in self.named], 1.0)
        self._set_lr(lr)
        for optimiser in self.optimisers:
            optimiser.step()
        for _, p in self.named:
            p.grad = None
        self._average()
        self.step += 1
        return loss.item(), canvas

    @torch.no_grad()
    def _average(self) -> None:
        keep = min(EMA, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.ema.values()), [p for _, p in self.named], 1 - keep)

    def compile(self) -> None:
        """Compile the blocks, each canvas for itself: a third less time a step, half a minute at each canvas' first."""
        for block in self.transformer.blocks:
            block.compile(dynamic=False)

    def state(self) -> dict:
        """Everything needed to go on."""
        return {
            "step": self.step,
            "seed": self.seed,
            "weights": {n: p.detach() for n, p in self.named},
            "ema": self.ema,
            "optimisers": [o.state_dict() for o in self.optimisers],
        }

    @torch.no_grad()
    def restore(self, state: dict) -> None:
        """Go on from a state."""
        if state["seed"] != self.seed:
            raise ValueError(f"checkpoint was made with seed {state['seed']}, not {self.seed}")
        self.step = state["step"]
        for name, p in self.named:
            p.copy_(state["weights"][name])
        self.ema = {n: state["ema"][n].clone() for n, _ in self.named}
        if state["optimisers"] is None:  # weights from elsewhere, see grow.py
            return
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)


def save(trainer: Trainer, folder: Path) -> None:
    """Write the checkpoint so that a crash never leaves half of one."""
    part = folder / "checkpoint.pt.part"
    torch.save(trainer.state(), part)
    os.replace(part, folder / "checkpoint.pt")


def run(
    folder: Path,
    plan: tuple[Phase, ...] = PLAN,
    seed: int = 0,
    every: float = 120.0,
    report: int = 50,
    layers: int = model.LAYERS,
    compiled: bool = False,
) -> Trainer:
    """Train to the end of the plan, resuming from the folder's checkpoint when there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(plan, seed, layers)
    if compiled:
        trainer.compile()
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        trainer.restore(torch.load(checkpoint, weights_only=True))
        log.info("going on from step %d", trainer.step)
    losses, tokens, saved, begun = [], 0, time.monotonic(), time.process_time()
    samples = 0
    while trainer.step < plan[-1].until:
        loss, canvas = trainer.train_step()
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {trainer.step}")
        losses.append(loss)
        samples += canvas[0]
        tokens += math.prod(canvas)
        if trainer.step % report == 0:
            row = [trainer.step, sum(losses) / len(losses), samples, tokens, round(time.process_time() - begun, 1)]
            _append(folder / "log.csv", row)
            log.info("step %d loss %.4f samples %d tokens %d cpu %.0f s", *row)
            losses = []
        if time.monotonic() - saved > every:
            save(trainer, folder)
            saved = time.monotonic()
    save(trainer, folder)
    return trainer


def _append(path: Path, row: list) -> None:
    new = not path.exists()
    with path.open("a", newline="") as f:
        writer = csv.writer(f)
        if new:
            writer.writerow(["step", "loss", "samples_since_start", "tokens_since_start", "cpu_s_since_start"])
        writer.writerow(row)


def main(argv: list[str] | None = None) -> None:
    """Command line of the training alone; ``python -m tools.train_tiny`` does everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plan", choices=PLANS, default="shipped")
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    plan, layers = PLANS[args.plan]
    run(args.out, plan, seed=args.seed, layers=layers, compiled=args.compile)
    log.info("done: %s", json.dumps({"out": str(args.out)}))


if __name__ == "__main__":
    main()
