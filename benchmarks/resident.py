"""What HEART keeps over a generation at real sizes: masks, labels, anchors, centroids, plans, over all layers and branches.

On paper from shapes, and by running one layer with fewer heads on this CPU: all of it grows with the heads alone.
`benchmarks/memory.py --real` prints the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import heart_attention as heart
from heart_attention.backbones.svg import Video
from heart_attention.online import engine as engines

GB = 1e9
BRANCHES = ("cond", "uncond")
BAR = 1.5  # GB on the device, any backbone at the largest model


@dataclass(frozen=True)
class Model:
    """A model's size: what a layer's state depends on."""

    name: str
    layers: int
    heads: int
    grid: tuple[int, int, int]
    dim: int = 128

    @property
    def tokens(self) -> int:
        """Video tokens."""
        return math.prod(self.grid)


MODELS = (
    Model("Wan2.1-1.3B, 480p", 30, 12, (21, 30, 52)),
    Model("Wan2.1-14B, 720p", 40, 40, (21, 45, 80)),
)


def backbones() -> dict[str, tuple[Any, float, str]]:
    """Backbone, threshold and rest by name, as they would be used at these sizes: all that are built in."""
    once = {"init_iters": 1, "step_iters": 1}
    return {
        "xattention": (heart.XAttention(stride=16, block=128), 0.9, "drop"),
        "svg2 300 × 1000": (heart.SVG2(**once), 0.9, "drop"),
        "svg2 1024 × 2048, means": (heart.SVG2(**once, rank="error"), 0.1, "mean"),
        "svg2 600 × 2000, means": (heart.SVG2(600, 2000, **once, rank="error"), 0.1, "mean"),
        "ear": (heart.EAR(**once), 0.9, "mean"),
        "pisa": (heart.PISA(), 0.15, "first-order"),
        "band": (heart.Band(), 0.3, "drop"),
        "sparge": (heart.Sparge(), 0.98, "drop"),
        "svg": (heart.SVG(), 0.3, "drop"),
        "radial": (heart.Radial(), 0.5, "drop"),
        "exact": (heart.ExactMass(), 0.9, "drop"),
        "lite": (heart.Lite(), heart.Lite.default_threshold, "drop"),
    }


def groups(model: Model, backbone: Any) -> tuple[int, int]:
    """Groups of queries and of keys that a mask is between."""
    if isinstance(backbone, heart.SVG2):
        return backbone.q_clusters, backbone.k_clusters
    block_q, block_k = tile(model, backbone)
    return math.ceil(model.tokens / block_q), math.ceil(model.tokens / block_k)


def tile(model: Model, backbone: Any) -> tuple[int, int]:
    """Tokens of a block of queries and of keys."""
    if isinstance(backbone, heart.Lite):
        return backbone.tile(model.dim)
    if isinstance(backbone, heart.Sparge):
        return backbone.block_q, backbone.block_k
    if isinstance(backbone, heart.SVG):
        size = Video(model.grid[0], model.grid[1] * model.grid[2], None, model.tokens).block()
        return size, size
    return backbone.block, backbone.block


def on_paper(model: Model, backbone: Any) -> dict[str, float]:
    """GB of each kind by shapes, over all layers and both branches."""
    states, n, h = len(BRANCHES) * model.layers, model.tokens, model.heads
    rows, columns = groups(model, backbone)
    bits = rows * math.ceil(columns / 8) * h
    found = {"anchors": 2 * h * model.dim * 2, "masks": bits}  # token means of q and k in two bytes
    if isinstance(backbone, heart.SVG2):
        found["labels"] = 2 * n * h * 2  # 16 bits for each query and key; permutations are sorted anew from them
        found["centroids"] = (rows + columns) * model.dim * 4 * h
    if backbone.remaps:
        found["masks"] = 0  # a map made anew is not kept
    if isinstance(backbone, heart.Lite):
        found |= {"masks": 2 * bits, "tiles": bits}  # of this call and the next, and what is alive
    if isinstance(backbone, heart.SVG):
        found["orders"] = 2 * n * 8  # raster and position-major, for all heads; not counted by the engine
    return {kind: size * states / GB for kind, size in found.items()}


def plan_on_paper(model: Model, backbone: Any, density: float) -> float:
    """GB that the plans of all layers and branches would take if they were kept: lists of kept groups, permutations."""
    states, n, h = len(BRANCHES) * model.layers, model.tokens, model.heads
    kept = math.prod(groups(model, backbone)) * density
    permutations = 2 * n if isinstance(backbone, heart.SVG2) else 0
    return (permutations + kept) * 4 * h * states / GB


@torch.no_grad()
def by_running(model: Model, backbone: Any, threshold: float, rest: str, heads: int) -> dict[str, float]:
    """GB of each kind from one layer with `heads` heads on this CPU, two calls a branch, times layers and heads."""
    config = heart.HeartConfig(
        backbone, threshold, heart.TMR(relative=0.2), dense_steps=0, force_sparse=True, rest=rest
    )
    engine = heart.Engine(config, model.layers, heads)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, model.tokens, model.dim, generator=g).to(torch.bfloat16) for _ in range(3))
    limit, engines.PLAN_BYTES = engines.PLAN_BYTES, engines.PLAN_BYTES * heads // model.heads  # as with all heads
    try:
        for branch in BRANCHES:
            call = {"layer": 0, "step": 0, "branch": branch, "grid": model.grid}
            heart.attention(q, k, v, call, engine)
    finally:
        engines.PLAN_BYTES = limit
    scale = model.layers * model.heads / heads / GB
    found = {kind: size * scale for kind, size in engine.memory().items()}
    if "labels" in on_paper(model, backbone):  # the engine counts labels as part of masks
        found["labels"] = 2 * model.tokens * heads * 2 * len(BRANCHES) * scale
        found["masks"] -= found["labels"]
    return {**found, "density": engine.stats().to_dict()["density"]}


def on_device(found: dict[str, float]) -> float:
    """GB on a GPU: all but centroids, which wait in the computer's own memory."""
    return sum(size for kind, size in found.items() if kind not in ("centroids", "density"))


def table(heads: int, run: bool, only: str = "") -> list[dict[str, Any]]:
    """One row for each model and backbone: on paper, and by running if wanted."""
    rows = []
    for model in MODELS:
        for name, (backbone, threshold, rest) in backbones().items():
            if only and only not in name:
                continue
            row: dict[str, Any] = {"model": model.name, "backbone": name, "paper": on_paper(model, backbone)}
            row["plans if kept"] = plan_on_paper(model, backbone, 0.3 if rest == "drop" else 0.1)
            if run:
                row["run"] = by_running(model, backbone, threshold, rest, heads)
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table; GB."""
    print("GB over all layers and both branches: on paper / by running one layer")
    for row in rows:
        run, paper = row.get("run", {}), row["paper"]
        kinds = [kind for kind in dict.fromkeys([*paper, *run]) if kind != "density"]
        parts = ", ".join(f"{kind} {paper.get(kind, 0):.2f} / {run.get(kind, math.nan):.2f}" for kind in kinds)
        print(f"{row['model']:18} {row['backbone']:24} {parts}; plans if kept {row['plans if kept']:.2f}")
        worst = max(on_device(paper), on_device(run) if run else 0.0)
        print(f"{'':18} {'':24} on the device {worst:.2f}, bar {BAR}: {'kept' if worst <= BAR else 'missed'}")
