"""`heart project`: projected attention and denoising time of real models on real GPUs, from a roofline.

Nothing here is measured on a GPU. Time of a part = its arithmetic / (peak × efficiency), or its memory traffic /
(bandwidth × efficiency). One figure is fitted: the share of peak that dense matrix work reaches, from the paper's
attention latency of Wan2.1-1.3B at 480p on an A800. Its other dense latencies are predictions that tests check
(docs/projection.md). All other constants are shapes, data sheets, counts from source code, or marked assumptions.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import HeartError, printable, shown
from ..files import read_json

# The fitted figure: 1.98e16 flop of attention in 107 s are 185 of the A800's 312 TFLOP/s.
EFFICIENCY = 0.593
# Assumptions: they bear on end-to-end time and on the sparse path, not on dense attention.
BANDWIDTH_EFFICIENCY = 0.80  # of large elementwise kernels
SPARSE_EFFICIENCY = 0.85  # sparse attention per kept pair, against dense: shorter loops, gathered tiles
PREDICTION_EFFICIENCY = 0.50  # scoring and clustering kernels, against dense
DENSE_STEPS = 5
RESULTS_LIMIT = 64 << 20


@dataclass(frozen=True)
class Model:
    """Shapes of a video transformer and of one generation with it.

    Args:
        tokens: video tokens, plus text where attention is joint.
        text: text tokens of cross-attention; 0 where attention is joint.
        passes: times one block moves its activation [tokens, width] in two-byte units through memory outside of
            matrix products, counted in diffusers' unfused code without the feed-forward activation.
        forwards: transformer calls a step (2 with classifier-free guidance).
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    ffn: int
    tokens: int
    text: int
    passes: int
    steps: int = 50
    forwards: int = 2

    @property
    def width(self) -> int:
        """Model width."""
        return self.heads * self.head_dim


# Counted reads and writes a block, in two-byte units: Wan normalises, gates and rotates in fp32, HunyuanVideo mostly
# in bf16 (docs/projection.md has the counts).
WAN_PASSES, HUNYUAN_PASSES = 173, 109


def wan_tokens(frames: int, height: int, width: int) -> int:
    """Tokens of Wan2.1 and HunyuanVideo: a codec of 4 × 8 × 8 and patches of 1 × 2 × 2."""
    return ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)


MODELS = {
    model.name: model
    for model in (
        Model("wan2.1-1.3b", 30, 12, 128, 8960, wan_tokens(81, 480, 832), 512, WAN_PASSES),
        Model("wan2.1-1.3b-720p", 30, 12, 128, 8960, wan_tokens(81, 720, 1280), 512, WAN_PASSES),
        Model("wan2.1-14b", 40, 40, 128, 13824, wan_tokens(81, 480, 832), 512, WAN_PASSES),
        Model("wan2.1-14b-720p", 40, 40, 128, 13824, wan_tokens(81, 720, 1280), 512, WAN_PASSES),
        # 20 double and 40 single blocks of equal cost a token; 256 prompt tokens; guidance is an input: one forward.
        Model("hunyuanvideo-13b", 60, 24, 128, 12288, wan_tokens(129, 480, 720) + 256, 0, HUNYUAN_PASSES, 50, 1),
        Model("hunyuanvideo-13b-720p", 60, 24, 128, 12288, wan_tokens(129, 720, 1280) + 256, 0, HUNYUAN_PASSES, 50, 1),
    )
}


@dataclass(frozen=True)
class Device:
    """Figures of a GPU, from its maker's data sheet: dense bf16 with fp32 accumulation, TFLOP/s; memory, GB/s."""

    name: str
    tflops: float
    bandwidth: float
    efficiency: float = EFFICIENCY  # fitted for the A800, assumed for all others


DEVICES = {
    device.name: device
    for device in (
        Device("a800", 312, 2039),
        Device("a100", 312, 2039),
        Device("h100", 989, 3350),
        Device("h800", 989, 3350),
        Device("h200", 989, 4800),
        Device("h20", 148, 4000),
        Device("b200", 2250, 8000),
        Device("l40s", 362, 864),
        Device("rtx3090", 71, 936),
        Device("rtx4090", 165, 1008),
        Device("rtx5090", 209, 1792),
    )
}

