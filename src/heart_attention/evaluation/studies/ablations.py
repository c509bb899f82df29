"""The paper's ablation tables: components, reuse policy, δ, calibration objective; each a comparison of methods.

As in the paper, `policy` and `delta` run with calibrated thresholds and `objective` with mask reuse on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import HeartError
from ...files import write_atomic
from ...online.reuse import TMR, Interval, Warmup
from ...online.warmup import first_steps
from .. import cases, methods, pipelines, run, tables
from ..cases import Cluster
from ..methods import Method
from . import ABLATIONS

# Rows of the objective table and the error measures behind them; "" follows from the first one's band energies.
OBJECTIVES = {"3D-FFT": "spectral", "velocity MSE": "", "attention output": "attention"}


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
    calibrations: methods.Calibrations
    progress: Callable | None = None
    cluster: Cluster | None = None  # where generations and calibrations are made; None: here
    retime: bool = False  # what was timed on a busy machine is generated again

    def method(self, part: str, name: str | None = None, **changes) -> Method:
        """The backbone with one of the parts (tmr, ebc, heart or nothing), renamed and changed as wished."""
        full = f"{self.backbone}+{part}" if part else self.backbone
        changes.setdefault("force_sparse", True)  # parts are compared at equal sparsity, so none may go dense
        built = methods.build(full, self.pipe, self.model, self.calibrations, **changes)
        return dataclasses.replace(built, name=name or built.name)

    def reuse(self) -> Any:
        """The reuse policy of the model's preset."""
        return methods.build(f"{self.backbone}+tmr", self.pipe, self.model).config.reuse

    def run(self, chosen: Sequence[Method], name: str) -> dict:
        """Run them after dense; generations that another table made already are taken from the same folder."""
        steps = int(self.setting.call.get("num_inference_steps", 50))
        whole = [method.name for method in chosen if first_steps(method.config.dense_steps, steps) >= steps]
        if whole:
            raise HeartError(f"all {steps} steps are dense ones of {whole[0]}: give more steps")
        results = self.generate(chosen)
        summary = tables.summarise(results)
        write_atomic(self.out / f"{name}.md", tables.markdown(summary, results))
        (self.out / "results.json").replace(self.out / f"{name}.results.json")
        return {"name": name, "summary": summary, "results": results}

    def generate(self, chosen: Sequence[Method]) -> dict:
        """Dense and these methods on all prompts and seeds."""
        everything = [methods.build("dense", self.pipe, self.model), *chosen]
        with cases.opened(self.cluster) as executor:  # closed after each table: calibrations need the workers too
            return run.run(
                self.pipe, everything, self.prompts, self.seeds, self.setting, self.out, self.progress,
                executor=executor, retime=self.retime,
            )  # fmt: skip

    def conclude(self, table: dict, finding: str) -> dict:
        """The table with its finding, which is also written beside it."""
        write_atomic(self.out / f"{table['name']}.finding.txt", finding)
        return {**table, "finding": finding}


def _gain(table: dict, one: str, other: str) -> str:
    """How much PSNR one method has over another, with its 95 % interval."""
    mean, half = tables.difference(table["results"], one, other)
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
    """Interval, warm-up and TMR at matched shares of refreshed masks.

    (The paper matches the warm-up by speed and leaves the interval unmatched; docs/reproduction.md says so.)
    """
    tmr = bench.method("heart", "TMR")
    rate = next(e["refresh_rate"] for e in tables.summarise(bench.generate([tmr])) if e["method"] == "TMR")
    steps = bench.setting.call["num_inference_steps"]
    interval, warmup = matched_policies(rate, steps, tmr.config.first_dense_steps(steps))
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
    """The policies to try: the paper's absolute δ, or multiples of the model's own relative one."""
    base = bench.reuse()
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


def objective(bench: Bench, files: dict[str, str] | None = None) -> dict:
    """Calibrations by different error measures at the same budget: name → calibration file; none given: it makes them."""
    files = files or make_objectives(bench)
    if len(files) < 2:
        raise HeartError(f"the objective table needs two or more calibrations, not {len(files)}: give name=file pairs")
    chosen = [
        dataclasses.replace(bench.method("", name, reuse=bench.reuse(), **_point(path, bench)), name=name)
        for name, path in files.items()
    ]
    table = bench.run(chosen, "objective")
    rows = sorted((e for e in table["summary"] if e["method"] in files), key=lambda e: -e["psnr"])
    listed = " > ".join(
        f"{e['method']} ({e['psnr']:.2f} dB, SSIM {e['ssim']:.4f}, density {e['density']:.3f})" for e in rows
    )
    ahead = f"the first has {_gain(table, rows[0]['method'], rows[1]['method'])} over the second"
    return bench.conclude(table, f"{listed}; {ahead}; the paper: weighted 3D-FFT 21.61 dB over velocity MSE 21.54 dB.")


def _point(path: str, bench: Bench) -> dict:
    """What a calibration sets, as changes of a config."""
    config = methods.operating_point([path], bench.pipe)
    return {
        name: getattr(config, name) for name in ("backbone", "thresholds", "order", "dense_steps", "scale_clusters")
    }


def make_objectives(bench: Bench) -> dict[str, str]:
    """Calibrations by the paper's protocol with three error measures, in the results folder; finished ones are kept.

    Velocity MSE needs no measurement of its own: the stored band energies are weighted anew. Another model, backbone, size
    or number of steps has files of its own.
    """
    kind = [run.fingerprint(bench.pipe), bench.method("").config.to_dict(), bench.setting.call]
    key = hashlib.sha256(json.dumps(kind, sort_keys=True, default=str).encode()).hexdigest()[:12]
    files = {name: bench.out / f"objective-{name.replace(' ', '-')}-{key}.heart.json" for name in OBJECTIVES}
    for name, error in OBJECTIVES.items():
        if error and not files[name].is_file():
            _calibrate(bench, error, files[name])
    if not files["velocity MSE"].is_file():
        from ...calibration.file import Calibration

        spectral = Calibration.load(files["3D-FFT"])
        spectral.reweighted((1.0, 1.0, 1.0, 1.0)).resolve("shared=0.9").save(files["velocity MSE"])
    return {name: str(path) for name, path in files.items()}


def _calibrate(bench: Bench, error: str, path: Path) -> None:
    """By the paper's protocol, at the table's size and steps; a killed run goes on."""
    from ...calibration.workflow.calibrate import calibrate

    calibrate(
        bench.pipe, bench.backbone, call=dict(bench.setting.call), method="probes", error=error, out=path,
        **(dataclasses.asdict(bench.cluster) if bench.cluster else {}),
    )  # fmt: skip


def choose(which: str, model: str, objectives: bool) -> tuple[list[str], dict[str, str]]:
    """The tables to make, and those of `all` that are left out with the reason."""
    if which != "all":
        return [which], {}
    if objectives or model in pipelines.TINY:
        return list(ABLATIONS), {}
    reason = "because it calibrates three times: `heart ablate objective` makes it, or give --objectives"
    return [n for n in ABLATIONS if n != "objective"], {"objective": reason}


def tables_of(
    bench: Bench, deltas: Sequence[float] | None, objectives: dict[str, str]
) -> dict[str, Callable[[], dict]]:
    """Name of a table → what makes it."""
    return {
        "components": lambda: components(bench),
        "policy": lambda: policy(bench),
        "delta": lambda: delta(bench, deltas),
        "objective": lambda: objective(bench, objectives),
    }
