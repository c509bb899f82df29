"""What HEART itself costs around the kernels, and whether other token orders pay on the embedded model.

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
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import heart_attention as heart
from heart_attention import token_order
from heart_attention.online.call import CallContext
from heart_attention.online.engine import Engine
from ratios import Ratio, add_arguments, settle


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
    engine.attend(CallContext(layer=0, step=0), q, k, v, F.scaled_dot_product_attention)
    steps = iter(range(1, 10**6))

    def decide():
        engine.attend(CallContext(layer=0, step=next(steps)), q, k, v, F.scaled_dot_product_attention)

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
    engine.attend(CallContext(layer=0, step=0), q, k, v, F.scaled_dot_product_attention)
    state = next(iter(engine._states.values()))
    steps = iter(range(1, 10**6))
    out = q.new_empty((1, n, heads, 128)).transpose(1, 2)
    kernel = next(iter(engine._kernels.values()))
    functions = {
        "path": lambda: engine.attend(CallContext(layer=0, step=next(steps)), q, k, v, F.scaled_dot_product_attention),
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

ORDERS = ("raster", "tiles", "heads")
MASSES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


class BlockCounter:
    """Rides along with a dense generation and counts kept blocks in raster order, in tiles, and in the heads' own."""

    def __init__(self, backbone: Any, order: tuple, masses: tuple[float, ...], steps: tuple[int, ...]) -> None:
        self.backbone, self.order, self.masses, self.steps = backbone, order, masses, steps
        self.exact: dict[tuple[str, float], list[float]] = {}
        self.predicted: dict[tuple[str, float], list[float]] = {}
        self.errors: dict[tuple[str, float], list[tuple[float, float]]] = {}

    def start_forward(self, call: CallContext) -> None:
        """Nothing to do before a forward."""

    def reset(self) -> None:
        """What was counted stays."""

    def attend(self, call, q, k, v, dense):
        """The dense output; at the chosen steps blocks are counted beside it."""
        out = dense(q, k, v)
        if call.step in self.steps:
            for kind in ORDERS:
                for h in range(q.shape[1]):
                    name = self.order[call.layer][h] if kind == "heads" else kind
                    order = token_order.permutation(name, tuple(call.grid), q.shape[2], None, self.backbone.block)
                    head = slice(h, h + 1)
                    self._count(kind, order, q[:1, head], k[:1, head], v[:1, head], out[:1, head], call.grid)
        return out

    def _count(self, kind: str, order: torch.Tensor, q, k, v, out, grid: tuple) -> None:
        mass = block_mass(q[0, 0], k[0, 0], order, self.backbone.block)
        for p in self.masses:
            self.exact.setdefault((kind, p), []).append(kept_share(mass, p))
            mask = self.backbone.predict(q, k, p, order=order)
            self.predicted.setdefault((kind, p), []).append(float(mask.density().mean()))
            kernel = heart.kernels.choose(mask, q)
            error = kernel.run(kernel.plan(mask), q, k, v) - out
            told = float(error.norm() / out.norm()), common_share(error, grid)
            self.errors.setdefault((kind, p), []).append(told)


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
    """Kept blocks at equal mass, and PSNR against dense at equal density: raster, tiles, and an order for every head.

    The heads' orders and thresholds are chosen on two calibration prompts, everything else is measured on others.
    """
    from heart_attention import tiny
    from heart_attention.evaluation import pipelines
    from heart_attention.evaluation.watch import watch
    from heart_attention.presets import preset

    pipe = pipelines.load(model)
    call = pipelines.call_arguments(model, pipe, steps=steps, quick=quick)
    config = preset("xattention", pipe)
    sampled = tuple(sorted({steps // 4, steps // 2, steps - 2} | {config.first_dense_steps(steps)}))
    tuned = {tau: tuned_heads(pipe, config.replace(thresholds=tau), call, sampled) for tau in (0.8, 0.9)}
    counter = BlockCounter(config.backbone, tuned[0.9].order, MASSES, sampled)
    texts = tiny.prompts("demo")[:prompts]
    dense = [frames.float() for frames in watch(pipe, counter, texts[:1], 0, call, "pt")]
    study = {"steps": list(sampled), "order": tuned[0.9].order, "tuned_error": tuned[0.9].error}
    for name in ("exact", "predicted"):
        study[name] = {p: {o: _mean(getattr(counter, name)[o, p]) for o in ORDERS} for p in MASSES}
    study["errors"] = {p: {o: _pair(counter.errors[o, p]) for o in ORDERS} for p in MASSES}
    if not quality:
        return study
    dense += [_frames(pipe, text, call) for text in texts[1:]]
    runs = []
    for order, tau in [("raster", t) for t in (0.7, 0.8, 0.9, 0.92)] + [("tiles", t) for t in (0.85, 0.9)]:
        runs.append(_quality(pipe, config.replace(thresholds=tau, order=order), order, tau, texts, dense, call))
    for tau, found in tuned.items():
        changed = config.replace(thresholds=found.thresholds, order=found.order)
        runs.append(_quality(pipe, changed, "heads", tau, texts, dense, call))
    return {**study, "quality": runs, "psnr_at_equal_density": _against_raster(runs)}


def tuned_heads(pipe: Any, config: Any, call: dict, steps: tuple[int, ...]) -> Any:
    """An order and a threshold for every head, as many blocks as in raster order; from two calibration prompts."""
    from heart_attention import tiny
    from heart_attention.cli.tune import thresholds_of
    from heart_attention.evaluation.watch import watch
    from heart_attention.tuning import order

    looked = [step for step in steps if step >= config.first_dense_steps(call["num_inference_steps"])]
    probe = order.OrderProbe(config.backbone, thresholds_of(pipe, config), looked)
    watch(pipe, probe, tiny.prompts("calibration")[:2], 0, call)
    return order.tune(probe)


def _quality(pipe, config, order: str, tau: float, texts: list[str], dense: list[torch.Tensor], call: dict) -> dict:
    with heart.enabled(pipe, config.replace(reuse=heart.Always(), force_sparse=True)):
        made = [_frames(pipe, text, call) for text in texts]
        density = heart.stats(pipe)["density"]
    values = [_psnr(a, b) for a, b in zip(made, dense)]
    return {"order": order, "tau": tau, "density": density, "psnr": _mean(values), "each": values}


def _frames(pipe, prompt: str, call: dict) -> torch.Tensor:
    out = pipe(prompt=prompt, generator=torch.Generator().manual_seed(0), output_type="pt", **call)
    return out.frames.float()


def _psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(-10 * torch.log10((a - b).square().mean().clamp(min=1e-12)))


def _pair(found: list[tuple[float, float]]) -> dict[str, float]:
    return {"relative": _mean([f[0] for f in found]), "common": _mean([f[1] for f in found])} if found else {}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _against_raster(runs: list[dict]) -> list[dict]:
    """For each other run, the raster's PSNR at its density, on the line between the two nearest runs."""
    raster = sorted((r["density"], r["psnr"], r["each"]) for r in runs if r["order"] == "raster")
    rows = []
    for r in runs:
        for (d0, _, e0), (d1, _, e1) in itertools.pairwise(raster):
            if r["order"] != "raster" and d0 <= r["density"] <= d1:
                share = (r["density"] - d0) / max(d1 - d0, 1e-12)
                gains = [x - (a + (b - a) * share) for x, a, b in zip(r["each"], e0, e1)]
                rows.append({"order": r["order"], "density": r["density"], "psnr": r["psnr"], "gains": gains})
    return rows


# ---------------------------------------- printing


def ratio(row: dict, threads: int) -> Ratio:
    """A cost as it is stored."""
    return Ratio(f"{row['what']}, threads {threads}", row["value"], row["unit"], higher=False)


def print_costs(rows: list[dict]) -> None:
    """One line a cost, beside its bar."""
    for r in rows:
        verdict = "ok" if r["value"] <= r["bar"] else "OVER"
        print(f"{r['what']:<72} {r['value']:>8.3f} {r['unit']:<12} bar {r['bar']:<6g} {verdict}", flush=True)


def print_order(study: dict) -> None:
    """The tables of the token-order study."""
    titles = {"exact": "share of blocks kept at equal true mass", "predicted": "density of XAttention's own masks at τ"}
    for name, title in titles.items():
        print(f"{'mass':>6} {'raster':>9} {'tiles':>9} {'change':>8} {'heads':>9} {'change':>8}   {title}")
        for p, row in study[name].items():
            changes = {o: row[o] / row["raster"] - 1 for o in ("tiles", "heads")}
            print(f"{p:>6} {row['raster']:>9.4f}" + "".join(f" {row[o]:>9.4f} {c:>8.1%}" for o, c in changes.items()))
        print()
    print(
        f"{'τ':>6}" + f" {'raster':>9} {'tiles':>9} {'heads':>9}" * 2 + "   output error; its share common to 4³ cells"
    )
    for p, row in study["errors"].items():
        print(f"{p:>6}" + "".join(f" {row[o][kind]:>9.4f}" for kind in ("relative", "common") for o in ORDERS))
    if "quality" not in study:
        return
    print(f"\n{'order':>8} {'τ':>6} {'density':>9} {'PSNR':>8}")
    for r in study["quality"]:
        print(f"{r['order']:>8} {r['tau']:>6} {r['density']:>9.4f} {r['psnr']:>8.2f}")
    for r in study["psnr_at_equal_density"]:
        gain, wide = _mean(r["gains"]), _interval(r["gains"])
        print(
            f"at density {r['density']:.3f}: {r['order']} {r['psnr']:.2f} dB, {gain:+.2f} ± {wide:.2f} beside the raster"
        )


def _interval(values: list[float]) -> float:
    """Half the 95 % interval of the mean; none from one value."""
    if len(values) < 2:
        return math.nan
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(values), 2.0)
    return t * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    """Measure and print."""
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
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.order:
        study = order_study(args.model, args.quick, args.steps, args.prompts, not args.no_quality)
        print(json.dumps(study, indent=1)) if args.json else print_order(study)
        return
    rows = list(costs(args.repeats))
    print(json.dumps(rows, indent=1)) if args.json else print_costs(rows)
    if not args.json:
        settle("end_to_end", [ratio(r, args.threads) for r in rows if "µs" not in r["unit"]], args.store)


if __name__ == "__main__":
    main()