# The paper's main table, NVIDIA A800, 50 steps: dense attention and denoising latency in seconds.
PAPER_DENSE = {
    "wan2.1-1.3b": (107, 195),
    "wan2.1-1.3b-720p": (542, 740),
    "wan2.1-14b": (461, 1030),
    "hunyuanvideo-13b": (385, 630),
}
FITTED_ON = "wan2.1-1.3b"


@dataclass(frozen=True)
class Projection:
    """Projected seconds of one generation, by part, and the speed-ups over dense."""

    model: str
    gpu: str
    method: str
    density: float
    refresh: float
    attention_s: float
    prediction_s: float  # part of attention_s: scores or clusters, and drift
    other_s: float
    total_s: float
    attention_speedup: float
    total_speedup: float
    projected: bool = True


def attention_flops(model: Model) -> float:
    """Self- or joint attention of one forward, all layers: QKᵀ and PV, 2 flops a product each."""
    return 4.0 * model.tokens**2 * model.width * model.layers


def linear_flops(model: Model) -> float:
    """Projections, feed-forward and cross-attention of one forward."""
    n, d, t = model.tokens, model.width, model.text
    block = 8 * n * d * d + 4 * n * d * model.ffn
    if t:
        block += 4 * n * d * d + 4 * t * d * d + 4 * n * t * d
    return float(block * model.layers)


def elementwise_bytes(model: Model) -> float:
    """Memory traffic outside of matrix products of one forward: norms, rotary embedding, gates, activation."""
    passes = model.passes + 2 * model.ffn / model.width
    return passes * 2.0 * model.tokens * model.width * model.layers


def dense_times(model: Model, device: Device) -> tuple[float, float]:
    """Seconds of attention and of everything else in one dense generation."""
    calls = model.steps * model.forwards
    rate = device.tflops * 1e12 * device.efficiency
    other = linear_flops(model) / rate + elementwise_bytes(model) / _stream(device)
    return attention_flops(model) / rate * calls, other * calls


def _stream(device: Device) -> float:
    return device.bandwidth * 1e9 * BANDWIDTH_EFFICIENCY


def _scores(model: Model, device: Device) -> tuple[float, float]:
    """XAttention, stride 16, block 128: one product of 1/16 of QKᵀ, block sums written and read twice."""
    n, heads = model.tokens, model.heads * model.layers
    product = 2.0 * n * n * model.head_dim / 16 / _prediction_rate(device)
    once = heads * (product + 3 * 4 * (n / 16) * (n / 128) / _stream(device))
    return once, once


def _clusters(model: Model, device: Device) -> tuple[float, float]:
    """SVG2, 300 × 1,000 clusters: two iterations, fifty from scratch.

    Each product is taken twice in bf16 (centroids as two summands); the tokens are read once more for the means.
    """
    n, d, heads = model.tokens, model.head_dim, model.heads * model.layers
    product = 2.0 * n * (300 + 1000) * d * 2 / _prediction_rate(device)
    iteration = heads * (product + 2 * 2 * n * d / _stream(device))
    return 2 * iteration, 50 * iteration


# Seconds to predict the masks of one forward, and those of the first sparse one, for backbones whose kernels were counted;
# any other needs a prediction share.
COUNTED = {"xattention": _scores, "svg2": _clusters}


def _prediction_rate(device: Device) -> float:
    return device.tflops * 1e12 * device.efficiency * PREDICTION_EFFICIENCY


def drift_time(model: Model, device: Device) -> float:
    """Seconds to read q and k once for their token means, one forward."""
    return 2 * 2.0 * model.tokens * model.width * model.layers / _stream(device)


