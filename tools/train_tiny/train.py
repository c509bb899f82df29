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
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch.nn import functional

from . import attention, data, model
from .muon import Muon
from .plan import PLAN, Canvas, Phase, phase_at

log = logging.getLogger("train_tiny")

CAPTION_DROPOUT = 0.1
EMA = 0.998
GAIN_LR = 4.0  # QK-norm gains learn faster, so that attention can become as sharp as it wants to be


class PaddedTextAttention(WanAttnProcessor):
    """Cross-attention to a few text positions that equals cross-attention to the pipeline's 64 or 512.

    The pipeline pads prompt embeddings with zeros, all of which give one and the same key: n of them weigh as one
    with log(n) added to its logit. So training can do without computing them.
    """

    bias: torch.Tensor | None = None  # [B, 1, 1, CAPTION_TOKENS]

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        """As Wan's processor, with the padding's bias in place of a mask."""
        return super().__call__(attn, hidden_states, encoder_hidden_states, self.bias, rotary_emb)


def padding_bias(lengths: torch.Tensor, total: int, window: int) -> torch.Tensor:
    """Logit bias [B, 1, 1, window] that lets the window's padding stand for padding up to `total` positions."""
    pads = torch.log((total - lengths) / (window - lengths))  # [B]
    is_pad = torch.arange(window)[None] >= lengths[:, None]
    return torch.where(is_pad, pads[:, None], 0.0)[:, None, None]


class Trainer:
    """Model, optimisers, averaged weights and the step that changes them."""

    gains: tuple[str, ...] = (".attn1.norm_",)  # parts of the names of the QK-norm gains

    def __init__(self, plan: tuple[Phase, ...] = PLAN, seed: int = 0, quick: bool = False):
        self.plan, self.seed, self.step, self.quick = plan, seed, 0, quick
        self.codec = model.fit_codec(seed)
        modules = self._build(seed)
        self.named = [(f"{name}.{n}", p) for name, module in modules.items() for n, p in module.named_parameters()]
        self.ema = {n: p.detach().clone() for n, p in self.named}
        self.optimisers = self._optimisers()
        # Colour counts for more than the faint edge components, most of which is noise at any level.
        weight = model.latent_scale(seed).view(1, -1, 1, 1, 1)
        self.weight = weight / weight.mean()

    def _build(self, seed: int) -> dict[str, torch.nn.Module]:
        """The modules that are trained, by the name that they have in the pipeline."""
        self.transformer, self.text_encoder, self.tokenizer = model.initialise(seed)
        if self.quick:
            attention.quicken(self.transformer)
        self.cross = attention.QuickAttention() if self.quick else PaddedTextAttention()
        for block in self.transformer.blocks:
            block.attn2.set_processor(self.cross)
        return {"transformer": self.transformer, "text_encoder": self.text_encoder}

    def _optimisers(self) -> list[torch.optim.Optimizer]:
        matrices, gains, rest = [], [], []
        for name, p in self.named:
            if name.startswith("transformer.") and any(part in name for part in self.gains):
                gains.append(p)
            elif "blocks." in name and name.startswith("transformer") and p.ndim == 2:
                matrices.append(p)
            else:
                rest.append(p)
        groups = [{"params": rest, "factor": 1.0}, {"params": gains, "factor": GAIN_LR}]
        muon = Muon(matrices, weight_decay=0.01, dtype=torch.bfloat16 if self.quick else torch.float32)
        return [muon, torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)]

    def _set_lr(self, lr: float) -> None:
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr * group.get("factor", 1.0)

    def _tokens(self, captions: list[str]):
        """Ids and attention mask [B, CAPTION_TOKENS]."""
        window = model.CAPTION_TOKENS
        return self.tokenizer(captions, padding="max_length", max_length=window, truncation=True, return_tensors="pt")

    def phase(self) -> Phase:
        """The phase that training is in, or the last one after its end."""
        return phase_at(self.plan, min(self.step, self.plan[-1].until - 1))[0]

    def _text(self, captions: list[str], rng: torch.Generator, dropout: float) -> torch.Tensor:
        tokens = self._tokens([c if torch.rand((), generator=rng) >= dropout else "" for c in captions])
        mask, window = tokens.attention_mask, model.CAPTION_TOKENS
        lengths = self.phase().text
        total = lengths[int(torch.randint(len(lengths), (), generator=rng))]
        self.cross.bias = padding_bias(mask.sum(1), total, window)
        return self.text_encoder(tokens.input_ids, mask).last_hidden_state * mask[..., None]  # [B, window, TEXT_DIM]

    def predict(
        self,
        noisy: torch.Tensor,
        target: torch.Tensor,
        sigma: torch.Tensor,
        captions: list[str],
        rng: torch.Generator,
        dropout: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the transformer predicts for noisy latents at noise levels `sigma` [B], and what it ought to."""
        return self.transformer(noisy, 1000 * sigma, self._text(captions, rng, dropout), return_dict=False)[0], target

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
        # Stratified over the batch: less noise in the gradient.
        u = (torch.arange(len(x)) + torch.rand(len(x), generator=rng)) / len(x)
        sigma = shift * u / (1 + (shift - 1) * u)
        noise = torch.randn(x.shape, generator=rng)
        s = sigma.view(-1, 1, 1, 1, 1)
        velocity, target = self.predict((1 - s) * x + s * noise, noise - x, sigma, clips.captions, rng, dropout)
        weight = self.weight
        if focus:
            near = functional.avg_pool3d(clips.near, (1, model.PATCH, model.PATCH))  # [B, 1, T, H/4, W/4]
            weight = weight * (1 + focus * (1 - s) * near)
        return (weight * (velocity - target).square()).mean()

    def train_step(self) -> tuple[float, Canvas]:
        """Advance by one step; returns the loss and the canvas it was taken on."""
        phase, lr = phase_at(self.plan, self.step)
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
        for blocks in self.transformer.children():
            for block in blocks if isinstance(blocks, torch.nn.ModuleList) else ():
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
        self.ema = {n: state["ema"][n].to(p.dtype, copy=True) for n, p in self.named}
        if state["optimisers"] is None:  # weights alone, see export.thin
            return
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)


def save(trainer: Trainer, folder: Path) -> None:
    """Write the checkpoint so that a crash never leaves half of one."""
    part = folder / "checkpoint.pt.part"
    torch.save(trainer.state(), part)
    os.replace(part, folder / "checkpoint.pt")


def run(trainer: Trainer, folder: Path, every: float = 120.0, report: int = 50) -> Trainer:
    """Train to the end of the trainer's plan, resuming from the folder's checkpoint when there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        trainer.restore(torch.load(checkpoint, weights_only=True))
        log.info("going on from step %d", trainer.step)
    losses, tokens, saved, begun = [], 0, time.monotonic(), time.process_time()
    samples = 0
    while trainer.step < trainer.plan[-1].until:
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
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    parser.add_argument(
        "--quick", action="store_true", help="bfloat16, for CPUs that have it: three times as quick there"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    trainer = Trainer(PLAN, args.seed, args.quick)
    if args.compile:
        trainer.compile()
    run(trainer, args.out)
    log.info("done: %s", json.dumps({"out": str(args.out)}))


if __name__ == "__main__":
    main()
