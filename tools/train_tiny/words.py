"""Teach the model words that it has learned not to hear.

Training that begins without a use for a word turns attention away from it, and later there is nothing for a gradient
to hold on to: attention to the word times its value times what depends on it are all about zero. So for a few hundred
steps the words' embeddings, as the transformer sees them, are free vectors with a learning rate of their own; then
they are written into the text encoder and the text projection, and training goes on as before.
"""

import logging
from dataclasses import dataclass

import torch
from torch.nn import functional

from heart_attention.tiny import scene

from . import data, model

log = logging.getLogger("train_tiny")

LOUD = 2000.0  # norm of the written embeddings: what the encoder's layers add to them no longer counts
LEARNING_RATES = {"vectors": 0.1, "transformer": 1e-3}


@dataclass(frozen=True)
class Lesson:
    """Words to be taught, and on what: canvas, shifts of the noise levels clip by clip, focus on the object."""

    words: tuple[str, ...]
    # Every other clip is nearly all noise: there only the words tell what moves where.
    shifts: tuple[float, ...] = (model.FLOW_SHIFT, 60.0)
    canvas: tuple[int, int, int, int] = (4, 6, 10, 10)
    focus: float = 0.0
    steps: int = 350


def teach(trainer, lesson: Lesson, world: data.World) -> None:
    """Find vectors for the words together with a transformer that heeds them, and write them into the text side."""
    ids = torch.tensor([trainer.tokenizer.convert_tokens_to_ids("▁" + w) for w in lesson.words])
    vectors = _free_vectors(trainer, ids, lesson, world)
    _write(trainer, ids, vectors)
    trainer.ema = {n: p.detach().clone() for n, p in trainer.named}


def _free_vectors(trainer, ids: torch.Tensor, lesson: Lesson, world: data.World) -> torch.Tensor:
    rng = torch.Generator().manual_seed(trainer.seed + 4242)
    projection = trainer.transformer.condition_embedder.text_embedder
    vectors = torch.randn(len(ids), projection.linear_2.out_features, generator=rng, requires_grad=True)
    seen: dict[str, torch.Tensor] = {}

    def replace(_module, _args, out):
        which = (seen["ids"][..., None] == ids).float()  # [B, tokens, words]
        return out * (1 - which.sum(-1, keepdim=True)) + which @ vectors

    hook = projection.register_forward_hook(replace)
    rates = LEARNING_RATES
    optimiser = torch.optim.Adam(
        [
            {"params": [vectors], "lr": rates["vectors"]},
            {"params": list(trainer.transformer.parameters()), "lr": rates["transformer"]},
        ]
    )
    losses = []
    for step in range(lesson.steps):
        loss = _loss(trainer, step, lesson, world, rng, seen)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.transformer.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if step % 50 == 49:
            log.info("words: %d of %d, loss %.4f", step + 1, lesson.steps, sum(losses[-50:]) / 50)
    hook.remove()
    for _, p in trainer.named:
        p.grad = None
    return vectors.detach()


def _loss(trainer, step: int, lesson: Lesson, world: data.World, rng: torch.Generator, seen: dict) -> torch.Tensor:
    b, t, h, w = lesson.canvas
    clips = data.batch(trainer.seed + 5, step, b, t, (8 * h, 8 * w), world)
    shift = torch.tensor([lesson.shifts[i % len(lesson.shifts)] for i in range(b)])[torch.randperm(b, generator=rng)]
    window = model.CAPTION_TOKENS
    seen["ids"] = trainer.tokenizer(
        clips.captions, padding="max_length", max_length=window, return_tensors="pt"
    ).input_ids
    return trainer.flow_loss(clips, shift, rng, dropout=0.0, focus=lesson.focus)


@torch.no_grad()
def _write(trainer, ids: torch.Tensor, vectors: torch.Tensor) -> None:
    """Make text encoder and projection give these vectors for these words, and what they gave for all others."""
    encoder, projection = trainer.text_encoder, trainer.transformer.condition_embedder.text_embedder
    _, _, others = _encoded(trainer, ids)
    gain = encoder.encoder.final_layer_norm.weight
    # Among the directions that the encoder's last norm lets through best: those that other words use least.
    strong = gain.abs().argsort(descending=True)[: len(gain) // 2]
    used = (others.T @ others)[strong][:, strong] * gain[strong][:, None] * gain[strong]
    rows = torch.zeros(len(ids), len(gain))
    rows[:, strong] = torch.linalg.eigh(used)[1][:, : len(ids)].T
    encoder.shared.weight[ids] = LOUD * rows
    which, outputs, others = _encoded(trainer, ids)
    wanted = _inputs_for(projection, vectors)  # [words, hidden]: what the projection's first layer has to give
    weight = 20.0  # the four words count for more than how still the others stay
    x = torch.cat([others, weight * outputs])
    off = wanted[which] - projection.linear_1(outputs)
    y = torch.cat([torch.zeros(len(others), off.shape[1]), weight * off])
    gram = x.T @ x / len(x) + 1e-5 * torch.eye(x.shape[1])
    change = torch.linalg.solve(gram, x.T @ y / len(x))
    before = projection(others)
    projection.linear_1.weight += change.T
    got = torch.stack([projection(outputs[which == i]).mean(0) for i in range(len(ids))])
    log.info(
        "words written: off by %.3f of their norm; other words changed by %.3f of theirs",
        ((got - vectors).norm() / vectors.norm()).item(),
        ((projection(others) - before).norm() / before.norm()).item(),
    )


def _encoded(trainer, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over captions of all kinds: which of the words, its encoding; and the encodings of all other tokens."""
    captions = [scene.caption(c, i % 3, i // 3 % 3) for i, c in enumerate(scene.combos())]
    tokens = trainer.tokenizer(captions, padding=True, return_tensors="pt")
    out = trainer.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    hit = tokens.input_ids[..., None] == ids
    word = hit.any(-1)
    return hit[word].float().argmax(-1), out[word], out[tokens.attention_mask.bool() & ~word]


@torch.enable_grad()
def _inputs_for(projection, vectors: torch.Tensor) -> torch.Tensor:
    """Outputs of the projection's first layer for which the whole gives these vectors."""
    hidden = torch.ones(len(vectors), projection.linear_1.out_features, requires_grad=True)
    optimiser = torch.optim.Adam([hidden], lr=0.1)
    second, bias = projection.linear_2.weight.detach(), projection.linear_2.bias.detach()
    for _ in range(1500):
        loss = (functional.gelu(hidden, approximate="tanh") @ second.T + bias - vectors).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return hidden.detach()
