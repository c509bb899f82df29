"""Calibration's figures on the embedded model: exactness, cost and what it buys, each beside the random-weight control.

    python benchmarks/calibrate.py [--size quick|native] [--parts skip,gradient,compare,video,cost] [--work DIR]

Everything that was measured is kept in the work folder, so a run that was stopped goes on. Times are CPU seconds of
this process and ratios of interleaved runs. Figures (bars in brackets):

- skip: probes from cached block inputs against whole forwards [≥ 1.6×, bit-exact];
- gradient: token-diagonal estimate of isolated errors against exact probes on the same contexts [Spearman ≥ 0.97, its
  assignment keeps ≥ 90 % of the exact one's gain];
- compare: joint velocity error on held-out prompts relative to the shared threshold, at equal realised sparsity: the
  paper's protocol with 3 and with 7 candidates (and with contexts weighed as the gradients' are), isolated gradients,
  joint gradients [joint < probes ≤ 0.8];
- video: PSNR against the dense video over held-out prompts for the same assignments [joint > probes > shared];
- cost: seconds and forward-equivalents of each method, and what the formula gives for large models.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heart_attention import tiny
from heart_attention.calibration.measure import gradient, probes, trajectory, velocity_error
from heart_attention.calibration.measure.candidates import DENSE
from heart_attention.calibration.solve import solver
from heart_attention.calibration.solve.case import Case
from heart_attention.calibration.solve.strategies import assign, by_isolated, by_joint, by_probes
from heart_attention.calibration.workflow import calibrate, plan
from heart_attention.calibration.workflow.phases import phases_of
from heart_attention.calibration.workflow.runner import Runner
from heart_attention.calibration.workflow.settings import CANDIDATES, PAPER_CANDIDATES
from heart_attention.calibration.workflow.store import Store
from heart_attention.calibration.workflow.tasks import CalibrationWorker
from heart_attention.evaluation import methods, pipelines, run, tables
from heart_attention.evaluation.studies.common import spearman
from heart_attention.execution.executor import LocalExecutor
from heart_attention.online import reuse
from heart_attention.presets import preset
from ratios import Ratio, add_arguments, settle

PARTS = ("skip", "gradient", "compare", "video", "cost")
LARGE = {"Wan2.1-1.3B": (30, 12), "Wan2.1-14B": (40, 40), "HunyuanVideo-13B": (60, 24)}


def settings_of(pipe: Any, args: argparse.Namespace, **more: Any) -> calibrate.Settings:
    """The embedded model's settings for one method."""
    config = preset(args.backbone, pipe)
    call = dict(tiny.QUICK if args.size == "quick" else tiny.NATIVE)
    if args.steps:
        call["num_inference_steps"] = args.steps
    return calibrate.Settings(
        config.backbone, tuple(tiny.prompts("calibration")[: args.prompts]), call,
        held_out=tuple(tiny.prompts("heldout")[: args.held_out]), contexts=args.contexts,
        held_out_contexts=args.held_out_contexts or args.held_out, order=config.order,
        scale_clusters=config.scale_clusters, realised=True,
        **more,
    )  # fmt: skip


def contexts_of(pipe: Any, settings: calibrate.Settings, work: Path, count: int) -> list[trajectory.Context]:
    """Some calibration contexts, made once."""
    settings = dataclasses.replace(settings, contexts=count, held_out=(), method="isolated")
    store = Store(work, plan.plan(pipe, settings))
    drawn = plan.draw_contexts(settings, *_size(pipe))
    worker = CalibrationWorker(pipe, settings.job())
    try:
        Runner(store, LocalExecutor(worker), None, phases_of(settings, pipe.scheduler)).trajectories(settings, drawn)
    finally:
        worker.close()
    return [trajectory.from_bytes(store.trajectories.read(p, s)) for p, s in drawn.calibration]


def _size(pipe: Any) -> tuple[int, int]:
    config = pipe.transformer.config
    return config.num_layers, config.num_attention_heads


def _cpu(function: Any) -> tuple[float, Any]:
    began = time.process_time()
    value = function()
    return time.process_time() - began, value


