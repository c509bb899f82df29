"""Two denoising steps next to each other: how alike a head's masks are and how far its features moved.

One pass over dense generations serves three studies: `iou` (the paper's Observation I), `drift` (its proxy) and
`timesteps` (sparsity over steps). Token masks follow the paper's Eq. 1 on seeded query rows; predicted masks are those of
the paper's backbones, on the same rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from ...online.predict import predict
from ...online.reuse import drift, features
from ..watch import watch
from . import common

MASS = 0.95  # of a row's softmax mass, the paper's Eq. 1
ROWS = 256  # seeded query rows a head
ARRAYS = ("token_iou", "full_drift", "mean_drift")


@dataclasses.dataclass
class Table:
    """Measurements of one model: arrays [prompt, step, layer, head]; step i is between steps i and i+1.

    `mask_iou` and `density` are by backbone; density is of the mask at each step and has one step more than the others.
    """

    token_iou: np.ndarray
    full_drift: np.ndarray
    mean_drift: np.ndarray
    mask_iou: dict[str, np.ndarray]
    density: dict[str, np.ndarray]

    def to_dict(self) -> dict:
        """As nested lists."""
        plain = {name: np.round(getattr(self, name), 6).tolist() for name in ARRAYS}
        for name in ("mask_iou", "density"):
            plain[name] = {k: np.round(v, 6).tolist() for k, v in getattr(self, name).items()}
        return plain

    @classmethod
    def from_dicts(cls, parts: list[dict]) -> Table:
        """From what `to_dict` gave, one after the other."""
        by_backbone: dict[str, Any] = {
            n: {k: np.concatenate([np.asarray(part[n][k], float) for part in parts]) for k in parts[0][n]}
            for n in ("mask_iou", "density")
        }
        arrays: dict[str, Any] = {n: np.concatenate([np.asarray(part[n], float) for part in parts]) for n in ARRAYS}
        return cls(**arrays, **by_backbone)


def minimal_set(weights: torch.Tensor, mass: float = MASS) -> torch.Tensor:
    """For each row the smallest set of keys whose weights reach `mass`: bool, same shape."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order, before < mass)


def token_masks(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The paper's M(i, j) on the chosen query rows, bool [H, rows, N], for the first batch item."""
    found = []
    for head in range(q.shape[1]):  # a head at a time: rows × N floats at once
        logits = q[0, head, rows].float() @ k[0, head].float().T / q.shape[-1] ** 0.5
        found.append(minimal_set(logits.softmax(-1)))
    return torch.stack(found)


def iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Intersection over union of bool [H, ...] masks, one number a head."""
    both, either = (a & b).flatten(1).sum(1), (a | b).flatten(1).sum(1)
    return both.double() / either.clamp(min=1).double()


class _Collector:
    """Visits a generation and compares each step's masks and features with the step before; video tokens only."""

    def __init__(self, configs: dict[str, Any], threshold: float, seed: int) -> None:
        self.configs, self.threshold, self.seed = configs, threshold, seed
        self.states: dict[tuple[str, int], Any] = {}
        self.last: dict[int, tuple] = {}
        self.values: dict[tuple[str, int, int], np.ndarray] = {}

    def __call__(self, call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """One attention call, q, k [B, H, N, D]; the first batch item is looked at."""
        q, k, v = (video_tokens(call, x) for x in (q, k, v))  # [1, H, video, D]
        generator = torch.Generator().manual_seed(self.seed)
        rows = torch.randperm(q.shape[2], generator=generator)[:ROWS]
        tokens, pooled = token_masks(q, k, rows), features(q.float(), k.float(), "mean")
        masks = {name: self._predict(name, call, (q, k, v), rows) for name in self.configs}
        if call.layer in self.last:
            old_tokens, old_masks, old_pooled, old_q, old_k = self.last[call.layer]
            self._put("token_iou", call, iou(old_tokens, tokens))
            for name, kept in masks.items():
                self._put(f"mask_iou {name}", call, iou(old_masks[name], kept))
            self._put("mean_drift", call, drift(old_pooled, pooled)[0])
            self._put("full_drift", call, full_drift(q, old_q) + full_drift(k, old_k))
        self.last[call.layer] = (tokens, masks, pooled, q.clone(), k.clone())

    def _predict(self, name: str, call: Any, qkv: tuple[torch.Tensor, ...], rows: torch.Tensor) -> torch.Tensor:
        """The rows of a backbone's mask, bool [H, rows, video]; its memory goes on from step to step, as in inference."""
        backbone = common.fitted(self.configs[name], qkv[0].shape[2])
        state = self.states.setdefault((name, call.layer), backbone.new_state())
        q, k, v = qkv
        mask = predict(backbone, q, k, v, self.threshold, state, key=(call.layer, str(call.branch), 0))
        self._put(f"density {name}", call, mask.density()[0])
        return mask.rows(rows, torch.arange(qkv[1].shape[2]))[0]

    def _put(self, name: str, call: Any, value: torch.Tensor) -> None:
        self.values[name, call.step, call.layer] = value.double().cpu().numpy()

    def array(self, name: str) -> np.ndarray:
        """Everything collected under a name, [step, layer, head]."""
        keys = sorted(k[1:] for k in self.values if k[0] == name)
        steps, layers = sorted({s for s, _ in keys}), sorted({layer for _, layer in keys})
        return np.stack([np.stack([self.values[name, s, layer] for layer in layers]) for s in steps])


def video_tokens(call: Any, x: torch.Tensor) -> torch.Tensor:
    """The video tokens of the first batch item, [1, H, video, D]: text and unused slots are left out."""
    if not call.text:
        return x[:1]
    return x[:1, :, call.text[0].video_index(x.shape[2], x.device)]


def full_drift(x: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of the L1 distance, in float32, [H]: half of the paper's Eq. 3."""
    return (x.float() - old.float()).abs().sum(-1).mean(-1)[0]


def collect(
    pipe: Any, configs: dict[str, Any], call: dict, prompt: str, seed: int = 0, rows: int = 0, threshold: float = 0.9
) -> Table:
    """One dense generation, measured; `seed` is of its noise, `rows` of the query rows that are looked at."""
    collector = _Collector(configs, threshold, rows)
    watch(pipe, collector, [prompt], seed, call)
    by_backbone: dict[str, Any] = {
        n: {b: collector.array(f"{n} {b}")[None] for b in configs} for n in ("mask_iou", "density")
    }
    arrays: dict[str, Any] = {name: collector.array(name)[None] for name in ARRAYS}
    return Table(**arrays, **by_backbone)


def plan(call: dict, prompts: list[str], seed: int, control: bool) -> list[tuple[int, dict]]:
    """All prompts; the control has one."""
    return [(i, {"call": call, "seed": seed, "rows": ROWS}) for i in range(1 if control else len(prompts))]


def measure(pipe: Any, text: str, prompt: int, call: dict, seed: int, rows: int) -> dict:
    """One prompt with the paper's backbones."""
    return collect(pipe, common.configs(pipe), call, text, seed + prompt, seed).to_dict()