def project(
    model: Model,
    device: Device,
    density: float = 1.0,
    refresh: float = 1.0,
    backbone: str = "xattention",
    dense_steps: int = DENSE_STEPS,
    prediction_share: float | None = None,
    method: str | None = None,
) -> Projection:
    """Projected times of a generation at a mean density and refresh rate of the sparse steps.

    Args:
        density: kept share of token pairs, mean over heads and sparse steps; 1 is dense attention.
        refresh: share of (head, sparse step) whose mask is predicted anew; 1 is a backbone without reuse.
        backbone: whose masks; None as `prediction_share` takes one of `COUNTED`.
        prediction_share: cost of predicting all masks once as a share of dense attention; None: the roofline's.
    """
    _check(density, refresh, dense_steps, model)
    _check_prediction(backbone, prediction_share)
    dense_attention, other = dense_times(model, device)
    attention, prediction = dense_attention, 0.0
    if density < 1:
        sparse_steps = model.steps - dense_steps
        if prediction_share is None:
            once, first = COUNTED[backbone](model, device)
        else:
            once = first = prediction_share * dense_attention / model.steps / model.forwards
        later = max(refresh * sparse_steps - 1, 0)  # the first sparse step refreshes every head
        drift = drift_time(model, device) * sparse_steps if refresh < 1 else 0.0
        prediction = model.forwards * (first + once * later + drift)
        kept = (dense_steps + sparse_steps * density / SPARSE_EFFICIENCY) / model.steps
        attention = dense_attention * kept + prediction
    return Projection(
        model.name, device.name, method or ("dense" if density == 1 else backbone), density, refresh, attention,
        prediction, other, attention + other, dense_attention / attention, (dense_attention + other) / (attention + other),
    )  # fmt: skip


def _check(density: float, refresh: float, dense_steps: int, model: Model) -> None:
    if not 0 < density <= 1:
        raise HeartError(f"a density of {density} cannot be: give the kept share of token pairs, over 0 and up to 1")
    if not 0 <= refresh <= 1:
        raise HeartError(f"a refresh rate of {refresh} cannot be: give a share from 0 to 1")
    if not 0 <= dense_steps < model.steps:
        raise HeartError(f"{dense_steps} dense steps of {model.steps} cannot be: give fewer than there are steps")


def _check_prediction(backbone: str, share: float | None) -> None:
    if share is None and backbone not in COUNTED:
        known = " and ".join(COUNTED)
        raise HeartError(
            f"what predicting with {shown(backbone)} takes was counted for {known} only: give --prediction-share, "
            "its cost as a share of dense attention"
        )
    if share is not None and not 0 <= share < math.inf:
        raise HeartError(f"a prediction share of {share} cannot be: give a number from 0 on")


def validation() -> list[dict[str, Any]]:
    """The paper's dense latencies on an A800 against the projected ones; `fitted` marks what the fit has seen."""
    rows = []
    for name, (attention, total) in PAPER_DENSE.items():
        got, other = dense_times(MODELS[name], DEVICES["a800"])
        for what, paper, ours in (("attention", attention, got), ("denoising", total, got + other)):
            rows.append(
                {"model": name, "what": what, "paper_s": paper, "projected_s": ours, "error": ours / paper - 1,
                 "fitted": what == "attention" and name == FITTED_ON}
            )  # fmt: skip
    return rows


def from_results(
    path: Path, models: list[Model], devices: list[Device], dense_steps: int = DENSE_STEPS, share: float | None = None
) -> list[Projection]:
    """What the densities and refresh rates measured in a results file would give on real models."""
    data = read_json(path, RESULTS_LIMIT)
    rows = data.get("rows") if isinstance(data, dict) else None
    methods: dict[str, list[dict]] = {}
    for row in rows if isinstance(rows, list) else []:
        if _measured(row):
            methods.setdefault(row["method"], []).append(row)
    if not methods:
        raise HeartError(f"{path} holds no row with a density: give the results.json of heart compare or heart demo")
    found = []
    for model in models:
        for device in devices:
            for method, measured in methods.items():
                density = sum(r["density"] for r in measured) / len(measured)
                rates = [r["refresh_rate"] for r in measured if r.get("refresh_rate") is not None]
                refresh = sum(rates) / len(rates) if rates else 1.0
                backbone = method.partition("+")[0]
                found.append(project(model, device, density, refresh, backbone, dense_steps, share, method=method))
    return found


