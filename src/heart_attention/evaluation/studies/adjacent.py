"""Two denoising steps next to each other: how alike a head's masks are and how far its features moved.

One pass over dense generations serves three studies: `iou` (the paper's Observation I), `drift` (its proxy) and
`timesteps` (sparsity over steps). Token masks follow the paper's Eq. 1 on seeded query rows; block masks are
XAttention's own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from ...files import read_json, write_json
from ...online.reuse import drift, features
from . import common

MASS = 0.95  # of a row's softmax mass, the paper's Eq. 1
ROWS = 256  # seeded query rows a head


@dataclasses.dataclass
class Table:
    """Measurements of one model: arrays [prompt, step, layer, head]; step i is between steps i and i+1."""

    token_iou: np.ndarray
    block_iou: np.ndarray
    full_drift: np.ndarray
    mean_drift: np.ndarray
    density: np.ndarray  # of the block mask at each step, one more step than the others

    def to_dict(self) -> dict:
        """As nested lists."""
        return {f.name: np.round(getattr(self, f.name), 6).tolist() for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: dict) -> Table:
        """From what `to_dict` gave."""
        return cls(**{f.name: np.asarray(data[f.name], float) for f in dataclasses.fields(cls)})


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
    """Visits a generation and compares each step's masks and features with the step before."""

    def __init__(self, backbone, threshold: float, seed: int) -> None:
        self.backbone, self.threshold, self.seed = backbone, threshold, seed
        self.last: dict[int, tuple] = {}
        self.rows: dict[str, list] = {f.name: [] for f in dataclasses.fields(Table)}
        self.values: dict[tuple[str, int, int], np.ndarray] = {}

    def __call__(self, call, q, k, v, out) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(q.shape[2], generator=generator)[: min(ROWS, q.shape[2])]
        tokens = token_masks(q, k, chosen)
        mask = self.backbone.predict(q, k, self.threshold)
        blocks = mask.blocks[0]
        pooled = features(q, k, "mean")
        self._put("density", call, mask.density()[0])
        if call.layer in self.last:
            old_tokens, old_blocks, old_pooled, old_q, old_k = self.last[call.layer]
            self._put("token_iou", call, iou(old_tokens, tokens))
            self._put("block_iou", call, iou(old_blocks, blocks))
            self._put("mean_drift", call, drift(old_pooled, pooled)[0])
            moved = (q - old_q).abs().sum(-1).mean(-1) + (k - old_k).abs().sum(-1).mean(-1)  # [B, H], the paper's Eq. 3
            self._put("full_drift", call, moved[0])
        self.last[call.layer] = (tokens, blocks, pooled, q.clone(), k.clone())

    def _put(self, name: str, call, value: torch.Tensor) -> None:
        self.values[name, call.step, call.layer] = value.double().cpu().numpy()

    def array(self, name: str) -> np.ndarray:
        """Everything collected under a name, [step, layer, head]."""
        keys = sorted(k[1:] for k in self.values if k[0] == name)
        steps, layers = sorted({s for s, _ in keys}), sorted({layer for _, layer in keys})
        return np.stack([np.stack([self.values[name, s, layer] for layer in layers]) for s in steps])


def collect(pipe, backbone, call: dict, prompts: list[str], seed: int = 0, threshold: float = 0.9) -> Table:
    """Dense generations of all prompts, measured."""
    parts = []
    for i, prompt in enumerate(prompts):
        collector = _Collector(backbone, threshold, seed)
        common.watch(pipe, call, prompt, seed + i, collector)
        parts.append({f.name: collector.array(f.name) for f in dataclasses.fields(Table)})
    return Table(**{f.name: np.stack([p[f.name] for p in parts]) for f in dataclasses.fields(Table)})


def cached(pipe, backbone, call: dict, prompts: list[str], folder: str | Path, name: str, seed: int = 0) -> Table:
    """The same, taken from `folder` if it was measured there before with the same settings."""
    key = json.dumps([call, prompts, seed, backbone.to_dict(), name], sort_keys=True, default=str)
    path = Path(folder) / f"adjacent-{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    if path.is_file():
        return Table.from_dict(read_json(path, limit=1 << 30))
    table = collect(pipe, backbone, call, prompts, seed)
    write_json(path, table.to_dict())
    return table
