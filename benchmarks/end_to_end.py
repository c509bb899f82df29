"""What HEART itself costs around the kernels, and whether tile order pays on the embedded model.

    python benchmarks/end_to_end.py                 the costs: no model needed, a few minutes
    python benchmarks/end_to_end.py --order         token order on the embedded model
    python benchmarks/end_to_end.py --json          the same as JSON

Every figure is a ratio of best times out of one interleaved run. With one thread CPU time is taken, which a
busy machine disturbs less than the clock on the wall; dense attention is timed on 2 heads and counted for
all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import heart_attention as heart
from heart_attention.clock import Where
from heart_attention.engine import Engine


def now() -> float:
    """Seconds: of CPU time with one thread, else on the wall."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def interleaved(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Best seconds of each function, taken in turn."""
    best = dict.fromkeys(functions, float("inf"))
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = now()
            function()
            if repeat:  # the first round warms up
                best[name] = min(best[name], now() - start)
    return best


def views(heads: int, n: int, dim: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v [1, H, N, D] as diffusers hands them over: views of [1, N, H, D]."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, heads, dim, generator=g).to(dtype).transpose(1, 2) for _ in range(3)]


# ---------------------------------------- costs


@torch.no_grad()
def pass_through(repeats: int) -> dict[str, Any]:
    """Microseconds that a call of the model's attention takes longer with HEART enabled and every head dense.

    Timed at the very place where a Wan processor calls, on few tokens: whole forwards drown it in noise.
    """
    from diffusers import WanTransformer3DModel
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=8,
        ffn_dim=16, num_layers=1, rope_max_seq_len=16,
    ).eval()  # fmt: skip
    x, calls = torch.randn(1, 16, 2, 12), 500
    with heart.enabled(model, heart.HeartConfig(thresholds=1.0)):
        model(torch.randn(1, 4, 1, 8, 8), torch.tensor([500.0]), torch.randn(1, 4, 8))  # now it is inside a forward
        processor = model.blocks[0].attn1.processor
        ours = type(processor).__call__.__globals__["dispatch_attention_fn"]
        functions = {
            "heart": lambda: [ours(x, x, x, backend=processor._attention_backend) for _ in range(calls)],
            "plain": lambda: [dispatch_attention_fn(x, x, x) for _ in range(calls)],
        }
        best = interleaved(functions, 3 * repeats)
    extra = (best["heart"] - best["plain"]) / calls * 1e6
    return {"what": "passing through, every head dense", "value": extra, "unit": "µs a call", "bar": 30.0}


@torch.no_grad()
def drift_share(repeats: int, dtype: torch.dtype) -> dict[str, Any]:
    """Drift and decision as a share of dense attention at N=8,192, H=12, D=128."""
    q, k, v = views(12, 8192, 128, dtype)
    config = heart.HeartConfig("xattention", 0.9, heart.TMR(delta=float("inf")), dense_steps=0, force_sparse=True)
    engine = Engine(config, 1, 12)
    engine._run = lambda call, state: call.q  # only what comes before the kernel is timed
    engine.attend(Where(layer=0, step=0), q, k, v, F.scaled_dot_product_attention)
    steps = iter(range(1, 10**6))

    def decide():
        engine.attend(Where(layer=0, step=next(steps)), q, k, v, F.scaled_dot_product_attention)

    two = [x[:, :2] for x in (q, k, v)]
    best = interleaved({"decide": decide, "dense": lambda: F.scaled_dot_product_attention(*two)}, repeats)
    share = 100 * best["decide"] / (6 * best["dense"])
    name = f"drift + decision, N=8,192 H=12 D=128, {str(dtype)[6:]}"
    return {"what": name, "value": share, "unit": "% of dense", "bar": 0.2}


@torch.no_grad()
def reused(backbone: Any, n: int, heads: int, repeats: int, bar: float) -> dict[str, Any]:
    """The path with every mask reused against the kernel (and its permutation) alone on the same plan."""
    q, k, v = views(heads, n, 128)
    config = heart.HeartConfig(backbone, 0.3, heart.TMR(delta=float("inf")), dense_steps=0, force_sparse=True)
    engine = Engine(config, 1, heads)
    engine.attend(Where(layer=0, step=0), q, k, v, F.scaled_dot_product_attention)
    state = next(iter(engine._states.values()))
    steps = iter(range(1, 10**6))
    out = q.new_empty((1, n, heads, 128)).transpose(1, 2)
    kernel = next(iter(engine._kernels.values()))
    functions = {
        "path": lambda: engine.attend(Where(layer=0, step=next(steps)), q, k, v, F.scaled_dot_product_attention),
        "kernel": lambda: kernel.run(state.plan, q, k, v, out=out),
    }
    best = interleaved(functions, repeats)
    name = f"{backbone.name} path, all reused, vs kernel alone, N={n:,} density {float(state.density.mean()):.2f}"
    return {"what": name, "value": best["path"] / best["kernel"], "unit": "×", "bar": bar}