def _measured(row: Any) -> bool:
    """Whether this is a row of a sparse method with a density, by type and range."""
    share = lambda x: isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= 1  # noqa: E731
    if not isinstance(row, dict) or not isinstance(row.get("method"), str) or row["method"] == "dense":
        return False
    return share(row.get("density")) and (row.get("refresh_rate") is None or share(row["refresh_rate"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `heart project`."""
    parser.add_argument("--model", choices=[*MODELS, "all"], default="wan2.1-1.3b", help="which model")
    parser.add_argument("--gpu", choices=[*DEVICES, "all"], default="a800", help="which GPU")
    parser.add_argument("--density", type=float, default=0.3, help="kept share of token pairs in sparse steps")
    parser.add_argument("--refresh", type=float, default=1.0, help="share of masks predicted anew (1: no reuse)")
    parser.add_argument(
        "--backbone", default="xattention", help=f"{', '.join(COUNTED)}; any other with --prediction-share"
    )
    parser.add_argument("--steps", type=int, help="denoising steps (default: the model's 50)")
    parser.add_argument("--dense-steps", type=int, default=DENSE_STEPS, help="first steps that stay dense")
    parser.add_argument(
        "--prediction-share",
        type=float,
        help="cost of one prediction as a share of dense attention (default: roofline)",
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="take measured densities and refresh rates from it"
    )
    parser.add_argument("--validate", action="store_true", help="compare with the paper's dense latencies instead")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    """Print what is asked for."""
    if args.validate:
        rows = validation()
        print(json.dumps({"rows": rows}, indent=2) if args.json else validation_table(rows))
        return 0
    models = [m if args.steps is None else replace(m, steps=args.steps) for m in _chosen(MODELS, args.model)]
    devices = _chosen(DEVICES, args.gpu)
    if args.results:
        found = from_results(args.results, models, devices, args.dense_steps, args.prediction_share)
    else:
        found = [
            project(m, d, args.density, args.refresh, args.backbone, args.dense_steps, args.prediction_share)
            for m in models
            for d in devices
        ]
    found = [projection for pair in _with_dense(found) for projection in pair]
    print(json.dumps(_as_json(found), indent=2) if args.json else table(found))
    return 0


def _chosen(known: dict[str, Any], name: str) -> list[Any]:
    return list(known.values()) if name == "all" else [known[name]]


def _with_dense(found: list[Projection]) -> list[list[Projection]]:
    """Each model and GPU opens with its dense row, derived from any of its others."""
    groups: dict[tuple[str, str], list[Projection]] = {}
    for p in found:
        key = (p.model, p.gpu)
        if key not in groups:
            attention = p.attention_s * p.attention_speedup
            dense = replace(
                p, method="dense", density=1.0, refresh=1.0, attention_s=attention, prediction_s=0.0,
                total_s=attention + p.other_s, attention_speedup=1.0, total_speedup=1.0,
            )  # fmt: skip
            groups[key] = [dense]
        if p.method != "dense":
            groups[key].append(p)
    return list(groups.values())


def _as_json(found: list[Projection]) -> dict[str, Any]:
    assumptions = {
        "efficiency_fitted_on_a800": EFFICIENCY, "bandwidth_efficiency": BANDWIDTH_EFFICIENCY,
        "sparse_efficiency": SPARSE_EFFICIENCY, "prediction_efficiency": PREDICTION_EFFICIENCY,
    }  # fmt: skip
    return {"projected": True, "assumptions": assumptions, "rows": [asdict(p) for p in found]}


def table(found: list[Projection]) -> str:
    """A table for the terminal; the first line says that nothing in it was measured on a GPU."""
    lines = [
        "PROJECTED by a roofline model, not measured (docs/projection.md)",
        "",
        "| model | gpu | method | density | refresh | attention | of it prediction | denoising | attention × | denoising × |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in found:
        lines.append(
            f"| {p.model} | {p.gpu} | {printable(p.method)} | {p.density:.2f} | {p.refresh:.2f} | {p.attention_s:.0f} s | "
            f"{p.prediction_s:.1f} s | {p.total_s:.0f} s | {p.attention_speedup:.2f} | {p.total_speedup:.2f} |"
        )
    return "\n".join(lines)


def validation_table(rows: list[dict[str, Any]]) -> str:
    """The paper's dense latencies beside the projected ones."""
    lines = ["| model | what | paper, A800 | projected | error | |", "|---|---|---|---|---|---|"]
    for row in rows:
        note = "fitted" if row["fitted"] else "predicted"
        lines.append(
            f"| {row['model']} | {row['what']} | {row['paper_s']} s | {row['projected_s']:.0f} s | "
            f"{row['error']:+.1%} | {note} |"
        )
    return "\n".join(lines)
