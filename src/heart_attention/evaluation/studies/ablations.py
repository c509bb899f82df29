"""The paper's ablation tables: components, reuse policy, δ, calibration objective; each a comparison of methods.

As in the paper, `policy` and `delta` run with calibrated thresholds and `objective` with mask reuse on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ...errors import HeartError
from ...files import write_atomic
from ...online.reuse import TMR, Interval, Warmup
from .. import methods, run

Run = Callable[[Sequence[run.Method], str], dict]


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where an ablation runs: pipeline, prompts, seeds, what the call looks like, and the results folder."""

    pipe: object
    model: str
    backbone: str
    prompts: Sequence[str]
    seeds: Sequence[int]
    setting: run.Setting
    out: Path
    calibrations: dict[str, list[str]]
    progress: Callable | None = None

    def method(self, part: str, name: str | None = None, **changes) -> run.Method:
        """The backbone with one of the parts (tmr, ebc, heart or nothing), renamed and changed as wished."""
        full = f"{self.backbone}+{part}" if part else self.backbone
        changes.setdefault("force_sparse", True)  # parts are compared at equal sparsity, so none may go dense
        built = methods.build(full, self.pipe, self.model, self.calibrations, **changes)
        return dataclasses.replace(built, name=name or built.name)

    def run(self, chosen: Sequence[run.Method], name: str) -> dict:
        """Run them after dense; generations that another table made already are taken from the same folder."""
        dense = methods.build("dense", self.pipe, self.model)
        results = run.run(self.pipe, [dense, *chosen], self.prompts, self.seeds, self.setting, self.out, self.progress)
        summary = run.summarise(results)
        write_atomic(self.out / f"{name}.md", run.markdown(summary, results))
        (self.out / "results.json").replace(self.out / f"{name}.results.json")
        return {"name": name, "summary": summary, "results": results}

    def conclude(self, table: dict, finding: str) -> dict:
        """The table with its finding, which is also written beside it."""
        write_atomic(self.out / f"{table['name']}.finding.txt", finding)
        return {**table, "finding": finding}


def _gain(table: dict, one: str, other: str) -> str:
    """How much PSNR one method has over another, with its 95 % interval."""
    mean, half = run.difference(table["results"], one, other)
    return f"{mean:+.2f} ± {half:.2f} dB" if half else f"{mean:+.2f} dB"


def components(bench: Bench) -> dict:
    """Backbone, + TMR, + EBC, + HEART."""
    table = bench.run([bench.method(part) for part in ("", "tmr", "ebc", "heart")], "components")
    rows = {e["method"]: e for e in table["summary"]}
    base, tmr, ebc, heart = (rows[bench.backbone + s] for s in ("", "+tmr", "+ebc", "+heart"))
    gains = [_gain(table, e["method"], base["method"]) for e in (tmr, ebc, heart)]
    finding = (
        f"Mask reuse alone changes attention time by {base['attention_s'] / tmr['attention_s']:.2f}× and PSNR by "
        f"{gains[0]}; calibrated thresholds alone by "
        f"{base['attention_s'] / ebc['attention_s']:.2f}× and {gains[1]} at density "
        f"{ebc['density']:.3f} against {base['density']:.3f}; both together by "
        f"{base['attention_s'] / heart['attention_s']:.2f}× and {gains[2]} "
        "(paper, Wan2.1-1.3B: +0.42, +0.76 and +0.57 dB)."
    )
    return bench.conclude(table, finding)