def skip(pipe: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One head of every layer, all candidates: cached inputs against whole forwards, interleaved."""
    settings = settings_of(pipe, args, method="probes")
    (context,) = contexts_of(pipe, settings, args.work / f"skip-{args.size}", 1)
    spec, measure = settings.spec(), velocity_error.Spectral()
    layers, heads = _size(pipe)
    worker, ratios, equal = CalibrationWorker(pipe, settings.job()), [], True
    try:
        replay = worker.replay
        list(probes.probe(replay, context, {0: [0]}, spec, measure))  # warm
        for head in range(args.repeats):
            wanted = {layer: [head % heads] for layer in range(layers)}
            quick, found = _cpu(lambda w=wanted: dict(probes.probe(replay, context, w, spec, measure, null=False)))
            slow = 0.0
            for layer, record in found.items():
                for k in range(len(spec.points)):
                    pick = {layer: [k if h == head % heads else DENSE for h in range(heads)]}
                    seconds, velocity = _cpu(lambda p=pick: probes.full_forward(replay, context, spec, p))
                    slow += seconds
                    value = velocity_error.spectral(velocity, context.reference())
                    equal &= value == record["heads"][str(head % heads)]["error"][k]
            ratios.append(slow / quick)
    finally:
        worker.close()
    limit = 2 * layers / (layers + 1)
    return {"speedup": float(np.median(ratios)), "all": ratios, "bit_exact": equal, "limit_of_skipping": limit}


def gradient_against_probes(pipe: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The same contexts, all heads, seven candidates: estimate against exact, and what its assignment keeps."""
    settings = settings_of(pipe, args, method="isolated")
    contexts = contexts_of(pipe, settings, args.work / f"gradient-{args.size}", args.same)
    spec, measure = settings.spec(), velocity_error.Spectral()
    layers, heads = _size(pipe)
    exact, estimate, S = [], [], []
    worker = CalibrationWorker(pipe, settings.job())
    try:
        for context in contexts:
            everything = {layer: range(heads) for layer in range(layers)}
            found = dict(probes.probe(worker.replay, context, everything, spec, measure, null=False))
            exact.append([[found[la]["heads"][str(h)]["error"] for h in range(heads)] for la in range(layers)])
            dense = [[DENSE] * heads] * layers
            made = gradient.differentiate(worker.replay, context, spec, dense, measure, settings.seed)
            estimate.append(made.second)
            S.append(made.sparsity)
    finally:
        worker.close()
    E, G, S = np.mean(exact, 0), np.mean(estimate, 0), np.mean(S, 0)
    best, ours = (solver.solve(table, S, shared=0.9, thresholds=spec.thresholds) for table in (E, G))
    at = spec.thresholds.index(0.9)
    shared, least, kept = E[..., at].sum(), _sum(E, best.choice), _sum(E, ours.choice)
    positive = E > 0
    return {
        "contexts": len(contexts),
        "spearman": spearman(E[positive].ravel(), G[positive].ravel()),
        "median_ratio": float(np.median(G[positive] / E[positive])),
        "gain_kept": float((shared - kept) / (shared - least)),
        "isolated_gain_of_exact": float(1 - least / shared),
    }


def _sum(E: np.ndarray, choice: np.ndarray) -> float:
    return float(np.take_along_axis(E, choice[..., None], -1).sum())


def compared(pipe: Any, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Held-out joint error of every method's assignment relative to the shared threshold's, equal realised sparsity.

    One store serves all methods: the same trajectories, the same contexts, the same seven candidates.
    """
    settings = settings_of(pipe, args, method="probes", candidates=CANDIDATES)
    store = Store(args.work / f"{Path(name).name}-{args.size}-{args.backbone}", plan.plan(pipe, settings))
    size, seconds = _size(pipe), {}
    contexts = plan.draw_contexts(settings, *size)
    worker = CalibrationWorker(pipe, settings.job())
    clock = _stages(seconds)
    phases = phases_of(settings, pipe.scheduler)
    runner = Runner(store, LocalExecutor(worker), clock, phases)

    def case(of: calibrate.Settings) -> Case:
        return Case(of, *size, phases)

    rows: dict[str, Any] = {}
    try:
        runner.trajectories(settings, contexts)
        jointly = dataclasses.replace(settings, method="joint", strata="sparse", mean="relative")
        joint = by_joint(case(jointly), contexts, runner)
        figures = calibrate.verification_of(case(jointly), contexts, runner, joint)
        made = calibrate.to_file(
            case(jointly),
            joint,
            figures,
            {**plan.plan(pipe, jointly), "grid": calibrate.grid_of(pipe.transformer, store, contexts)},
        )
        made.save(args.work / f"{args.backbone}.heart.json")
        isolated = by_isolated(case(dataclasses.replace(jointly, method="isolated")), contexts, runner)
        probed = by_probes(case(settings), contexts, runner)
        relative = by_probes(case(dataclasses.replace(settings, mean="relative")), contexts, runner)
        three = _restricted(case(settings), contexts, runner, probed, PAPER_CANDIDATES)
        found = {"shared": None, "probes, 3 candidates (the paper's)": three, "probes, 7 candidates": probed}
        found |= {"probes, 7 candidates, relative mean": relative, "isolated gradients, 7 candidates": isolated}
        plain = by_joint(case(dataclasses.replace(jointly, mean="plain")), contexts, runner)
        found |= {"joint gradients, 7 candidates, plain mean": plain, "joint gradients, 7 candidates": joint}
        shared = case(settings).shared
        base = {w: runner.verify("verifying", getattr(contexts, w), shared) for w in ("calibration", "held_out")}
        for label, outcome in found.items():
            choice = shared if outcome is None else outcome.choice
            rows[label] = _row(settings, contexts, runner, choice, base)
        clock("end", 0, 0, None)
    finally:
        worker.close()
    at = settings.taus.index(settings.shared)
    return {
        "rows": rows,
        "joint_over_additive": base["calibration"]["error"] / float(probed.error[..., at].sum()),
        "probes": probed.extra["probes"] | {"null_worst": probed.extra["null"]["worst"]},
        "search": joint.extra["search"],
        "cpu_seconds": seconds,
    }


def _restricted(case: Case, contexts: Any, runner: Any, probed: Any, candidates: tuple[float, ...]) -> Any:
    """The assignment when only some candidates may be chosen: the others get a prohibitive error."""
    E = probed.error.copy()
    E[..., [t not in candidates for t in case.settings.taus]] = 1e6 * E.sum()
    return assign(case, contexts, runner, E, probed.tables)


def _row(settings: Any, contexts: Any, runner: Any, choice: Any, base: dict[str, Any]) -> dict[str, Any]:
    made = {w: runner.verify("verifying", getattr(contexts, w), choice) for w in ("calibration", "held_out")}
    ratios = np.array(made["held_out"]["errors"]) / np.array(base["held_out"]["errors"])
    return {
        "held_out_vs_shared": made["held_out"]["error"] / base["held_out"]["error"],
        "mean_of_ratios": tables.interval(ratios),
        "calibration_vs_shared": made["calibration"]["error"] / base["calibration"]["error"],
        "sparsity": made["held_out"]["sparsity"],
        "thresholds": [[settings.taus[c] for c in row] for row in choice[0]],
    }


def _stages(seconds: dict[str, float]) -> Any:
    """A progress function that adds up CPU seconds by stage."""
    state: dict[str, Any] = {"stage": None, "at": time.process_time()}

    def progress(stage: str, done: int, total: int, left: float | None) -> None:
        now = time.process_time()
        if state["stage"] is not None:
            kind = state["stage"].split(",")[0]
            seconds[kind] = seconds.get(kind, 0.0) + now - state["at"]
        state.update(stage=stage, at=now)

    return progress


def videos(pipe: Any, args: argparse.Namespace, rows: dict[str, Any]) -> dict[str, Any]:
    """PSNR against dense over held-out prompts and seeds, without mask reuse: thresholds alone differ."""
    call = dict(settings_of(pipe, args).call)
    base = preset(args.backbone, pipe).replace(reuse=reuse.Always(), force_sparse=True)
    chosen = [
        methods.Method(label.replace(" ", "_").replace("'", ""), base.replace(thresholds=row["thresholds"]))
        for label, row in rows.items()
    ]
    setting = run.Setting("tiny", call, ("psnr",))
    prompts = tiny.prompts("heldout")[: args.held_out]
    dense = methods.build("dense", pipe, "tiny")
    out = args.work / f"video-{args.size}-{args.backbone}"
    seeds = list(range(1000, 1000 + args.seeds))
    results = run.run(pipe, [dense, *chosen], prompts, seeds, setting, out, warm=False)
    found = {}
    for method in chosen:
        rows_of = [r for r in results["rows"] if r["method"] == method.name]
        found[method.name.replace("_", " ")] = {
            "psnr": tables.interval([r["psnr"] for r in rows_of]),
            "gain_db": tables.difference(results, method.name, "shared"),
            "below_joint_db": tables.difference(results, chosen[-1].name, method.name),
            "density": float(np.mean([r["density"] for r in rows_of])),
        }
    return found


def cost(pipe: Any, args: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of a pass in units of one dense forward (both branches), and the formula for large models."""
    settings = settings_of(pipe, args, method="joint")
    (context,) = contexts_of(pipe, settings, args.work / f"skip-{args.size}-cost", 1)
    spec, measure = settings.spec(), velocity_error.Spectral()
    layers, heads = _size(pipe)
    at = settings.taus.index(0.9)
    worker, seen = CalibrationWorker(pipe, settings.job()), {"dense": [], "isolated": [], "joint": [], "verify": []}
    try:
        replay = worker.replay
        for _ in range(args.repeats):
            shared = [[at] * heads] * layers
            dense = [[DENSE] * heads] * layers
            seen["dense"].append(_cpu(lambda: probes.full_forward(replay, context, spec, {}))[0])
            for name, choice in (("isolated", dense), ("joint", shared)):
                run_it = lambda c=choice: gradient.differentiate(replay, context, spec, c, measure, 0)  # noqa: E731
                seen[name].append(_cpu(run_it)[0])
            seen["verify"].append(_cpu(lambda c=shared: gradient.verify(replay, context, spec, c, measure))[0])
    finally:
        worker.close()
    unit = min(seen["dense"])
    passes = {name: min(values) / unit for name, values in seen.items()}
    total = args.contexts * (passes["isolated"] + settings.rounds * passes["joint"] + 5 * passes["verify"])
    paper = {name: 12 * la * h for name, (la, h) in LARGE.items()}
    return {
        "seconds_of_a_forward": unit, "forward_equivalents": passes, "joint_total": total,
        "paper_here": 12 * layers * heads, "share_here": total / (12 * layers * heads),
        "formula": "contexts · (isolated pass + rounds · joint pass + 5 verifications)",
        "large": {n: {"paper": p, "joint": total, "share": total / p} for n, p in paper.items()},
    }  # fmt: skip


def ratios(parts: dict[str, Any], label: str) -> list[Ratio]:
    """What is stored of one model's parts."""
    found = []
    if "skip" in parts:
        found.append(Ratio(f"cached inputs, {label}", parts["skip"]["speedup"], "x of whole forwards"))
    if "gradient" in parts:
        found.append(Ratio(f"rank of gradients, {label}", parts["gradient"]["spearman"], "Spearman with exact probes"))
    for name, row in parts.get("compare", {"rows": {}})["rows"].items():
        found.append(Ratio(f"{name}, {label}", row["held_out_vs_shared"], "of the shared threshold's error", False))
    if "cost" in parts:
        found.append(Ratio(f"cost, {label}", parts["cost"]["share_here"], "of the paper's forwards", False))
    return found


def main() -> None:
    """Measure what is asked for; print a JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="the embedded model, or a folder with another training of it")
    parser.add_argument("--size", choices=("quick", "native"), default="quick")
    parser.add_argument("--backbone", default="xattention")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--work", type=Path, default=Path("calibrate-bench.work"))
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--held-out-contexts", type=int, help="one for each held-out prompt unless given")
    parser.add_argument("--contexts", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1, help="videos of every held-out prompt")
    parser.add_argument("--same", type=int, default=4, help="contexts on which the estimate meets exact probes")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--control", action="store_true", help="the random-weight model too, where that is meaningful")
    parser.add_argument("--threads", type=int)
    add_arguments(parser)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found: dict[str, Any] = {"size": args.size, "backbone": args.backbone, "threads": torch.get_num_threads()}
    models = [args.model, "tiny-random"] if args.control else [args.model]
    for model in models:
        pipe, mine = pipelines.load(model), {}
        parts = (
            args.parts.split(",")
            if model != "tiny-random"
            else [p for p in args.parts.split(",") if p in ("gradient", "compare")]
        )
        for part in parts:
            if part == "skip":
                mine[part] = skip(pipe, args)
            elif part == "gradient":
                mine[part] = gradient_against_probes(pipe, args)
            elif part == "compare":
                mine[part] = compared(pipe, args, model)
            elif part == "video":
                rows = (mine.get("compare") or compared(pipe, args, model))["rows"]
                mine[part] = videos(pipe, args, rows)
            elif part == "cost":
                mine[part] = cost(pipe, args)
            print(json.dumps({model: {part: mine[part]}}), flush=True)
        found[model] = mine
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "figures.json").write_text(json.dumps(found, indent=1))
    if args.model == "tiny":
        settle("calibrate", ratios(found[args.model], f"{args.backbone}, {args.size}"), args.store)


if __name__ == "__main__":
    main()