def costs(repeats: int) -> Iterator[dict[str, Any]]:
    """All rows that need no model."""
    yield pass_through(repeats)
    yield drift_share(repeats, torch.float32)
    yield drift_share(repeats, torch.bfloat16)
    yield reused(heart.XAttention(), 8192, 2, repeats, 1.03)
    yield reused(heart.SVG2(init_iters=2).scaled_to(8192), 8192, 2, repeats, 1.05)


# ---------------------------------------- token order


class OrderProbe:
    """Rides along with a dense generation and counts kept blocks in both orders."""

    def __init__(self, block: int, stride: int, masses: tuple[float, ...], steps: tuple[int, ...]) -> None:
        self.backbone, self.masses, self.steps = heart.XAttention(stride=stride, block=block), masses, steps
        self.exact: dict[tuple[str, float], list[float]] = {}
        self.predicted: dict[tuple[str, float], list[float]] = {}
        self.errors: dict[tuple[str, float], list[tuple[float, float]]] = {}

    def start_forward(self, where: Where) -> None: ...

    def reset(self) -> None: ...

    def attend(self, where, q, k, v, dense):
        if where.step in self.steps:
            from heart_attention.masks import tile_order

            for name, order in (("raster", None), ("tiles", tile_order(where.grid, self.backbone.block))):
                self._count(name, order, q, k)
                if q.shape[2] <= 2048:  # token by token, so at small sizes only
                    self._measure(name, order, q, k, v, where.grid)
        return dense(q, k, v)

    def _measure(self, name: str, order: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid: tuple) -> None:
        exact = F.scaled_dot_product_attention(q, k, v)
        for p in self.masses:
            mask = self.backbone.predict(q, k, p, order=order).dense_tokens()
            error = F.scaled_dot_product_attention(q, k, v, attn_mask=mask) - exact
            relative = float(error.norm() / exact.norm())
            self.errors.setdefault((name, p), []).append((relative, common_share(error, grid)))

    def _count(self, name: str, order: Any, q: torch.Tensor, k: torch.Tensor) -> None:
        for h in range(q.shape[1]):
            mass = block_mass(q[0, h], k[0, h], order, self.backbone.block)
            for p in self.masses:
                self.exact.setdefault((name, p), []).append(kept_share(mass, p))
        for p in self.masses:
            mask = self.backbone.predict(q, k, p, order=order)
            self.predicted.setdefault((name, p), []).append(float(mask.density().mean()))