def matched_policies(refresh_rate: float, steps: int, dense_steps: int) -> tuple[Interval, Warmup]:
    """The interval and the warm-up whose share of refreshed steps comes nearest to `refresh_rate`."""
    sparse = max(1, steps - dense_steps)
    interval = min(range(1, sparse + 1), key=lambda n: abs(-(-sparse // n) / sparse - refresh_rate))
    warmup = min(range(1, sparse + 1), key=lambda n: abs(n / sparse - refresh_rate))
    return Interval(interval), Warmup(dense_steps + warmup)


def policy(bench: Bench) -> dict:
    """Interval, warm-up and TMR at matched reuse."""
    tmr = bench.method("heart", "TMR")
    probe = run.summarise(run.run(
        bench.pipe, [methods.build("dense", bench.pipe, bench.model), tmr], bench.prompts, bench.seeds, bench.setting,
        bench.out, bench.progress,
    ))  # fmt: skip
    rate = next(e["refresh_rate"] for e in probe if e["method"] == "TMR")
    interval, warmup = matched_policies(rate, bench.setting.call["num_inference_steps"], tmr.config.dense_steps)
    chosen = [
        bench.method("heart", f"Interval({interval.n})", reuse=interval),
        bench.method("heart", f"Warmup({warmup.n})", reuse=warmup),
        tmr,
    ]
    table = bench.run(chosen, "policy")
    rows = {e["method"]: e for e in table["summary"]}
    listed = ", ".join(f"{m.name} {rows[m.name]['psnr']:.2f} dB at {rows[m.name]['refresh_rate']:.0%}" for m in chosen)
    best = max(chosen, key=lambda m: rows[m.name]["psnr"]).name
    gains = " and ".join(f"{_gain(table, 'TMR', m.name)} over {m.name}" for m in chosen[:2])
    return bench.conclude(
        table,
        f"At matched shares of refreshed masks: {listed}; best is {best} (the paper: TMR). Prompt by prompt TMR has "
        f"{gains} (95 % intervals).",
    )


def deltas(bench: Bench, values: Sequence[float] | None = None) -> list[tuple[str, TMR]]:
    """The policies to try: the paper's absolute δ, or quantiles of the drift that this model really has."""
    base = methods.build(f"{bench.backbone}+heart", bench.pipe, bench.model, bench.calibrations).config.reuse
    if values is not None:
        return [(f"δ={v:g}", TMR(delta=v, gate=base.gate)) for v in values]
    if base.relative is None:
        return [(f"δ={v:g}", TMR(delta=v, gate=base.gate)) for v in (0.0, 10.0, 30.0, 100.0)]
    middle = float(np.mean(base.relative))
    return [(f"δ={v:.3g} rel.", TMR(relative=v, gate=base.gate)) for v in (0.0, middle / 3, middle, middle * 3)]


def delta(bench: Bench, values: Sequence[float] | None = None) -> dict:
    """What the reuse threshold does."""
    chosen = [bench.method("heart", name, reuse=tmr) for name, tmr in deltas(bench, values)]
    table = bench.run(chosen, "delta")
    rows = {e["method"]: e for e in table["summary"]}
    listed = ", ".join(
        f"{m.name}: {rows[m.name]['psnr']:.2f} dB, {rows[m.name]['refresh_rate']:.0%} refreshed, "
        f"{rows[m.name]['attention_speedup']:.2f}×"
        for m in chosen
    )
    return bench.conclude(table, f"{listed}. The paper finds a plateau up to 30 and a loss of 1.1 dB at 100.")


def objective(bench: Bench, files: dict[str, str]) -> dict:
    """Calibrations by different error measures at the same budget: name → calibration file."""
    if len(files) < 2:
        raise HeartError(f"the objective table needs two or more calibrations, not {len(files)}: give name=file pairs")
    from ...calibration.file import Calibration

    chosen = [bench.method("heart", name, thresholds=Calibration.load(path)) for name, path in files.items()]
    table = bench.run(chosen, "objective")
    rows = sorted((e for e in table["summary"] if e["method"] in files), key=lambda e: -e["psnr"])
    listed = " > ".join(
        f"{e['method']} ({e['psnr']:.2f} dB, SSIM {e['ssim']:.4f}, density {e['density']:.3f})" for e in rows
    )
    ahead = f"the first has {_gain(table, rows[0]['method'], rows[1]['method'])} over the second"
    return bench.conclude(table, f"{listed}; {ahead}; the paper: weighted 3D-FFT 21.61 dB over velocity MSE 21.54 dB.")