def common_share(error: torch.Tensor, grid: tuple[int, int, int], side: int = 4) -> float:
    """Share of the squared error [B, H, N, D] that the tokens of a cell of side³ have in common."""
    t, h, w = (n // side for n in grid)
    cells = error.unflatten(2, grid)[:, :, : t * side, : h * side, : w * side]
    cells = cells.unflatten(4, (w, side)).unflatten(3, (h, side)).unflatten(2, (t, side))  # [B, H, t, s, h, s, w, s, D]
    return float(cells.mean((3, 5, 7)).square().sum() * side**3 / cells.square().sum().clamp(min=1e-30))


def block_mass(q: torch.Tensor, k: torch.Tensor, order: Any, block: int) -> torch.Tensor:
    """True attention mass of every block pair, [M, M], rows summing to about 1."""
    if order is not None:
        q, k = q[order], k[order]
    n, dim = q.shape
    out = []
    for start in range(0, n, block):
        w = torch.softmax(q[start : start + block] @ k.T / dim**0.5, -1)  # [b, N]
        w = F.pad(w, (0, -n % block)).unflatten(-1, (-1, block)).sum(-1)
        out.append(w.mean(0))
    return torch.stack(out)


def kept_share(mass: torch.Tensor, p: float) -> float:
    """Fewest blocks that hold the share p of each row's mass, over all blocks."""
    from heart_attention.masks import top_p

    return float(top_p(mass, p, strict=True).double().mean())


@torch.no_grad()
def order_study(model: str, quick: bool, steps: int, prompts: int, quality: bool = True) -> dict[str, Any]:
    """Kept blocks at equal mass, and PSNR against dense at equal density, raster against tiles."""
    from heart_attention import pipelines, tiny
    from heart_attention.config import preset
    from heart_attention.models import intercept

    pipe = pipelines.load(model)
    call = pipelines.call_arguments(model, pipe, steps=steps, quick=quick)
    config = preset("xattention", pipe)
    x = config.backbone
    masses = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
    sampled = tuple(sorted({steps // 4, steps // 2, steps - 2}))
    probe = OrderProbe(x.block, x.stride, masses, sampled)
    texts = tiny.prompts("demo")[:prompts]
    generate = lambda text: _frames(pipe, text, call)  # noqa: E731
    attached = intercept.attach_pipeline(pipe, probe)
    try:
        dense = [generate(texts[0])]
    finally:
        for attachment in attached:
            attachment.detach()
    dense += [generate(text) for text in texts[1:]] if quality else []
    blocks = {p: {o: _mean(probe.exact[o, p]) for o in ("raster", "tiles")} for p in masses}
    for p in masses:  # if each head could choose: the lists are in step
        blocks[p]["either"] = _mean(list(map(min, probe.exact["raster", p], probe.exact["tiles", p])))
    predicted = {p: {o: _mean(probe.predicted[o, p]) for o in ("raster", "tiles")} for p in masses}
    study = {"steps": list(sampled), "blocks_at_equal_mass": blocks, "predicted_density": predicted}
    study["errors"] = {p: {o: _pair(probe.errors.get((o, p), [])) for o in ("raster", "tiles")} for p in masses}
    if not quality:
        return study
    runs = []
    for order in ("raster", "tiles"):
        for tau in (0.7, 0.8, 0.9) if order == "raster" else (0.7, 0.75, 0.8, 0.85, 0.9, 0.93):
            changed = config.replace(thresholds=tau, order=order, reuse=heart.Always(), force_sparse=True)
            with heart.enabled(pipe, changed):
                made = [generate(text) for text in texts]
                density = heart.stats(pipe)["density"]
            values = [_psnr(a, b) for a, b in zip(made, dense)]
            runs.append({"order": order, "tau": tau, "density": density, "psnr": _mean(values)})
    return {**study, "quality": runs, "psnr_at_equal_density": _at_equal_density(runs)}


def _frames(pipe, prompt: str, call: dict) -> torch.Tensor:
    out = pipe(prompt=prompt, generator=torch.Generator().manual_seed(0), output_type="pt", **call)
    return out.frames.float()


def _psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(-10 * torch.log10((a - b).square().mean().clamp(min=1e-12)))


def _pair(found: list[tuple[float, float]]) -> dict[str, float]:
    return {"relative": _mean([f[0] for f in found]), "common": _mean([f[1] for f in found])} if found else {}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _at_equal_density(runs: list[dict]) -> list[dict]:
    """For each raster run, the tiles' PSNR at its density, on the line between the two nearest runs."""
    tiles = sorted((r["density"], r["psnr"]) for r in runs if r["order"] == "tiles")
    rows = []
    for r in runs:
        for (d0, p0), (d1, p1) in itertools.pairwise(tiles):
            if r["order"] == "raster" and d0 <= r["density"] <= d1:
                there = p0 + (p1 - p0) * (r["density"] - d0) / max(d1 - d0, 1e-12)
                rows.append({"density": r["density"], "raster": r["psnr"], "tiles": there})
    return rows


# ---------------------------------------- printing


def print_costs(rows: Iterator[dict]) -> None:
    for r in rows:
        verdict = "ok" if r["value"] <= r["bar"] else "OVER"
        print(f"{r['what']:<72} {r['value']:>8.3f} {r['unit']:<12} bar {r['bar']:<6g} {verdict}", flush=True)


def print_order(study: dict) -> None:
    print(f"{'mass':>6} {'raster':>9} {'tiles':>9} {'change':>8} {'either':>8}   blocks kept at equal true mass")
    for p, row in study["blocks_at_equal_mass"].items():
        changes = [row[o] / row["raster"] - 1 for o in ("tiles", "either")]
        print(f"{p:>6} {row['raster']:>9.4f} {row['tiles']:>9.4f} {changes[0]:>8.1%} {changes[1]:>8.1%}")
    print(f"\n{'τ':>6} {'raster':>9} {'tiles':>9} {'change':>8}   density of XAttention's own masks")
    for p, row in study["predicted_density"].items():
        print(f"{p:>6} {row['raster']:>9.4f} {row['tiles']:>9.4f} {row['tiles'] / row['raster'] - 1:>8.1%}")
    if study["errors"][0.9]["raster"]:
        print(
            f"\n{'τ':>6} {'raster':>9} {'tiles':>9} {'raster':>9} {'tiles':>9}   output error; share common to 4³ cells"
        )
        for p, row in study["errors"].items():
            shown = [row[o][kind] for kind in ("relative", "common") for o in ("raster", "tiles")]
            print(f"{p:>6} " + " ".join(f"{value:>9.4f}" for value in shown))
    if "quality" not in study:
        return
    print(f"\n{'order':>8} {'τ':>6} {'density':>9} {'PSNR':>8}")
    for r in study["quality"]:
        print(f"{r['order']:>8} {r['tau']:>6} {r['density']:>9.4f} {r['psnr']:>8.2f}")
    for r in study["psnr_at_equal_density"]:
        print(f"at density {r['density']:.3f}: raster {r['raster']:.2f} dB, tiles {r['tiles']:.2f} dB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", action="store_true", help="the token-order study instead of the costs")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--quick", action="store_true", help="the embedded model's small size")
    parser.add_argument("--no-quality", action="store_true", help="count blocks only, generate no further videos")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.order:
        study = order_study(args.model, args.quick, args.steps, args.prompts, not args.no_quality)
        print(json.dumps(study, indent=1)) if args.json else print_order(study)
    else:
        rows = costs(args.repeats)
        print(json.dumps(list(rows), indent=1)) if args.json else print_costs(rows)


if __name__ == "__main__":
    main()
